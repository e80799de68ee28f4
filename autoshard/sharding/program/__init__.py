"""The traced program: its state, its operators, their sizes and FLOPs."""
