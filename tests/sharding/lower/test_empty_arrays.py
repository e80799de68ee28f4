"""Empty batches, experts without tokens, and empty exchanges keep their shapes and have zero gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from autoshard import auto_shard, check_rule, propagate

PLANS = (None, "dp:8", "fsdp:8", "tp:8", "dp:2 fsdp:2 tp:2")
RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def mlp_step(params: dict[str, Any], x: Any, y: Any) -> Any:
    def loss_of(p: dict[str, Any]) -> Any:
        hidden = jax.nn.relu(x @ p["w1"] + p["b1"])
        return ((hidden @ p["w2"] - y) ** 2).sum() / max(x.shape[0], 1)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss, gradients


@pytest.mark.few(3)
@pytest.mark.parametrize("plan", PLANS)
def test_an_empty_batch_changes_nothing(plan):
    params = {"w1": normal(16, 32), "b1": normal(32), "w2": normal(32, 8)}
    step = auto_shard(mlp_step, plan=plan)
    new, loss, gradients = step(params, normal(0, 16), normal(0, 8))
    assert float(loss) == 0.0
    assert all(not np.asarray(g).any() for g in jax.tree.leaves(gradients))
    jax.tree.map(np.testing.assert_array_equal, new, params)
    full = step(params, normal(8, 16), normal(8, 8))  # a batch of another size is planned again
    assert float(full[1]) > 0


def expert_step(params: dict[str, Any], tokens: Any, counts: Any) -> Any:
    def loss_of(p: dict[str, Any]) -> Any:
        hidden = jnp.tanh(lax.ragged_dot(tokens, p["up"], counts))
        return (jnp.tanh(lax.ragged_dot(hidden, p["down"], counts)) ** 2).sum()

    return jax.value_and_grad(loss_of)(params)


@pytest.mark.few(2)
@pytest.mark.parametrize("counts", [[0, 16, 8, 0], [24, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("plan", [None, "fsdp:8", "dp:2 fsdp:2 tp:2"])
def test_an_expert_without_tokens_gets_no_gradient(plan, counts):
    params, tokens = {"up": normal(4, 16, 32) / 4, "down": normal(4, 32, 16) / 6}, normal(24, 16)
    loss, gradients = auto_shard(expert_step, plan=plan)(params, tokens, np.asarray(counts, np.int32))
    expected, plain = jax.jit(expert_step)(params, tokens, np.asarray(counts, np.int32))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for actual, whole in zip(jax.tree.leaves(gradients), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(actual, whole, rtol=1e-4, atol=1e-5)
        assert all(np.asarray(actual[e]).any() == (n > 0) for e, n in enumerate(counts))


@pytest.mark.parametrize("shape", [(4, 8, 0), (4, 0, 3), (0, 8, 3)], ids=str)
def test_an_empty_exchange_has_its_shape(shape):
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("x",))
    local = lambda x: lax.all_to_all(x, "x", 1, 0, tiled=True)  # noqa: E731
    exchange = jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P(None, "x"))
    x = np.zeros(shape, np.float32)
    assert np.asarray(auto_shard(exchange, mesh=mesh)(x)).shape == shape
    assert check_rule(exchange, x) == []


@pytest.mark.few(5)
@pytest.mark.parametrize("fn", [
    lambda x: jnp.concatenate([x, x], 1), lambda x: x.T, lambda x: x.reshape(4, 2, 0), lambda x: jnp.cumsum(x, 1),
    lambda x: x @ x.T, lambda x: x.sum(1), lambda x: jnp.sort(x), jax.nn.softmax, lambda x: x[:, :0] + 1,
    lambda x: jnp.pad(x, ((0, 0), (2, 2))),
], ids=range(10))  # fmt: skip
def test_operators_on_empty_arrays(fn):
    x = np.zeros((8, 0), np.float32)
    expected = fn(x)
    assert propagate(fn, x, in_specs=P("d"), mesh={"d": 2}).out_specs is not None
    actual = auto_shard(fn)(x)
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))
    assert check_rule(fn, x) == []
