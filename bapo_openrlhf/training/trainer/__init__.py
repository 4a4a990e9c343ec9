"""OpenRLHF's trainer actor: the stages of a step, from prompts to the record."""
