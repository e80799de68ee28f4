"""Globs over names and slices over layers in `offload=`."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from autoshard import Plan, auto_shard, plan
from autoshard.errors import AutoshardWarning, PlanError
from autoshard.sharding.offload.layer_words import read_layer_word
from tests.sharding.offload.steps import arguments, step_of
from tests.sharding.offload.test_rewriting import check

LAYERS, ROWS, WIDTH = 4, 64, 32
BYTES = ROWS * WIDTH * 4  # of one value


def loss(layers: list[jax.Array], x: jax.Array) -> jax.Array:
    """Layers that are written out, whose hidden values have the path of their layer in their names."""
    for n, w in enumerate(layers):
        hidden = checkpoint_name(jnp.tanh(x @ w), f"blocks.{n}.hidden")
        x = checkpoint_name(x + hidden * hidden, "out")
    return jnp.mean(x**2)


ARGUMENTS = (
    [jnp.asarray(np.eye(WIDTH) * (n + 1) / 4, jnp.float32) for n in range(LAYERS)],
    jnp.asarray(np.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH), jnp.float32),
)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("a", [0, 1, 2, 3]),
        ("a@::2", [0, 2]),
        ("a@[1:3]", [1, 2]),
        ("a@-1:", [3]),
        ("a@ :1", [0]),
        ("a@::-1", [3, 2, 1, 0]),
    ],
)
def test_slices(text: str, numbers: list[int]) -> None:
    word = read_layer_word(text)
    assert [n for n in range(4) if word.covers(n, 4)] == sorted(numbers) and word.names("a") and not word.names("b")


@pytest.mark.parametrize("text", ["a@", "a@x", "a@1", "a@::0", "@::2", "a@1:2:3:4"])
def test_other_slices_are_errors(text: str) -> None:
    with pytest.raises(PlanError, match="write a name and a slice over layers, such as 'residual@::2'"):
        plan(jax.grad(loss), *ARGUMENTS, target="cpu:8", offload=text)


@pytest.mark.parametrize(
    ("offload", "count"),
    [("blocks.*.hidden", 4), ("blocks.[02].hidden", 2), ("out@::2", 2), ("out@-2:", 1), ("blocks.1.hidden+out@:1", 2)],
)
def test_selected_layers_move_and_nothing_changes(offload: str, count: int) -> None:
    """The backward pass does not read the last `out`."""
    step = auto_shard(jax.value_and_grad(loss), plan="fsdp:8", offload=offload)
    made = step.plan(*ARGUMENTS)
    assert set(made.offload) == set(offload.split("+")) and sum(made.offload.values()) == count * BYTES
    assert made.estimate.host_memory_bytes == sum(made.offload.values()) / 8
    for ours, theirs in zip(
        jax.tree.leaves(step(*ARGUMENTS)), jax.tree.leaves(jax.value_and_grad(loss)(*ARGUMENTS)), strict=True
    ):
        assert jnp.allclose(ours, theirs, atol=1e-6)
    again = Plan.from_json(made.to_json()).bind(jax.value_and_grad(loss), *ARGUMENTS)
    assert again.offload == made.offload
    assert again.bound is not None and made.bound is not None
    assert str(again.bound.traced.closed) == str(made.bound.traced.closed)


def test_half_the_layers_take_half_the_bytes() -> None:
    every, half = (
        plan(jax.grad(loss), *ARGUMENTS, plan="fsdp:8", offload=word).estimate
        for word in ("blocks.*.hidden", "blocks.[02].hidden")
    )
    assert half.host_traffic_bytes == every.host_traffic_bytes / 2 and half.host_memory_bytes < every.host_memory_bytes


def test_a_slice_of_a_scan_is_refused_with_the_line_of_the_scan() -> None:
    text = r"'hidden@::2', which moves nothing.* its layers are one scan of 3 iterations at .*steps.py:.* write the"
    with pytest.warns(AutoshardWarning, match=text):
        made = plan(step_of("scan"), *arguments(), plan="fsdp:8", offload="hidden@::2")
    assert not made.offload


def test_parity_of_layers_without_a_scan() -> None:
    check("unrolled", "hidden@::2", "fsdp:8", {"hidden@::2"})


def test_globs_that_match_nothing_list_the_names() -> None:
    with pytest.raises(
        PlanError, match="offload names 'layers.*', which the step does not have. It has blocks.0.hidden"
    ):
        plan(jax.grad(loss), *ARGUMENTS, target="cpu:8", offload="layers.*")


def test_a_name_of_the_step_takes_precedence() -> None:
    def odd(w: Any, x: Any) -> Any:
        hidden = checkpoint_name(jnp.tanh(x @ w), "odd@name*")
        return jnp.sum(hidden * hidden)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = plan(jax.grad(odd), jnp.ones((32, 32)), jnp.ones((64, 32)), target="cpu:8", offload=["odd@name*"])
    assert made.offload == {"odd@name*": 64 * 32 * 4}
