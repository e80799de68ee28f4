"""Text, tokens, and batches loaded ahead of their use."""
