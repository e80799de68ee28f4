"""From mesh axes over logical axes to the sharding of every value and operator; what users fix and request."""
