"""Constants of the models that read images."""

SMALLEST_BUCKET = 256
"""Smallest number of patches of a packed row; larger ones are powers of two. Chosen: one image of 224 x 224 pixels."""

PLANNED_PATCHES = 1024
"""Patches of each row of the batch that a plan is made for. Chosen: one image of 448 x 448 pixels, with 14 a patch."""
