"""The trainer: its config, data, model, plan and training loop, and the files of a run."""
