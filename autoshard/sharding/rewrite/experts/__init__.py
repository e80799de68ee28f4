"""Replaces grouped products of experts, `lax.ragged_dot` and its gradients, by a kernel."""
