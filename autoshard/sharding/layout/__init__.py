"""From mesh axes to the sharding of every value and operator; shardings that users fix and request."""
