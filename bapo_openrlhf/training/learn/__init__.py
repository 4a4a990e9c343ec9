"""Learn: log-probs, advantages and updates of a batch, in the processes of the models."""
