"""Changes the traced step so that it needs fewer collectives: those of loops over time, and of equal slices."""
