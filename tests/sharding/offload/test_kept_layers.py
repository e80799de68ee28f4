"""Steps with values in host memory, planned for TPUs, have the losses and gradients of one device.

The planned programs run on CPU devices. Their loops move slices as on TPUs, and keep those of the last layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from autoshard import Plan, plan
from autoshard.sharding.loops import host_moves as module
from autoshard.sharding.loops.host_moves import host_moves
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.planner.bound_plan import bound_or_error
from tests.sharding.offload.steps import arguments, parameters, rows, step_of

TARGET, PLANS = "v5e:2x4", ("fsdp:8", "dp:2 tp:4", "dp:2 fsdp:2 tp:2")


@pytest.fixture(autouse=True)
def no_slice_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make loops fetch all slices one iteration ahead. Then all last slices stay on the device."""
    monkeypatch.setattr(module, "FETCHED_NOW_FROM", 2.0)


def kept(made: Plan) -> int:
    """Return the number of slices that stay on the device."""
    program = bound_or_error(made.bound).executable.layout.axes.program
    return sum(len(moves.ready) for moves in host_moves(program, find_target(made.target).chip).values())


def check(step: Callable[..., Any], args: Any, words: str, offload: str, updated: int = 0, **options: Any) -> Plan:
    """Check the results of a step that is planned for a TPU against those on one device without offload.

    AdamW divides gradients by their size. So the rounding of tiny gradients is visible in parameters, which are the
    first `updated` results.
    """
    made = plan(step, *args, target=TARGET, plan=words, offload=offload, **options)
    mesh = jax.make_mesh(made.mesh.axis_sizes, made.mesh.axis_names, axis_types=made.mesh.axis_types)
    program = bound_or_error(made.bound).executable.constrained_program(made.mesh)
    ins, _ = made.shardings(mesh)
    with jax.set_mesh(mesh):
        found = jax.jit(program)(*map(jax.device_put, jax.tree.leaves(args), ins))
    expected = jax.tree.leaves(jax.jit(step)(*args))
    assert len(found) == len(expected)
    for n, (result, want) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(result, want, rtol=2e-5, atol=2e-3 if n < updated else 2e-6)
    return made


CASES = [
    ("scan remat", "residual", 1),
    ("scan", "residual+hidden", 2),
    ("scan policy", "residual+hidden", 2),
    ("scan policy", "hidden", 1),
    ("scan remat reverse", "residual", 1),
    ("scan policy reverse", "residual+hidden", 2),
    ("scan remat micro", "residual", 1),
    ("scan policy micro", "residual+hidden+optimizer", 2),
]


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize(("kind", "offload", "count"), CASES)
def test_losses_and_gradients_stay_the_same(kind: str, offload: str, count: int, layers: int) -> None:
    words = PLANS[(len(kind) + layers) % len(PLANS)]
    made = check(step_of(kind), arguments(layers), words, offload, updated=3)
    assert kept(made) == count and made.estimate.host_memory_bytes > 0


@pytest.mark.parametrize("words", ["fsdp:8", "dp:2 tp:4"])
def test_microbatches_of_the_planner(words: str) -> None:
    """The planner's loop over microbatches is around the scans over layers."""
    made = check(step_of("scan policy"), arguments(3), words, "residual+hidden", updated=3, microbatches=2)
    assert made.microbatches == 2 and kept(made) == 2


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 3, 4])
@pytest.mark.parametrize("words", PLANS)
@pytest.mark.parametrize(("kind", "offload", "count"), CASES)
def test_losses_and_gradients_under_all_plans(kind: str, offload: str, count: int, words: str, layers: int) -> None:
    assert kept(check(step_of(kind), arguments(layers), words, offload, updated=3)) == count


@pytest.mark.parametrize("kind", ["scan remat", "scan policy micro"])
def test_one_layer_moves_nothing(kind: str) -> None:
    with pytest.warns(UserWarning, match="'residual', which moves nothing to the host: its scan has one iteration"):
        made = check(step_of(kind), arguments(1), "fsdp:8", "residual", updated=3)
    assert not made.offload and kept(made) == 0


def nested(params: Any, x: jax.Array) -> Any:
    """The loss and gradients of layers that name a value and, within a call, a value computed from it."""

    def inner(h: jax.Array) -> jax.Array:
        return checkpoint_name(jnp.sin(h), "inner") * h

    @jax.checkpoint
    def unnamed(x: jax.Array, w: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ w) @ w.T

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        h = checkpoint_name(jnp.tanh(x @ w["up"] + w["bias"]), "outer")
        return unnamed(x + jax.jit(inner)(h) @ w["down"], w["up"]), None

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    return jax.value_and_grad(loss)(params, x)


@pytest.mark.parametrize(("offload", "layers"), [("inner", 2), ("outer+inner", 3), ("outer+inner+residual", 4)])
def test_named_values_within_calls(offload: str, layers: int) -> None:
    made = check(nested, (parameters(layers), rows()), "dp:2 fsdp:4", offload)
    assert set(made.offload) == set(offload.split("+")) and kept(made) == len(made.offload)


def groups(params: Any, x: jax.Array) -> Any:
    """The loss and gradients of a scan over groups of layers. The backward pass scans the layers of a group again."""

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ w["up"] + w["bias"]) @ w["down"], None

    @jax.checkpoint
    def group(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return jax.lax.scan(layer, x, w)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        grouped = jax.tree.map(lambda w: w.reshape(-1, 2, *w.shape[1:]), params)
        return jnp.mean(jax.lax.scan(group, x, grouped)[0] ** 2)

    return jax.value_and_grad(loss)(params, x)


@pytest.mark.parametrize("layers", [4, 6])
def test_the_inputs_of_groups_of_layers(layers: int) -> None:
    made = check(groups, (parameters(layers), rows()), "fsdp:8", "residual")
    assert kept(made) == 1


def two_carries(params: Any, x: jax.Array) -> Any:
    """The loss and gradients of layers whose carry is a pair of arrays and a number."""

    def layer(carry: Any, w: Any) -> tuple[Any, jax.Array]:
        x, y, count = carry
        return (x + jnp.tanh(y @ w["up"] + w["bias"]) @ w["down"], 0.9 * y + jnp.sin(x), count + 1), x.sum()

    def loss(params: Any, x: jax.Array) -> jax.Array:
        (x, y, _), sums = jax.lax.scan(jax.checkpoint(layer), (x, jnp.cos(x), 0), params)
        return jnp.mean(x * y) + 1e-3 * sums.sum()

    return jax.value_and_grad(loss)(params, x)


@pytest.mark.parametrize("layers", [2, 5])
def test_a_carry_of_several_arrays(layers: int) -> None:
    assert kept(check(two_carries, (parameters(layers), rows()), "fsdp:8", "residual")) == 2
