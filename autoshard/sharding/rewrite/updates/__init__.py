"""Rewrites the products of an optimizer's update, so that each device updates whole matrices of its own."""
