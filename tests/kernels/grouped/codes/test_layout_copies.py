"""XLA:TPU stores some codes transposed, and copies them for a kernel. The cost says which."""

import re

import jax
import jax.numpy as jnp
import pytest

from autoshard import plan
from autoshard.kernels.grouped.codes.cost import layout_copy
from autoshard.sharding.audit import compile_job, export_plan
from autoshard.sharding.planner.bound_plan import bound_or_error

LAYERS = 3
SHAPES = [
    (4, 2880, 2880), (8, 1440, 2880), (8, 2880, 1440), (8, 720, 2880), (8, 2880, 720),
    (4, 96, 2880), (4, 2880, 96), (4, 512, 1024), (2, 4096, 14336), (2, 2880, 360),
]  # fmt: skip


@pytest.mark.tpu_compile
@pytest.mark.slow
def test_the_compiler_copies_the_codes_that_the_cost_says():
    def step(stacks, layer, x):
        return [jax.lax.dynamic_index_in_dim(codes, layer)[0].astype(jnp.float32) * x for codes in stacks]

    stacks = [jax.ShapeDtypeStruct((LAYERS, *shape), "float4_e2m1fn") for shape in SHAPES]
    others = jax.ShapeDtypeStruct((), "int32"), jax.ShapeDtypeStruct((), "float32")
    made = plan(step, stacks, *others, target="v6e:1x1")
    result = compile_job(export_plan(bound_or_error(made.bound).executable, {}), 600.0)
    assert result.kind == "ok", result.message
    stored = dict(re.findall(r"f4e2m1fn\[([\d,]+)\]\{([\d,]+):\S* parameter\(", result.text))
    turned = {shape: stored[",".join(map(str, (LAYERS, *shape)))] == "2,3,1,0" for shape in SHAPES}
    assert turned == {shape: layout_copy(*shape) is not None for shape in SHAPES}
    assert {*turned.values()} == {True, False}
