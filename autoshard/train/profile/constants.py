"""Files of a trace in a run's folder, and constants of the comparison."""

FOLDER = "profile"  # in the run's folder; TensorBoard and XProf open it
NAMES = "collectives.json"  # in that folder
FORMAT = 1  # of that file
STEP = "train"  # the name of a step in a trace, by which XProf finds its steps
ROWS_SHOWN = 20  # rows of a table; chosen
