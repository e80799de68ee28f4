"""The trainer: a config, text or your own data, a model, a plan, and everything a run leaves behind."""
