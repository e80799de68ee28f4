"""Reads the masks of a recognised attention: static ones from positions, and arrays of segments and of padding."""
