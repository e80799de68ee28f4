"""Operators that compilers run later than their place in the program."""
