"""Opaque code with a declared rule, and running an operator on shards."""
