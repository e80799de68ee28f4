"""The rules of JAX's primitives, family by family."""
