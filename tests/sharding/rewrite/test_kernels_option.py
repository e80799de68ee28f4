"""`kernels=` of `plan` and `auto_shard`, and `replace_kernels`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import Plan, auto_shard, plan, replace_kernels
from autoshard.errors import PlanError
from autoshard.sharding.rewrite.masks import static_masks
from tests.sharding.rewrite.formulations import (
    FORMULATIONS,
    einsum_where,
    grouped_queries,
    loss_of,
    parameters,
    rows,
    step_of,
)
from tests.sharding.rewrite.look_alikes import LOOK_ALIKES


def assert_same(found: Any, expected: Any) -> None:
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    norm = max(float(np.linalg.norm(y)) for _, y in pairs[1:])
    assert all(float(np.linalg.norm(np.asarray(x) - np.asarray(y))) < 1e-5 * norm for x, y in pairs)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("strategy", "policy", "unrolled"),
    [("dp:8", "none", False), ("dp:2 tp:4", "full", False), ("fsdp:8", "none", True)],
)
def test_losses_and_gradients_equal_those_of_one_device(strategy: str, policy: str, unrolled: bool) -> None:
    step = step_of(einsum_where, policy, unrolled=unrolled)
    sharded = auto_shard(step, plan=strategy, kernels="require")
    assert_same(sharded(parameters(), rows()), jax.jit(step)(parameters(), rows()))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp:8", "fsdp:8", "dp:2 tp:4", "fsdp:4 tp:2"])
@pytest.mark.parametrize("policy", ["none", "full", "dots"])
@pytest.mark.parametrize("name", ["einsum_where", "grouped_queries", "window", "divided_late"])
def test_all_plans_keep_the_gradients(name: str, policy: str, strategy: str) -> None:
    step = step_of(FORMULATIONS[name], policy)
    sharded = auto_shard(step, plan=strategy, kernels="require")
    assert_same(sharded(parameters(), rows()), jax.jit(step)(parameters(), rows()))


def planned(step: Any, **options: Any) -> Plan:
    return plan(step, parameters(), rows(), target="cpu:8", plan="dp:8", **options)


def test_written_out_layers_share_the_evaluation_of_their_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[Any] = []
    real = static_masks._evaluated
    monkeypatch.setattr(static_masks, "_evaluated", lambda *given: evaluated.append(given) or real(*given))
    made = planned(step_of(einsum_where, unrolled=True), kernels="require")
    masks = [given for given in evaluated if given[0].aval.size > 1]
    assert made.kernels[0].count > 1 and len(masks) == len(set(masks))


def test_a_plan_lists_its_kernels() -> None:
    made = planned(step_of(einsum_where), kernels="auto")
    (record,) = made.kernels
    assert (record.kernel, record.replaced) == ("blockwise", True)
    assert record.line.startswith("rewrite/formulations.py:")
    assert f"kernels: {record}" in str(made)


def test_attention_in_float64_keeps_its_precision() -> None:
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), (parameters(), rows()))
        made = plan(step_of(einsum_where), *wide, target="cpu:8", plan="dp:8", kernels="auto")
    (record,) = made.kernels
    assert not record.replaced and "adds up in float32, and the operands are float64" in record.reason


def test_kernels_are_off_by_default() -> None:
    made = planned(step_of(einsum_where))
    assert (made.kernels, made.kernels_word) == ((), "off")
    assert "kernels" not in made.to_json()


def test_a_saved_plan_keeps_the_word_and_replaces_again() -> None:
    step = step_of(einsum_where)
    made = planned(step, kernels="auto")
    read = Plan.from_json(made.to_json())
    assert (read.kernels, read.kernels_word) == (made.kernels, "auto")
    bound = read.bind(step, parameters(), rows())
    assert bound.kernels == made.kernels
    assert_same(bound.jit()(parameters(), rows()), jax.jit(step)(parameters(), rows()))
    with pytest.raises(PlanError, match="kernels is 'off', but plan is a Plan with kernels='auto'"):
        auto_shard(step, plan=read, kernels="off")


def test_the_page_shows_kernels(tmp_path: Any) -> None:
    planned(step_of(LOOK_ALIKES["alibi"]), kernels="auto").to_html(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    assert "Kernels: attention at" in text
    assert "left as it is" in text


def tpu_loss(w: jax.Array, x: jax.Array) -> jax.Array:
    q, k, v = (jnp.einsum("bse,ehd->bshd", x, each) for each in w)
    return jnp.mean(jnp.float32(jax.nn.dot_product_attention(q, k, v, is_causal=True)) ** 2)


def tpu_step(w: jax.Array, x: jax.Array) -> Any:
    return jax.value_and_grad(tpu_loss)(w, x)


def shapes(seq: int) -> tuple[Any, Any]:
    return jax.ShapeDtypeStruct((3, 64, 4, 64), jnp.bfloat16), jax.ShapeDtypeStruct((8, seq, 64), jnp.bfloat16)


def test_on_a_tpu_the_kernel_is_splash() -> None:
    made = plan(tpu_step, *shapes(256), target="v5e:2x2", plan="dp:4", kernels="require")
    assert [(r.kernel, r.replaced) for r in made.kernels] == [("splash", True)]
    assert made.bound is not None
    assert {"splash_attention", "splash_attention_gradient"} <= {op.name for op in made.bound.problem.program.ops()}


def test_a_kernel_has_the_blocks_of_its_machine() -> None:
    """Those of a program that has the kernel already, not the default ones."""
    options: Any = {"target": "v6e:2x2", "plan": "dp:4"}
    made = plan(tpu_step, *shapes(4096), kernels="require", **options)
    written = plan(jax.value_and_grad(replace_kernels(tpu_loss)), *shapes(4096), **options)
    assert dict(made.kernel_blocks) == dict(written.kernel_blocks)
    (sizes,) = made.kernel_blocks.values()
    assert sizes[0] > 1024
    again = Plan.from_json(made.to_json()).bind(tpu_step, *shapes(4096))
    assert again.kernel_blocks == made.kernel_blocks


def test_require_names_the_line_and_the_condition() -> None:
    with pytest.raises(PlanError, match=r"test_kernels_option.py:\d+ .*splash takes a multiple of 128 queries.*not 96"):
        plan(tpu_step, *shapes(96), target="v5e:2x2", kernels="require")


@pytest.mark.parametrize("broken", ["attention_forward._shapes", "kernel_rewriting.prove"])
def test_a_fault_of_the_matcher_leaves_the_attention_and_not_the_plan(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: Any) -> Any:
        raise KeyError("cumsum")

    monkeypatch.setattr(f"autoshard.sharding.rewrite.{broken}", fault)
    made = planned(step_of(einsum_where), kernels="auto")
    assert made.kernels and not any(record.replaced for record in made.kernels)
    assert {record.reason for record in made.kernels} == {
        "its check failed with KeyError: 'cumsum'. Please report this"
    }
    assert all("formulations.py:" in record.line for record in made.kernels)
    loss = loss_of(einsum_where)
    np.testing.assert_array_equal(replace_kernels(loss)(parameters(), rows()), loss(parameters(), rows()))


def test_require_needs_attention() -> None:
    with pytest.raises(PlanError, match="kernels='require', but no attention was found"):
        plan(lambda x: x @ x, jnp.ones((8, 8)), target="cpu:8", kernels="require")


def test_require_is_an_error_if_a_proof_fails() -> None:
    with pytest.raises(PlanError, match=r"formulations.py:\d+ .*the proof failed"):
        planned(step_of(LOOK_ALIKES["missing scale"]), kernels="require")


@pytest.mark.parametrize("word", ["on", True, 1, ("auto",)])
def test_unknown_words_are_errors(word: Any) -> None:
    with pytest.raises(PlanError, match="kernels is .*; it must be 'off', 'auto' or 'require'"):
        auto_shard(step_of(einsum_where), kernels=word)


@pytest.mark.few(1)
@pytest.mark.parametrize("attention", [einsum_where, grouped_queries])
@pytest.mark.parametrize("policy", ["none", "full"])
def test_replace_kernels_before_the_gradient(attention: Any, policy: str) -> None:
    loss = loss_of(attention, policy)
    replaced = replace_kernels(loss, kernels="require")
    found = jax.jit(jax.value_and_grad(replaced, argnums=(0, 1)))(parameters(), rows())
    assert [record.replaced for record in getattr(replaced, "kernels")] == [True]  # noqa: B009
    assert_same(found, jax.jit(step_of(attention, policy))(parameters(), rows()))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["stopped gradient", "half stopped", "missing scale", "dropped", "alibi"])
def test_replace_kernels_leaves_look_alikes(name: str) -> None:
    loss = loss_of(LOOK_ALIKES[name])
    replaced = replace_kernels(loss)
    found = jax.jit(jax.value_and_grad(replaced, argnums=(0, 1)))(parameters(), rows())
    assert not any(record.replaced for record in getattr(replaced, "kernels"))  # noqa: B009
    assert_same(found, jax.jit(step_of(LOOK_ALIKES[name]))(parameters(), rows()))


def test_replace_kernels_leaves_attention_whose_gradient_is_there() -> None:
    """It would replace the forward part alone."""
    replaced = replace_kernels(step_of(einsum_where))
    jax.eval_shape(replaced, parameters(), rows())
    (record,) = getattr(replaced, "kernels")  # noqa: B009
    assert not record.replaced and "use replace_kernels before jax.grad" in record.reason


def test_attention_under_a_derivative_of_its_own_is_left() -> None:
    attention = jax.custom_jvp(einsum_where)
    attention.defjvp(lambda primals, tangents: (attention(*primals), jax.jvp(einsum_where, primals, tangents)[1]))
    forward = loss_of(attention)
    made = planned(forward, kernels="auto")
    assert [record.replaced for record in made.kernels] == [False]
    assert_same([0.0, made.jit()(parameters(), rows())], [0.0, forward(parameters(), rows())])


def test_replace_kernels_off_is_the_function() -> None:
    assert replace_kernels(rows, kernels="off") is rows
    unknown: Any = "yes"
    with pytest.raises(PlanError, match="kernels is 'yes'"):
        autoshard.replace_kernels(rows, kernels=unknown)
