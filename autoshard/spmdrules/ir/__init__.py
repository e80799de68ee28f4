"""A jaxpr with its nested ones as one list of operators over numbered values."""
