"""Logical axes: how they are found, their uses, their roles and their names."""
