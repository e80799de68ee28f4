"""Declared costs of operators: sums, under `vmap`, and as arguments of `@operator`."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.sharding.machines.chips import CHIPS
from autoshard.sharding.machines.kernel_time import declared_us
from autoshard.spmdrules.custom_ops.kernel_cost import KernelCost, declared_costs
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
    found = declared_costs(*equation(lambda x, w: scaled(x, w, factor=3), (4, 5), (5,)))
    assert found == (KernelCost(flops=60.0, itemsize=4, moved_bytes=8.0),)


def test_under_vmap_the_cost_is_that_of_all_rows():
    fn = jax.vmap(lambda x, w: scaled(x, w, factor=3), (0, None))
    found = declared_costs(*equation(fn, (7, 4, 5), (5,)))
    assert found == (KernelCost(flops=7 * 60.0, itemsize=4, moved_bytes=7 * 8.0),)


def test_a_cost_of_another_type_is_an_error():
    eqn, operands = equation(lambda x, w: scaled(x, w, factor=3), (4, 5), (5,))
    wrong = eqn.replace(params={**eqn.params, "cost": lambda *_: 3.0})
    with pytest.raises(TypeError, match="operator 'scaled': cost returns 3.0; it must return a KernelCost"):
        declared_costs(wrong, operands)


def test_the_slowest_unit_decides_and_overhead_is_added():
    chip = CHIPS["v6e"]
    assert chip.vector_ops == 4096 * 1.75e9
    by_vectors = declared_us(KernelCost(1.0, 2, 1.0, vector_ops=chip.vector_ops, overhead_us=7.0), chip)
    assert by_vectors == pytest.approx(1e6 + 7.0)
    assert declared_us(KernelCost(chip.flops, 2, 1.0, vector_ops=1.0), chip) == pytest.approx(1e6 / chip.efficiency)
    half = KernelCost(chip.flops, 2, 1.0, efficiency=0.5)
    assert declared_us(half, chip) == pytest.approx(2e6 / chip.efficiency)


def test_a_cost_that_is_no_function_is_an_error():
    with pytest.raises(TypeError, match="cost must be a function that returns a KernelCost, but got 3"):
        operator("b -> b", cost=3)  # pyright: ignore[reportArgumentType]
