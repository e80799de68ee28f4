"""Parts of the search for kernels (`fusion`): where values come from, and which reductions products compute."""
