"""Load a trained model and generate text with it."""
