"""How a program uses its weights: the axes that cover them, and weights that are computed from parameters."""
