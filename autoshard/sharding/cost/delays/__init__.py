"""Operators that the compilers run later than the program has them."""
