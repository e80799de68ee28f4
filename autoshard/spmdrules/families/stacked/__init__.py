"""Operators on stacks that devices exchange: the layers of pipeline stages, and the matrices of an update."""

from autoshard.spmdrules.families.stacked.matrices import MATRIX_STACKS, spread_p
from autoshard.spmdrules.families.stacked.stages import LAYER_STACKS, TO_STAGES

EXCHANGES = LAYER_STACKS | MATRIX_STACKS
"""The names of the operators by which devices exchange layers or matrices. XLA partitions them."""
SPREADS = TO_STAGES | {spread_p.name}
"""The names of those that give devices whole layers or matrices."""
