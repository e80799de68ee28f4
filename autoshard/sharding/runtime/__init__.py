"""From a call to the planned program: signatures, placement of arguments, agreement of processes."""
