"""Attention is recognised however it is written, and nothing else is."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import _compat
from autoshard.sharding.rewrite.kernel_rewriting import kernels_in
from tests.sharding.rewrite.formulations import FORMULATIONS, POLICIES, SEQ, parameters, rows, step_of
from tests.sharding.rewrite.look_alikes import LOOK_ALIKES, REPLACED

# bfloat16 rounds weights and results at other places in the kernel.
LOW_PRECISION = {"float32_inside": 3e-2}


def relative_differences(found: Any, expected: Any) -> float:
    """The largest difference of a leaf, relative to the norm of all leaves of its kind."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    norm = max(float(np.linalg.norm(y)) for _, y in pairs[1:])
    return max(float(np.linalg.norm(np.asarray(x) - np.asarray(y))) for x, y in pairs) / norm


def scores_between_frames(closed: Any) -> list[str]:
    """Arrays of the scores' size that loops or checkpoints take or return."""
    found = []
    for eqn in _compat.open_jaxpr(closed).eqns:
        if eqn.primitive.name in ("scan", "remat2"):
            found += [str(v.aval) for v in (*eqn.invars, *eqn.outvars) if v.aval.shape.count(SEQ) > 1
                      and np.issubdtype(v.aval.dtype, np.floating)]  # fmt: skip
        for value in eqn.params.values():
            if _compat.is_jaxpr(value):
                found += scores_between_frames(value)
    return found


@pytest.mark.few(5)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FORMULATIONS)
def test_formulations_are_replaced_and_their_residuals_are_gone(name: str, policy: str) -> None:
    closed = jax.make_jaxpr(step_of(FORMULATIONS[name], policy))(parameters(), rows())
    changed, (record,) = kernels_in(closed, "blockwise")
    assert record.replaced, record.reason
    assert "formulations.py" in record.line
    assert "forward and backward" in record.reason
    if policy != "full":
        assert scores_between_frames(closed)
    assert not scores_between_frames(changed)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["mask_plus_scores", "bonsai", "divided_late", "float32_inside"])
def test_values_and_gradients_stay(name: str) -> None:
    step, arguments = step_of(FORMULATIONS[name]), (parameters(), rows())
    changed, _ = kernels_in(jax.make_jaxpr(step)(*arguments), "blockwise")
    found = jax.jit(_compat.jaxpr_as_function(changed))(*jax.tree.leaves(arguments))
    assert relative_differences(found, jax.jit(step)(*arguments)) < LOW_PRECISION.get(name, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FORMULATIONS)
def test_values_and_gradients_of_all_stay(name: str, policy: str) -> None:
    step, arguments = step_of(FORMULATIONS[name], policy), (parameters(), rows())
    changed, _ = kernels_in(jax.make_jaxpr(step)(*arguments), "blockwise")
    found = jax.jit(_compat.jaxpr_as_function(changed))(*jax.tree.leaves(arguments))
    assert relative_differences(found, jax.jit(step)(*arguments)) < LOW_PRECISION.get(name, 1e-5)


def test_unrolled_layers_are_one_record() -> None:
    closed = jax.make_jaxpr(step_of(FORMULATIONS["jax_nn"], "full", unrolled=True))(parameters(), rows())
    _, (record,) = kernels_in(closed, "blockwise")
    assert (record.replaced, record.count) == (True, 2)


def test_attention_is_recognised_in_a_forward_pass() -> None:
    def forward(params: Any, x: jax.Array) -> jax.Array:
        return step_of(FORMULATIONS["einsum_where"])(params, x)[0]

    _, (record,) = kernels_in(jax.make_jaxpr(forward)(parameters(), rows()), "blockwise")
    assert record.replaced
    assert "forward proven" in record.reason


@pytest.mark.whole
@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_look_alikes_are_left(name: str) -> None:
    closed = jax.make_jaxpr(step_of(LOOK_ALIKES[name]))(parameters(), rows())
    _, records = kernels_in(closed, "blockwise")
    assert not [record for record in records if record.replaced]
    assert all(record.reason and "Please report" not in record.reason for record in records)


def test_there_are_enough_look_alikes() -> None:
    assert len(LOOK_ALIKES) >= 60


