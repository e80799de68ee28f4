"""Notes of a plan on code that prevents a better plan, with the source line."""
