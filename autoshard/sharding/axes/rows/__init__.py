"""Rows: which axes of the data count rows that are computed apart, the batch and others."""
