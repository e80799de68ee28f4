"""The price of one run of an operator under a sharding, and what is known of prices already."""
