"""Heuristic bounds in reading programs. All are chosen, not measured. Only `MAX_STATE_DEPTH` can change a plan."""

# Number of entries of a list that a message or a report shows before it gives the number of the rest.
SHOWN = 6

# Number of suggestions for a mistyped path (`path_patterns.suggestions`): for each kind of similarity, and in total.
SUGGESTIONS_EACH, SUGGESTIONS = 3, 4

# Largest depth in the results at which `state_matching.match` looks for the updated value of an argument: 0 is all
# results, 1 an element of a returned tuple. An argument that is returned deeper is not recognised as state.
MAX_STATE_DEPTH = 3

# How deep the attributes of a static leaf are searched for arrays (`hidden_arrays`): an object, a container in it, an
# object in that, its attributes. Chosen. Arrays further inside are not found, and become constants.
SEARCHED_DEPTH = 4

# Of each container, the search looks at this many items, and in all at this many values that are neither numbers nor
# text: a vocabulary of 50,000 words must not slow down a call. Chosen: the search takes at most a millisecond.
SEARCHED_ITEMS, SEARCHED_VALUES = 64, 1000
