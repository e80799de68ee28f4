"""Grouped products with matrices in 4-bit codes: a kernel decodes tiles on the chip, so it reads 4 bits a value."""
