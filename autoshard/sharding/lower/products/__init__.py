"""Products that are lowered in another form than the program's."""