@pytest.mark.whole
@pytest.mark.few(1)
@pytest.mark.parametrize("name", REPLACED)
def test_what_follows_attention_stays(name: str) -> None:
    step, arguments = step_of(REPLACED[name]), (parameters(), rows())
    changed, records = kernels_in(jax.make_jaxpr(step)(*arguments), "blockwise")
    assert [record.replaced for record in records] == [True]
    found = jax.jit(_compat.jaxpr_as_function(changed))(*jax.tree.leaves(arguments))
    assert relative_differences(found, jax.jit(step)(*arguments)) < 1e-5


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("dropped", "dropout"),
        ("appended sinks", "more values than keys, such as sinks"),
        ("constrained", "sharding constraint"),
        ("returns_weights", "elsewhere"),
        ("missing scale", "the proof failed"),
        ("alibi", "differs between rows"),
        ("dilated", "neither a causal mask nor a window"),
    ],
)
def test_reasons_say_what_prevents_a_kernel(name: str, reason: str) -> None:
    closed = jax.make_jaxpr(step_of(LOOK_ALIKES[name]))(parameters(), rows())
    assert any(reason in record.reason for record in kernels_in(closed, "blockwise")[1])


def test_a_kernel_that_cannot_run_is_a_reason() -> None:
    closed = jax.make_jaxpr(step_of(FORMULATIONS["jax_nn"]))(parameters(), rows())
    unchanged, (record,) = kernels_in(closed, "splash")
    assert not record.replaced
    assert "multiple of 128" in record.reason
    assert len(scores_between_frames(unchanged)) > 0


@pytest.mark.few(1)
@pytest.mark.parametrize(("kernel", "dtype", "bound"), [("splash", "float32", 1e-5), ("cudnn", "bfloat16", 3e-2)])
def test_every_kernel_keeps_values_and_gradients(kernel: Any, dtype: str, bound: float) -> None:
    def step(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            out = jax.nn.dot_product_attention(q, k, v, is_causal=True, scale=0.3)
            return jnp.sum(out.astype(jnp.float32) ** 2)

        return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)

    keys = jax.random.split(jax.random.key(0), 3)
    arguments = [jax.random.normal(key, (2, 128, n, 8), dtype) for key, n in zip(keys, (4, 2, 2), strict=True)]
    changed, (record,) = kernels_in(jax.make_jaxpr(step)(*arguments), kernel)
    assert (record.kernel, record.replaced) == (kernel, True)
    found = jax.jit(_compat.jaxpr_as_function(changed))(*arguments)
    expected = jax.jit(step)(*(x.astype(jnp.float32) for x in arguments))
    found, expected = (jax.tree.map(lambda x: np.asarray(x, np.float32), tree) for tree in (found, expected))
    assert relative_differences(found, expected) < bound


@pytest.mark.parametrize("kind", ["flag", "window", "pair"])
def test_windows_that_alternate_over_the_layers(kind: str) -> None:
    """A window of each layer is a reason, which says what is recognised: a window of each layer of the body."""
    distance = jnp.arange(SEQ)[:, None] - jnp.arange(SEQ)

    def attend(x: jax.Array, w: jax.Array, near: Any) -> jax.Array:
        scores = jnp.einsum("bqe,bke->bqk", x @ w[0], x @ w[1])
        return x + jax.nn.softmax(jnp.where((distance >= 0) & near, scores, -1e30)) @ (x @ w[2])

    def layer(x: jax.Array, xs: Any) -> tuple[jax.Array, None]:
        w, own = xs
        if kind == "pair":
            return attend(attend(x, w[0], distance < 4), w[1], distance < SEQ), None
        return attend(x, w[0], jnp.where(own, distance < 4, True) if kind == "flag" else distance < own), None

    windows = jnp.array([4, SEQ])
    own = {"flag": windows < SEQ, "window": windows, "pair": None}[kind]
    fn = jax.grad(lambda w, x: jax.lax.scan(layer, x, (w, own))[0].sum())
    _, records = kernels_in(jax.make_jaxpr(fn)(jnp.ones((2, 2, 3, 8, 8)), jnp.ones((2, SEQ, 8))), "blockwise")
    assert [record.replaced for record in records] == ([True, True] if kind == "pair" else [False])
    assert kind == "pair" or "run one layer of each kind, each with its own mask" in records[0].reason
