"""Train steps of many styles in plain JAX, as people write them. None uses autoshard's models."""
