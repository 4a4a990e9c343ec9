"""The processes of the models: actor, critic, reference and reward model."""
