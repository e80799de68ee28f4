"""Candidates, the known plans, and the search for the best of them."""
