"""Rows of instruction data: read from files, encoded with a mask of the answers, packed, and made into batches."""
