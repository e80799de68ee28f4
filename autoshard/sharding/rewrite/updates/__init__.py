"""Rewrites the products of an optimizer's update, so that each device computes whole matrices of its own."""
