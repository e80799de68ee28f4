"""Finds the layers of a program: a scan over them, or equal blocks one after another, which become a scan."""
