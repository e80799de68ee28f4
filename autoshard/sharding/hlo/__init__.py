"""Parses compiled programs and prices them: instructions, collectives, trip counts, kernels, links."""
