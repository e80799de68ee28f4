"""Merged dimensions whose elements may be in any order, so that each device merges its own rows."""
