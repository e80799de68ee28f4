"""Products of groups of rows, each with its own matrix, as experts compute them: operators, kernels and their costs."""
