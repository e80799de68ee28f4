"""Time and memory of parameters that are gathered early or in order (`gather=`); collectives of the program's constraints."""
