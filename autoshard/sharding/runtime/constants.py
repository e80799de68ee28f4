"""Constants of the runtime."""

# Number of values of one static leaf, each planned and compiled, at which a warning names it. Chosen: a handful of
# models or modes is normal, one text per batch is not. Only the warning depends on it.
MANY_STATIC_VALUES = 8
