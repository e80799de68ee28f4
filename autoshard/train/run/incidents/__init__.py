"""Bad steps of a run: what was bad, what is done about it, and which batches are left out."""
