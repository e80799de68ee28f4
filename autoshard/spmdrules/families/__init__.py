"""The rules of JAX's primitives, one module for each family. Importing this package registers them all."""

from autoshard.spmdrules.families import (
    contraction,
    cudnn,
    data_movement,
    elementwise,
    grouped_matmul,
    host_callbacks,
    host_slots,
    indexing,
    linalg,
    manual_sharding,
    random,
    reduction,
    sorting,
    weight_gathers,
    window,
)
from autoshard.spmdrules.families.stacked import matrices, stages

FAMILIES = (
    elementwise,
    reduction,
    window,
    contraction,
    grouped_matmul,
    data_movement,
    indexing,
    random,
    sorting,
    linalg,
    host_callbacks,
    manual_sharding,
    cudnn,
    stages,
    matrices,
    host_slots,
    weight_gathers,
)
