"""Reference for people: derived rules of named operators, tables of all rules, coverage of JAX's primitives."""
