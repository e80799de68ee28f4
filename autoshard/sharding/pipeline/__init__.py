"""Cuts the loop over microbatches into stages that work at the same time: `pp:N`, `schedule=`."""
