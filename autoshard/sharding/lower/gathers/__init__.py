"""The order in which stored parameters are gathered: `gather=`."""
