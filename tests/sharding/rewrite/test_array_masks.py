"""Masks that are arrays become the segments of a kernel, with the same numbers also in rows that see no key."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import _compat, auto_shard, plan, replace_kernels
from autoshard.errors import PlanError
from autoshard.kernels.visibility import Visibility
from autoshard.sharding.rewrite import attention_proof
from autoshard.sharding.rewrite.kernel_rewriting import kernels_in
from tests.sharding.rewrite.formulations import POLICIES, parameters, rows
from tests.sharding.rewrite.masked_formulations import LEFT, MASKED, batch_arrays, masked_loss_of, masked_step_of
from tests.sharding.rewrite.test_attention import relative_differences, scores_between_frames


def arguments() -> tuple[Any, ...]:
    return (parameters(), rows(), *batch_arrays())


def traced(name: str, policy: str = "none", **options: Any) -> Any:
    return jax.make_jaxpr(masked_step_of(MASKED[name], policy, **options))(*arguments())


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("name", "policy"),
    [(name, "none") for name in MASKED] + [("padded_documents", "full"), ("added", "dots"), ("flax_linen", "full")],
)
def test_masks_are_replaced_and_their_residuals_are_gone(name: str, policy: str) -> None:
    changed, (record,) = kernels_in(traced(name, policy), "blockwise")
    assert record.replaced, record.reason
    assert "forward and backward" in record.reason
    assert ("segments" in record.reason) or ("padding" in record.reason)
    assert not scores_between_frames(changed)


def assert_kept(name: str, policy: str) -> None:
    changed, _ = kernels_in(traced(name, policy), "blockwise")
    found = jax.jit(_compat.jaxpr_as_function(changed))(*jax.tree.leaves(arguments()))
    assert relative_differences(found, jax.jit(masked_step_of(MASKED[name], policy))(*arguments())) < 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["padded_documents", "added"])
def test_values_and_gradients_stay(name: str) -> None:
    assert_kept(name, "none")


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MASKED)
def test_values_and_gradients_of_all_stay(name: str, policy: str) -> None:
    assert_kept(name, policy)


@pytest.mark.parametrize("name", LEFT)
def test_other_masks_are_left(name: str) -> None:
    closed = jax.make_jaxpr(masked_step_of(LEFT[name]))(*arguments())
    _, records = kernels_in(closed, "blockwise")
    assert records and not any(record.replaced for record in records)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("heads differ", "differs between heads"),
        ("minus infinity", "A row that sees no key must be the mean of all values"),
        ("earlier documents", "neither padding nor segments"),
        ("random keys", "dropout"),
    ],
)
def test_reasons_say_what_prevents_a_kernel(name: str, reason: str) -> None:
    closed = jax.make_jaxpr(masked_step_of(LEFT[name]))(*arguments())
    assert any(reason in record.reason for record in kernels_in(closed, "blockwise")[1])


def test_the_proof_compares_rows_that_see_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = attention_proof._reference

    def zeros(softmax: Any, unseen: Any, visible: np.ndarray, **arrays: np.ndarray) -> Any:
        found = reference(softmax, unseen, visible, **arrays)
        some = np.broadcast_to(np.any(visible, -1), arrays["q"].shape[:2])
        return {**found, "out": found["out"] * some[:, :, None, None, None]}

    monkeypatch.setattr(attention_proof, "_reference", zeros)
    _, (record,) = kernels_in(traced("padding"), "blockwise")
    assert not record.replaced
    assert "the proof failed" in record.reason
    _, (record,) = kernels_in(traced("causal_documents"), "blockwise")  # each query sees its own position
    assert record.replaced


def test_the_proof_draws_what_each_term_hides() -> None:
    nothing, first, second = np.ones((1, 2, 2), bool), np.array([[[True, False]] * 2]), np.array([[[False, True]] * 2])
    draws = [(first, nothing), (first, first), (nothing, second), (first, second)]  # the second one adds nothing
    left = iter(range(len(draws)))
    roles = SimpleNamespace(queries=((0,),), keys=((1,),))
    region: Any = SimpleNamespace(
        shapes=SimpleNamespace(small={0: 2, 1: 2}), roles=roles, segments=SimpleNamespace(terms=("a", "b")),
        small_rows=lambda rng: next(left), seen=lambda rows: list(draws[rows]),
    )  # fmt: skip
    found = attention_proof._masks(region, Visibility(), np.random.default_rng(0), some_unseen=True)
    assert [rows for rows, _ in found] == [0, 2, 3]
    np.testing.assert_array_equal([visible for _, visible in found], [first, second, first & second])


def test_equal_layers_share_their_segments() -> None:
    changed, (record,) = kernels_in(traced("padded_documents", unrolled=True), "blockwise")
    assert (record.replaced, record.count) == (True, 2)
    sorts = [eqn for eqn in _compat.open_jaxpr(changed).eqns if eqn.primitive.name == "sort"]
    assert len(sorts) == 2  # one mask: by segment, and back


@pytest.mark.parametrize("policy", ["none", "full"])
def test_segments_of_the_layers_own_input_cross_to_the_backward_pass(policy: str) -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            large, tokens = (x[..., 0] > -0.5).astype(jnp.int32), (x[..., 1] > -1.5).astype(jnp.int32)
            q, k, v = (jnp.einsum("bse,ehd->bshd", x, w[n]) for n in ("q", "k", "v"))
            return x + jnp.einsum("bshd,hde->bse", MASKED["padded_documents"](q, k, v, large, tokens), w["out"]), None

        body = layer if policy == "none" else jax.checkpoint(layer)
        return jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)

    step, given = jax.value_and_grad(loss, argnums=(0, 1)), (parameters(), rows())
    changed, (record,) = kernels_in(jax.make_jaxpr(step)(*given), "blockwise")
    assert record.replaced, record.reason
    assert not scores_between_frames(changed)
    found = jax.jit(_compat.jaxpr_as_function(changed))(*jax.tree.leaves(given))
    assert relative_differences(found, jax.jit(step)(*given)) < 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "policy", "strategy"),
    [("padded_documents", "none", "dp:2 tp:4"), ("causal_documents", "none", "dp:2 cp:4"), ("added", "full", "fsdp:8")],
)
def test_losses_and_gradients_equal_those_of_one_device(name: str, policy: str, strategy: str) -> None:
    step = masked_step_of(MASKED[name], policy)
    sharded = auto_shard(step, plan=strategy, kernels="require")
    assert relative_differences(sharded(*arguments()), jax.jit(step)(*arguments())) < 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "policy"), [("padded_documents", "none"), ("added", "full")])
def test_replace_kernels_before_the_gradient(name: str, policy: str) -> None:
    replaced = replace_kernels(masked_loss_of(MASKED[name], policy), kernels="require")
    found = jax.jit(jax.value_and_grad(replaced, argnums=(0, 1)))(*arguments())
    assert [record.replaced for record in getattr(replaced, "kernels")] == [True]  # noqa: B009
    assert relative_differences(found, jax.jit(masked_step_of(MASKED[name], policy))(*arguments())) < 1e-5


def attention_step(w: jax.Array, x: jax.Array, segments: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("bse,ehd->bshd", x, each) for each in w)
        mask = (segments[:, :, None] == segments[:, None, :])[:, None]
        return jnp.mean(jnp.float32(jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True)) ** 2)

    return jax.value_and_grad(loss)(w)


SHAPES = (
    jax.ShapeDtypeStruct((3, 64, 4, 64), jnp.bfloat16),
    jax.ShapeDtypeStruct((8, 256, 64), jnp.bfloat16),
    jax.ShapeDtypeStruct((8, 256), jnp.int32),
)


def test_on_a_tpu_splash_takes_the_segments() -> None:
    made = plan(attention_step, *SHAPES, target="v5e:2x2", plan="dp:4", kernels="require")
    assert [(r.kernel, r.replaced) for r in made.kernels] == [("splash", True)]
    assert "causal with segments" in made.kernels[0].reason


def test_cudnn_takes_no_segments_and_require_says_so() -> None:
    with pytest.raises(PlanError, match=r"test_array_masks.py:\d+ .*cudnn takes no segment_ids"):
        plan(attention_step, *SHAPES, target="h100:4", plan="dp:4", kernels="require")
