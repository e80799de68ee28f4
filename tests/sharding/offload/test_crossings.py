"""Which values cross from the forward to the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from autoshard import _compat
from autoshard.sharding.offload.crossings import Crossings, find_crossings
from autoshard.sharding.offload.replay import inlined
from tests.sharding.offload.steps import EMBED, FFN, LAYERS, ROWS, arguments, step_of

# The backward pass does not read the last layer's output, but twice of it.
CARRY, HIDDEN = 4.0 * LAYERS * ROWS * EMBED, 4.0 * LAYERS * ROWS * FFN
OUTPUTS = CARRY * (LAYERS - 1) / LAYERS


def crossings(fn: Callable[..., Any], *args: Any) -> Crossings:
    return find_crossings(inlined(_compat.dce(jax.make_jaxpr(fn)(*args))))


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("scan", {"residual": CARRY, "hidden": HIDDEN}),
        ("scan remat", {"residual": CARRY}),
        ("scan policy", {"residual": CARRY, "hidden": HIDDEN}),
        ("scan jit", {"residual": CARRY, "hidden": HIDDEN}),
        ("scan micro", {"residual": CARRY, "hidden": HIDDEN}),
        ("unrolled", {"out": OUTPUTS, "hidden": HIDDEN}),
        ("unrolled jit micro", {"out": OUTPUTS, "hidden": HIDDEN}),
        ("unrolled remat", {"out": OUTPUTS}),
    ],
)
def test_values_that_cross(kind: str, sizes: dict[str, float]) -> None:
    found = crossings(step_of(kind), *arguments())
    assert dict(found.nbytes) == sizes and found.names == {"hidden", "out"} and found.has_backward
    assert ("hidden" in found.recomputed) == ("remat" in kind)


def test_without_a_gradient_nothing_crosses() -> None:
    found = crossings(lambda w, x: checkpoint_name(jnp.tanh(x @ w), "h"), jnp.ones((64, 64)), jnp.ones((64, 64)))
    assert not found.has_backward and not found.nbytes and found.names == {"h"}


def test_a_cast_of_a_named_value_has_its_name() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        h = checkpoint_name(jnp.sin(x), "h").astype(jnp.bfloat16)  # the backward pass reads the cast
        return jnp.sum((h @ w.astype(jnp.bfloat16)).astype(jnp.float32))

    assert crossings(jax.grad(loss), jnp.ones((64, 64)), jnp.ones((64, 64))).nbytes == {"h": 2.0 * 64 * 64}


def test_one_value_of_several_residuals_is_stored_once() -> None:
    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return checkpoint_name(jnp.exp(x @ w), "h") * 0.1, None  # the derivative of exp is its result

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(jax.lax.scan(body, x, w)[0]))

    found = crossings(jax.grad(loss), jnp.ones((3, 64, 64)), jnp.ones((64, 64)))
    assert found.nbytes["h"] == 4.0 * 3 * 64 * 64


def test_small_values_stay() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(checkpoint_name(jnp.sin(x), "h") @ w)

    found = crossings(jax.grad(loss), jnp.ones((8, 8)), jnp.ones((8, 8)))
    assert not found.nbytes and "256 bytes" in found.reasons["h"][0]


def test_a_stack_that_the_step_returns_stays() -> None:
    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = checkpoint_name(jnp.tanh(x @ w), "h")
        return h, h

    def loss(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, stack = jax.lax.scan(body, x, w)
        return jnp.sum(x**2) + jnp.sum((stack @ w) ** 2), stack

    found = crossings(jax.value_and_grad(loss, has_aux=True), jnp.ones((3, 64, 64)), jnp.ones((64, 64)))
    assert "uses the stack of all layers too" in found.reasons["h"][0]
    # Up to JAX 0.10 the scan's own residual is another stack, which moves. Later it is the one that stays.
    assert found.nbytes["h"] in (0.0, 4.0 * 3 * 64 * 64)


def test_an_input_of_the_step_stays() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum((checkpoint_name(x, "x") @ w) ** 2)

    found = crossings(jax.grad(loss), jnp.ones((64, 64)), jnp.ones((64, 64)))
    assert not found.nbytes and "an input of the step" in found.reasons["x"][0]


def test_a_scan_of_one_layer_moves_nothing() -> None:
    found = crossings(step_of("scan"), *arguments(1))
    assert not found.nbytes and "one iteration" in found.reasons["residual"][0] + found.reasons["hidden"][0]


def named_loss(name: str, place: str, recomputed: bool) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A loss of scanned layers that give `name` to their input (`place` is "in"), or to a value in the middle."""

    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        x = checkpoint_name(x, name) if place == "in" else x
        h = jnp.tanh(x @ w)
        return x + (checkpoint_name(h, name) if place == "middle" else h) @ w.T, None

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(jax.checkpoint(body) if recomputed else body, x, w)[0] ** 2)

    return loss


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(
    ("name", "place", "columns"),
    [("hidden", "middle", 32), ("residual", "in", 32), ("residual", "middle", 64)],  # the carry has 32, the middle 64
)
def test_a_users_own_value_with_the_name_of_the_carry_moves_alone(
    name: str, place: str, columns: int, recomputed: bool
) -> None:
    """The carry of the layers is `residual` only if the program names no value so."""
    found = crossings(jax.grad(named_loss(name, place, recomputed)), jnp.ones((3, 32, 64)), jnp.ones((64, 32)))
    is_kept = columns == 32 or not recomputed
    assert found.nbytes.get("residual", 0.0) == (4.0 * 3 * 64 * columns if is_kept else 0.0)


def test_a_name_in_another_part_of_the_program_is_the_users_too() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        x = checkpoint_name(jnp.sin(x), "residual")
        return named_loss("hidden", "middle", recomputed=True)(w, x @ w[0] @ w[0].T)

    found = crossings(jax.grad(loss), jnp.ones((3, 32, 64)), jnp.ones((64, 32)))
    assert found.nbytes == {"residual": 4.0 * 64 * 32}
