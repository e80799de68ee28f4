"""Read a trained model back and generate with it."""
