"""Declared costs of operators: sums, under `vmap`, and as arguments of `@operator`."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.sharding.cost.step_time import declared_us
from autoshard.sharding.machines.chips import CHIPS
from autoshard.spmdrules.custom_ops.kernel_cost import KernelCost, declared_cost
from autoshard.spmdrules.custom_ops.operator import operator


def cost(x, w, *, factor):
    return KernelCost(flops=float(factor * x.shape[0] * w.shape[0]), itemsize=x.dtype.itemsize, moved_bytes=8.0)


@operator("b d, d -> b d; whole d", cost=cost)
def scaled(x, w, *, factor):
    return x * w * factor


def equation(fn, *shapes):
    (eqn,) = (
        e for e in jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).eqns
        if e.primitive.name == "scaled"
    )  # fmt: skip
    return eqn, [v.aval for v in eqn.invars]


def test_the_cost_gets_operands_and_options():
    found = declared_cost(*equation(lambda x, w: scaled(x, w, factor=3), (4, 5), (5,)))
    assert found == KernelCost(flops=60.0, itemsize=4, moved_bytes=8.0)


def test_under_vmap_the_cost_is_that_of_all_rows():
    fn = jax.vmap(lambda x, w: scaled(x, w, factor=3), (0, None))
    found = declared_cost(*equation(fn, (7, 4, 5), (5,)))
    assert found == KernelCost(flops=7 * 60.0, itemsize=4, moved_bytes=7 * 8.0)


def test_sums_and_the_peak_of_held_bytes():
    a, b = KernelCost(1.0, 2, 3.0, 4.0, 5.0, 6.0), KernelCost(10.0, 2, 30.0, 1.0, 50.0, 60.0)
    assert a.plus(b) == KernelCost(11.0, 2, 33.0, 4.0, 55.0, 66.0)


def test_the_slowest_unit_decides_and_overhead_is_added():
    chip = CHIPS["v6e"]
    assert chip.vector_ops == 4096 * 1.75e9
    by_vectors = declared_us(KernelCost(1.0, 2, 1.0, vector_ops=chip.vector_ops, overhead_us=7.0), chip)
    assert by_vectors == pytest.approx(1e6 + 7.0)
    assert declared_us(KernelCost(chip.flops, 2, 1.0, vector_ops=1.0), chip) == pytest.approx(1e6 / chip.efficiency)


def test_a_cost_that_is_no_function_is_an_error():
    with pytest.raises(TypeError, match="cost must be a function that returns a KernelCost, but got 3"):
        operator("b -> b", cost=3)  # pyright: ignore[reportArgumentType]
