"""Time and memory of one step under a layout."""
