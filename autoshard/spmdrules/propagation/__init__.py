"""Walks over a program that find the sharding of every value."""
