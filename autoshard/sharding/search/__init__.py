"""Candidates, the known plans, and the best of them."""
