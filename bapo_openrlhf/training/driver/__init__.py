"""The process of `train`: it builds the run, waits for it, and passes signals on."""
