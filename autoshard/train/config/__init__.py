"""Settings, presets, the command line, and the folder of a run."""
