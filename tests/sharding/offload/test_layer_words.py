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


@pytest.mark.parametrize(
    ("offload", "said"),
    [
        ("out@7:", "'out' has 4 values, numbered from 0, and the slice selects none of them. 'out@:4' selects all"),
        ("blocks.1.hidden@1:", "'blocks.1.hidden' has 1 value, number 0, and the slice selects none of them"),
        (
            "blocks.*.hidden@1:",
            "counts the values of one name, and none of the 4 names that match has more than 1. Leave the slice out",
        ),
        ("out@3:", "the slice selects 1 of 4 values, and the backward pass reads none of these. Select others"),
    ],
)
def test_a_slice_that_selects_nothing_says_what_there_is(offload: str, said: str) -> None:
    with pytest.warns(AutoshardWarning, match=f"which moves nothing to the host: .*{said}"):
        assert not plan(jax.grad(loss), *ARGUMENTS, plan="fsdp:8", offload=offload).offload


def test_the_optimizers_state_has_no_slices() -> None:
    with pytest.raises(PlanError, match="offload has 'optimizer@::2', but .* it moves as a whole. Write 'optimizer'"):
        plan(step_of("scan"), *arguments(), plan="fsdp:8", offload="hidden+optimizer@::2")


def test_parity_of_layers_without_a_scan() -> None:
    check("unrolled", "hidden@::2", "fsdp:8", {"hidden@::2"})


def test_globs_that_match_nothing_list_the_names() -> None:
    with pytest.raises(
        PlanError,
        match=r"offload names 'layers.\*' and 'b', which the step does not have. It has blocks.0.hidden, .*, out. Use",
    ):
        plan(jax.grad(loss), *ARGUMENTS, target="cpu:8", offload="layers.*+b")


def test_a_function_in_which_nothing_can_be_moved() -> None:
    with pytest.raises(PlanError, match="It has nothing that can be moved. The step has no value .* Use 'none'$"):
        plan(jax.grad(lambda w: jnp.sum(w**2)), jnp.ones((64, 64)), target="cpu:8", offload="hidden")


# --- MaxText's names --------------------------------------------------------------------------------------------------


def theirs(names: tuple[str, str], scanned: bool = False) -> Any:
    """A step of layers with two named values each: one that the backward pass reads, and the result of the layer."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        hidden = checkpoint_name(jnp.tanh(x @ w), names[0])
        return checkpoint_name(x + hidden * hidden, names[1]), None

    def loss(layers: jax.Array, x: jax.Array) -> jax.Array:
        if scanned:
            return jnp.mean(jax.lax.scan(layer, x, layers)[0] ** 2)
        for n in range(LAYERS):
            x, _ = layer(x, layers[n])
        return jnp.mean(x**2)

    return jax.value_and_grad(loss)


STACKED = jnp.stack(ARGUMENTS[0]), ARGUMENTS[1]


@pytest.mark.parametrize(
    ("names", "word", "count"),
    [
        (("qkv", "out_proj"), "query_proj", 4),
        (("qkv", "out_proj"), "key_proj@::2", 2),
        (("mlp_in", "mlp_out"), "mlpwi*", 4),
        (("mlp_in", "query_proj"), "query_proj", 3),  # its own name comes first, and the last result is not read
        (("qkv", "query_proj"), "query_proj", 3),
    ],
)
def test_names_of_maxtext_select_values_with_our_names(names: tuple[str, str], word: str, count: int) -> None:
    step = theirs(names)
    planned = auto_shard(step, plan="fsdp:8", offload=word)
    made = planned.plan(*STACKED)
    assert made.offload == {word: count * BYTES}
    for ours, other in zip(jax.tree.leaves(planned(*STACKED)), jax.tree.leaves(step(*STACKED)), strict=True):
        assert jnp.allclose(ours, other, atol=1e-6)
    again = Plan.from_json(made.to_json()).bind(step, *STACKED)
    assert again.offload == made.offload


def test_the_input_of_a_layer_by_the_name_of_maxtext() -> None:
    """The residual of a scan has no name of `checkpoint_name`."""
    made = plan(theirs(("a", "b"), scanned=True), *STACKED, plan="fsdp:8", offload="decoder_layer_input+a")
    assert made.offload == {"decoder_layer_input": LAYERS * BYTES, "a": LAYERS * BYTES}


def test_names_of_maxtext_that_the_step_does_not_have() -> None:
    with pytest.raises(PlanError, match="names 'mlpwo' .MaxText's name of mlp_out., which .* It has mlp_in, out. Use"):
        plan(theirs(("mlp_in", "out")), *STACKED, target="cpu:8", offload="mlpwo")
    with pytest.warns(AutoshardWarning, match="names 'mlpwo@9:' .MaxText's name of mlp_out., which moves nothing"):
        plan(theirs(("mlp_out", "out")), *STACKED, target="cpu:8", offload="mlpwo@9:")


def test_a_name_of_the_step_takes_precedence() -> None:
    def odd(w: Any, x: Any) -> Any:
        hidden = checkpoint_name(jnp.tanh(x @ w), "odd@name*")
        return jnp.sum(hidden * hidden)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = plan(jax.grad(odd), jnp.ones((32, 32)), jnp.ones((64, 32)), target="cpu:8", offload=["odd@name*"])
    assert made.offload == {"odd@name*": 64 * 32 * 4}
