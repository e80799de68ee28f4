"""Write a layout into the program, and put that program under `jax.jit`."""
