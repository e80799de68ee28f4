"""One page of a run: what it trained, how fast, what went wrong, and under which plan."""
