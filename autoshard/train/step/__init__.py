"""The optimizer, the train state, the moving average of the parameters, and the train step as a function of arrays."""
