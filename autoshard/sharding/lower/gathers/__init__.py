"""Gathers of stored parameters and their order (`gather=`), and sums of rows that are scattered."""
