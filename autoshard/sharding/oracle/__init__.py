"""The oracle: checks rules by running operators on shards and comparing with the unsharded results."""
