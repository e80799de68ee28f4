"""Operators for opaque code: a declared rule for a function, and running it on shards."""
