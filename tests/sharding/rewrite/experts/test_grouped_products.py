"""Grouped products of experts in plain JAX become the kernel of a TPU or a GPU, with the same values and gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard import _compat, plan, replace_kernels
from autoshard.errors import PlanError
from autoshard.kernels.grouped.call import KERNELS
from autoshard.kernels.planned_platform import Planned, planned_for
from autoshard.sharding.rewrite.experts import grouped_products
from autoshard.sharding.rewrite.experts.grouped_products import grouped_product_of
from autoshard.sharding.rewrite.kernel_rewriting import kernels_in
from autoshard.sharding.rewrite.slices import Refused
from tests.arrays import array
from tests.sharding.rewrite.test_attention import relative_differences

DTYPES = KERNELS["tpu"][1]
ROWS, WIDTH, HIDDEN, GROUPS = 24, 6, 10, 4
TPU = Planned("tpu", 0)


def arguments(dtype: str = "float32") -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    up, down = (2, GROUPS, WIDTH, HIDDEN), (2, GROUPS, WIDTH, HIDDEN)
    params = {
        n: jax.random.normal(key, s, dtype) * 0.3
        for key, (n, s) in zip(keys, {"up": up, "down": down}.items(), strict=False)
    }
    return params, jax.random.normal(keys[2], (ROWS, WIDTH), dtype), jnp.array([5, 0, 11, 4], jnp.int32)


def loss(params: Any, x: jax.Array, sizes: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        hidden = jnp.tanh(lax.ragged_dot(x, w["up"], sizes))
        return x + lax.ragged_dot(hidden, jnp.swapaxes(w["down"], 1, 2), sizes), None

    return jnp.mean(lax.scan(jax.checkpoint(layer), x, params)[0].astype(jnp.float32) ** 2)


STEP = jax.value_and_grad(loss, argnums=(0, 1))


def names(closed: Any) -> list[str]:
    found = []
    for eqn in _compat.open_jaxpr(closed).eqns:
        found.append(eqn.primitive.name)
        for value in eqn.params.values():
            found += names(value) if _compat.is_jaxpr(value) else []
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_products_and_gradients_are_replaced_and_stay(dtype: str, bound: float) -> None:
    closed = jax.make_jaxpr(STEP)(*arguments(dtype))
    with planned_for(TPU):
        changed, records = kernels_in(closed, "splash")
    assert {(r.kernel, r.replaced, r.operator) for r in records} == {("megablox", True, "grouped product")}
    assert sum(r.count for r in records) == 7  # two products, one again under remat, and two gradients of each
    assert "ragged_dot_general" not in names(changed)
    found = jax.jit(_compat.jaxpr_as_function(changed))(*jax.tree.leaves(arguments(dtype)))
    expected = jax.jit(STEP)(
        *jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype != jnp.int32 else x, arguments(dtype))
    )
    found, expected = (jax.tree.map(lambda x: np.asarray(x, np.float32), tree) for tree in (found, expected))
    assert relative_differences(found, expected) < bound


def test_other_platforms_have_no_kernel() -> None:
    changed, records = kernels_in(jax.make_jaxpr(STEP)(*arguments()), "blockwise")
    assert records == []
    assert "ragged_dot_general" in names(changed)


@pytest.mark.whole
def test_replace_kernels_before_the_gradient() -> None:
    with planned_for(TPU):
        replaced = replace_kernels(loss, kernels="require")
        found = jax.jit(jax.value_and_grad(replaced, argnums=(0, 1)))(*arguments())
    assert all(record.replaced for record in getattr(replaced, "kernels"))  # noqa: B009
    assert relative_differences(found, jax.jit(STEP)(*arguments())) < 1e-5


def dot(x: Any, y: Any, numbers: Any, **options: Any) -> Any:
    sizes = jax.ShapeDtypeStruct((GROUPS,), jnp.int32)
    traced = jax.make_jaxpr(lambda x, y, sizes: lax.ragged_dot_general(x, y, sizes, numbers, **options))(x, y, sizes)
    return next(eqn for eqn in traced.jaxpr.eqns if eqn.primitive.name == "ragged_dot_general")


def shape(*sizes: int, dtype: str = "float32") -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


def numbers(x: int, y: int, ragged: int, groups: list[int], batch: Any = ((), ())) -> Any:
    return lax.RaggedDotDimensionNumbers((((x,), (y,)), batch), [ragged], groups)


@pytest.mark.parametrize(
    "eqn",
    [
        dot(shape(ROWS, 6), shape(GROUPS, 6, 10), numbers(1, 1, 0, [0])),
        dot(shape(ROWS, 6), shape(GROUPS, 10, 6), numbers(1, 2, 0, [0])),
        dot(shape(6, ROWS), shape(6, GROUPS, 10), numbers(0, 0, 1, [1])),
        dot(shape(6, ROWS), shape(10, 6, GROUPS), numbers(0, 1, 1, [2])),
        dot(shape(ROWS, 6), shape(ROWS, 10), numbers(0, 0, 0, [])),
        dot(shape(6, ROWS), shape(10, ROWS), numbers(1, 1, 1, [])),
    ],
)
def test_each_order_of_dimensions_is_read(eqn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = grouped_product_of(eqn, DTYPES)
    rng = np.random.default_rng(0)
    x, y = (array(rng.standard_normal(v.aval.shape), jnp.float32) for v in eqn.invars[:2])
    sizes = jnp.array([3, 0, 9, 7], jnp.int32)
    (result,) = found.compute(grouped_products.GroupedCall("tiled"), x, y, sizes)
    (expected,) = _compat.bind(eqn, eqn.params, x, y, sizes)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(type(found), "by_definition", lambda self, x, y, sizes: np.zeros(expected.shape))
    with pytest.raises(Refused, match="the proof failed"):
        grouped_product_of(eqn, DTYPES)


@pytest.mark.parametrize(
    ("eqn", "reason"),
    [
        (dot(shape(ROWS, 6, dtype="float16"), shape(GROUPS, 6, 10, dtype="float16"), numbers(1, 1, 0, [0])), "float16"),
        (
            dot(shape(ROWS, 6, dtype="bfloat16"), shape(GROUPS, 6, 10, dtype="bfloat16"), numbers(1, 1, 0, [0]),
                preferred_element_type=jnp.float32), "to float32",
        ),
        (dot(shape(ROWS, 6), shape(GROUPS, 6, 10), numbers(1, 1, 0, [0]), precision="highest"), "precision"),
        (dot(shape(2, ROWS, 6), shape(2, GROUPS, 6, 10), numbers(2, 2, 1, [1], ((0,), (0,)))), "batch dimensions"),
        (dot(shape(2, ROWS, 6), shape(GROUPS, 6, 10), numbers(2, 1, 1, [0])), "the kernel"),
    ],
)  # fmt: skip
def test_what_the_kernel_does_not_compute_is_left(eqn: Any, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        grouped_product_of(eqn, DTYPES)


def test_plans_for_a_tpu_list_grouped_products() -> None:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments())
    made = plan(STEP, *shapes, target="v5e:2x2", plan="dp:4", kernels="require")
    assert {record.operator for record in made.kernels} == {"grouped product"}
    assert "kernels: grouped product at" in str(made)
    half = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float16 if x.dtype != jnp.int32 else x.dtype), shapes
    )
    with pytest.raises(PlanError, match=r"grouped product cannot be replaced at .*test_grouped_products.py:\d+"):
        plan(STEP, *half, target="v5e:2x2", plan="dp:4", kernels="require")


def test_plans_for_a_gpu_take_its_kernel_for_16_bits() -> None:
    args = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype != jnp.int32 else x, arguments())
    made = plan(STEP, *args, target="h100:4", plan="dp:4", kernels="require")
    assert {(record.kernel, record.replaced) for record in made.kernels} == {("triton", True)}
    with pytest.raises(PlanError, match="bfloat16 or float16, and returns it; not float32"):
        plan(STEP, *arguments(), target="h100:4", plan="dp:4", kernels="require")
