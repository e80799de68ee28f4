"""The price of one run of an operator under a sharding, and a cache of such prices."""
