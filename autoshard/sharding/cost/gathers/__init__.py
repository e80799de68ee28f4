"""Time and memory of parameters that are gathered early or in order (`gather=`), and of the program's constraints."""
