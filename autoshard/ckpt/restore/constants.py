"""Bounds of retries and of lists in messages. All are chosen, not measured."""

# Number of times that a reader tries to read the newest step while another process removes it (`step_reader`).
MAX_READ_TRIES = 10

# Number of steps that an error message lists (`step_reader`).
STEPS_SHOWN = 10

# Number of leaves, largest first, that the text of a `Description` lists (`checkpoint_info`).
LEAVES_SHOWN = 8
