"""Attention over a sequence that several devices hold: keys and values travel around a ring of them."""
