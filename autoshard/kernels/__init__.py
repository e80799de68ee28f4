"""Fused kernels as operators with declared rules and declared costs, and the choice among them by platform."""
