"""A plan as data: inputs, results, estimate, record of the search; its JSON form."""
