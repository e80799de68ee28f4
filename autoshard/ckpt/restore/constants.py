"""Bounds of retries and of lists in messages. All are chosen, not measured."""

# A reader of the newest step gives up if another process removed that step in this many tries and for this many seconds
# (`step_reader`). It waits between tries, so that a fast failure does not keep a core and an object store busy. Only
# file systems without locks need more than a few tries.
MIN_READ_TRIES = 10
READ_PATIENCE_S = 60.0
READ_PAUSE_S = 0.01

# Number of steps that an error message lists (`step_reader`).
STEPS_SHOWN = 10

# Number of leaves, largest first, that the text of a `Description` lists (`checkpoint_info`).
LEAVES_SHOWN = 8
