"""Rewrites the products of an optimizer's update, so that each device updates only some of the matrices."""
