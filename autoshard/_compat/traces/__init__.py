"""Rewrites traces of newer or optional modes of JAX into the operators that the other parts of autoshard know."""
