"""From names to a model and data; the step under its plan; evaluation and timing."""
