"""Convolutions that are matrix products have the same values, and the traffic of a matrix's gradient."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.sharding.lower import lowering
from autoshard.sharding.lower.products.conv_as_matmul import add_window_dims, drop_window_dims, is_matmul, matmul
from autoshard.spmdrules.ir.program import Op, build


def convolutions(fn: Callable[..., Any], *args: Any) -> list[Op]:
    program = build(jax.make_jaxpr(fn)(*args))
    return [op for op in program.ops() if op.name == "conv_general_dilated"]


def conv(x: jax.Array, w: jax.Array, stride: int = 1, layout: str = "NHWC", kernel: str = "", **more: Any) -> jax.Array:
    spatial = layout.replace("N", "").replace("C", "")
    numbers = (layout, kernel or spatial + "IO", layout)
    return lax.conv_general_dilated(x, w, (stride,) * len(spatial), "SAME", dimension_numbers=numbers, **more)


def kernel_gradient(x: jax.Array, w: jax.Array, **options: Any) -> Callable[..., jax.Array]:
    return lambda x, w: jax.grad(lambda w: (jnp.sin(conv(x, w, **options)) ** 2).sum())(w)


CASES = {
    "1 x 1": ((4, 6, 6, 3), (1, 1, 3, 5), {}),
    "every second pixel": ((4, 6, 6, 3), (1, 1, 3, 5), {"stride": 2}),
    "every third of seven": ((4, 7, 7, 3), (1, 1, 3, 5), {"stride": 3}),
    "channels first": ((4, 3, 6, 5), (1, 1, 3, 5), {"layout": "NCHW"}),
    "output features first": ((4, 6, 6, 3), (5, 3, 1, 1), {"kernel": "OIHW", "stride": 2}),
    "one dimension": ((4, 8, 3), (1, 3, 5), {"layout": "NWC", "stride": 2}),
    "three dimensions": ((2, 4, 4, 6, 3), (1, 1, 1, 3, 5), {"layout": "NDHWC"}),
    "another precision": ((4, 6, 6, 3), (1, 1, 3, 5), {"precision": lax.Precision.HIGHEST}),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_of_a_1_x_1_kernel_is_a_matmul(name: str) -> None:
    shape, kernel, options = CASES[name]
    x, w = jax.random.normal(jax.random.key(0), shape), jax.random.normal(jax.random.key(1), kernel)
    *_, op = convolutions(kernel_gradient(x, w, **options), x, w)
    assert is_matmul(op)
    lhs, rhs = (jax.random.normal(jax.random.key(i), v.aval.shape) for i, v in enumerate(op.eqn.invars))
    want = op.eqn.primitive.bind(lhs, rhs, **op.eqn.params)
    match = matmul(op, lhs, rhs)
    spec = tuple((f"axis{dim}",) for dim in range(want.ndim))
    sharded_dims = [axes for axes, size in zip(spec, want.shape, strict=True) if size > 1]
    assert list(drop_window_dims(op, spec)) == sharded_dims
    np.testing.assert_allclose(add_window_dims(op, match), want, rtol=1e-5, atol=1e-5)


def test_other_convolutions_are_not_matmuls() -> None:
    """Convolutions with a moving window, padding, groups or dilation are not, even if the result is a single pixel."""
    x, w = jnp.ones((4, 6, 6, 4)), jnp.ones((1, 1, 4, 8))
    forward, *_ = convolutions(conv, x, w)
    assert not is_matmul(forward)
    *_, wide = convolutions(kernel_gradient(x, jnp.ones((3, 3, 4, 8))), x, jnp.ones((3, 3, 4, 8)))
    assert not is_matmul(wide)
    grouped = jnp.ones((1, 1, 2, 8))
    *_, groups = convolutions(kernel_gradient(x, grouped, feature_group_count=2), x, grouped)
    assert not is_matmul(groups)

    def to_a_pixel(x: jax.Array, w: jax.Array, padding: Any = ((0, 0), (0, 0)), **more: Any) -> jax.Array:
        return lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), **more)

    assert is_matmul(convolutions(to_a_pixel, jnp.ones((4, 3, 3, 4)), jnp.ones((3, 3, 4, 8)))[0])
    for pad, more in ((((1, -1), (1, -1)), {}), (((0, 0), (0, 0)), {"lhs_dilation": (2, 2)})):
        size = 3 if more else 2
        [op] = convolutions(lambda x, w, p=pad, m=more: to_a_pixel(x, w, p, **m), *_pixel(2, size))
        assert op.eqn.outvars[0].aval.shape[1:3] == (1, 1) and not is_matmul(op)


def _pixel(size: int, kernel: int) -> tuple[jax.Array, jax.Array]:
    return jnp.ones((4, size, size, 4)), jnp.ones((kernel, kernel, 4, 8))


def step(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    def loss(weights: list[jax.Array]) -> jax.Array:
        y = x
        for w in weights:
            y = jax.nn.relu(conv(y, w.astype(jnp.bfloat16).astype(w.dtype), 2 if w.shape[0] == 1 else 1))
        return (y**2).mean()

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


WEIGHTS = [jax.ShapeDtypeStruct((k, k, 512, 512), jnp.float32) for k in (3, 3, 1, 1)]


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["fsdp:8", "dp:2 fsdp:4"])
def test_values_and_gradients_equal_one_device(strategy: str) -> None:
    weights = [jax.random.normal(jax.random.key(i), (k, k, 16, 16)) / 12 for i, k in enumerate((3, 3, 1))]
    x = jax.random.normal(jax.random.key(9), (256, 16, 16, 16))
    new, value = autoshard.auto_shard(step, plan=strategy)(weights, x)
    want, loss = step(weights, x)
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    for one, other in zip(new, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_kernel_is_gathered_once_and_its_gradient_is_reduce_scattered() -> None:
    """One gather serves the reversed kernel, too. A 1 x 1 kernel's gradient is reduced like that of a matrix."""
    x = jax.ShapeDtypeStruct((1024, 16, 16, 512), jnp.float32)
    audit = autoshard.plan(step, WEIGHTS, x, plan="fsdp:8", target="v5e:4x2").verify()
    assert {c.kind for c in audit.collectives if c.wire_bytes > 1000} == {"all-gather", "reduce-scatter"}
    assert audit.unplanned_bytes < 1000 and audit.wire_bytes == pytest.approx(audit.predicted_wire_bytes, rel=0.02)


def test_a_batch_that_is_sharded_further_has_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a sum over tp at (dp, fsdp) directly to ((dp, fsdp), tp), XLA's partitioner computes wrong values."""
    x, w = jax.random.normal(jax.random.key(0), (8, 1, 1, 112)), jax.random.normal(jax.random.key(1), (1, 1, 112, 336))
    specs = {"0": P(("dp", "fsdp"), None, None, "tp"), "1": P(None, None, "tp", "fsdp")}
    sharded = autoshard.auto_shard(conv, mesh={"dp": 2, "fsdp": 2, "tp": 2}, fixed=specs)
    monkeypatch.setattr(lowering, "written_spec", lambda *_: (("dp", "fsdp"), (), (), ("tp",)))
    np.testing.assert_allclose(sharded(x, w), conv(x, w), rtol=1e-4, atol=1e-4)
