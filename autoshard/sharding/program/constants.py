"""Heuristic bounds in reading programs. All are chosen, not measured; none depends on the models of the benchmark."""

# Entries of a list that a message or a page shows before it says how many more there are (`path_patterns`, `report`).
SHOWN = 6
# Suggestions for a mistyped path: of each way to find one, and in total (`path_patterns.suggestions`).
SUGGESTIONS_EACH, SUGGESTIONS = 3, 4
# Depth in the results down to which a subtree can be the counterpart of an argument (`state_matching.match`): 1 is an
# element of a returned tuple, 3 a subtree two levels below it.
MAX_STATE_DEPTH = 3
