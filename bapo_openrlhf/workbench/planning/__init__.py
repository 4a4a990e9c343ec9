"""What a run would need, predicted from few named constants: memory and responses. Nothing is measured."""
