"""Text data, tokenizers, and batches loaded ahead of their use."""
