"""Read a step back, and describe what it holds."""
