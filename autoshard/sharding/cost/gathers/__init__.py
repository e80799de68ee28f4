"""Time and memory of parameters that are gathered early or one after another: `gather=`."""
