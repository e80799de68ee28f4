"""Read compiled programs: instructions, collectives, trip counts, kernels, time on the links."""
