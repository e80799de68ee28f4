"""Choose the fastest of several plans, by the compiler or by running them."""
