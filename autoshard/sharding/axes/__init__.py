"""Logical axes: what they are, which operators use them, their roles and names."""
