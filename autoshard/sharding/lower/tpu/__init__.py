"""What XLA:TPU needs to be told so that it compiles a program as planned."""
