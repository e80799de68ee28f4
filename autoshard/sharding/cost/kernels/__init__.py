"""Parts of the search for kernels (`fusion`): kinds of operators, sources of values, and reductions of products."""
