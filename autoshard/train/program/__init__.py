"""Build the model and the data, plan the train step, evaluate and time it."""
