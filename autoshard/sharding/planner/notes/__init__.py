"""Notes of a plan on what in the program keeps it from a better plan, with the source line."""
