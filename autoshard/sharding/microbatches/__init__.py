"""Cuts a traced step into microbatches: one loop over parts of the batch, whose sums are accumulated."""
