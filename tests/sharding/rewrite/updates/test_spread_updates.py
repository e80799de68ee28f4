"""Steps whose devices update whole matrices equal those on one device, and no device repeats the work of another."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import Plan, auto_shard
from autoshard.sharding.axes.weights.spread_matrices import spread_matrices_of
from tests.sharding.rewrite.updates.programs import (
    by_hand,
    by_optax,
    experts,
    layers,
    loss_of_experts,
    moments_of,
    momentum_of,
    muon,
    orthogonal,
    rows,
    shampoo_state,
    shampoo_step,
    stacks,
)

PLANS = ("dp:8", "fsdp:8", "dp:2 fsdp:4", "dp:2 tp:4", "fsdp:2 tp:4 seq")
PROGRAMS: dict[str, Any] = {
    "list": lambda: (by_optax(muon()), moments_of(layers(), muon())),
    "stack": lambda: (by_optax(muon()), moments_of(stacks(), muon())),
    "hand": lambda: (by_hand(orthogonal), momentum_of(layers())),
    "own coefficients": lambda: (
        by_hand(lambda m: orthogonal(m, (3.4445 + jnp.mean(m), -4.7750, 2.0315))),
        momentum_of(layers()),
    ),
    "vmap": lambda: (by_hand(jax.vmap(orthogonal)), momentum_of(stacks())),
    "shampoo": lambda: (shampoo_step, shampoo_state(layers())),
    "five layers": lambda: (by_optax(muon()), moments_of(layers(5), muon())),
}


def program(name: str) -> tuple[Any, Any]:
    return PROGRAMS[name]()


@pytest.fixture(autouse=True)
def whole_matrices(monkeypatch):
    """Choose updates of whole matrices in all tests. By the estimate, they are slower for matrices this small."""
    monkeypatch.setattr("autoshard.sharding.planner.update_choice._rank", lambda bound: not bound.plan.spread_updates)


def check(step: Any, state: Any, plan: str, *, steps: int = 2, tolerance: float = 2e-5, **options: Any) -> None:
    """Loss, parameters and momentum after some steps equal those on one device."""
    x = rows()
    sharded = auto_shard(step, plan=plan, **options)
    assert sharded.plan(state, x).spread_updates
    expected, made = state, state
    for _ in range(steps):
        expected, loss = jax.jit(step)(expected, x)
        made, found = sharded(made, x)
        np.testing.assert_allclose(found, loss, rtol=tolerance)
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        one, other = (np.asarray(each, np.float64) for each in (one, other))
        assert np.abs(one - other).max() <= tolerance * max(np.abs(other).max(), 1e-9)


@pytest.mark.few(4)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_step_equals_one_device(name, plan):
    check(*program(name), plan)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["list", "stack"])
def test_in_microbatches(name):
    check(*program(name), "dp:2 fsdp:4", microbatches=2)


@pytest.mark.parametrize("name", ["list", pytest.param("stack", marks=pytest.mark.slow)])
def test_matrices_of_bfloat16(name):
    """Both programs round to bfloat16, but not after the same operations."""
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), layers() if name == "list" else stacks())
    check(by_optax(muon()), moments_of(params, muon()), "fsdp:8", tolerance=2e-2)


def test_rows_of_the_size_of_a_matrix():
    """The axis of the batch and an axis of a matrix have the same size, but are different logical axes."""
    square = {"layers": [{k: w[:16, :16] for k, w in layer.items()} for layer in layers()["layers"]]}
    step, state = by_optax(muon()), moments_of(square | {"bias": jnp.zeros(16)}, muon())
    for plan in ("fsdp:8", "dp:2 tp:4"):
        check(step, state, plan)


def lines_of(step: Any, state: Any, plan: str) -> tuple[Plan, list[str]]:
    sharded = auto_shard(step, plan=plan)
    text = sharded.lower(state, rows()).compile().as_text()
    return sharded.plan(state, rows()), text.splitlines()


def sizes_of(lines: list[str], operator: str) -> list[tuple[int, ...]]:
    """Return the shapes of the results of an operator in HLO text, without dimensions of size 1."""
    found = (re.search(rf"= f32\[([\d,]*)\]\S* {operator}\(", line) for line in lines)
    return [tuple(int(d) for d in match[1].split(",") if d not in ("", "1")) for match in found if match]


@pytest.mark.parametrize("name", ["list", "stack"])
def test_no_device_repeats_the_products(name):
    """Each device gets one matrix, or a copy, by an all-to-all. Only the forward pass gathers all 6 matrices."""
    _, lines = lines_of(*program(name), "fsdp:8")
    products = sizes_of(lines, "dot")
    assert products.count((16, 16)) >= 10 and not [size for size in products if len(size) > 2]
    assert any(" all-to-all(" in line for line in lines)
    assert sum(map(math.prod, sizes_of(lines, "all-gather"))) == 6 * 16 * 32 + 16


def test_only_the_mesh_axes_that_store_weights_exchange_shards():
    """`dp` shards the stack first. Then each all-to-all runs over `fsdp` alone, and `dp` gathers shards of matrices."""
    made, lines = lines_of(*program("list"), "dp:2 fsdp:4")
    assert made.bound is not None
    (stack, *_) = [op.results[0] for op in made.bound.problem.program.ops() if op.name == "spread_matrices"]
    assert made.bound.layout.spec(stack)[0] == ("dp", "fsdp")
    assert sum(" all-to-all(" in line for line in lines) == 2
    stacks = [size for size in sizes_of(lines, "all-gather") if len(size) > 2]
    assert stacks and all(math.prod(size) <= 8 * 16 * 32 // 4 for size in stacks)


def test_a_matrix_is_stored_like_its_state():
    """The data have the size of a matrix, and fewer operators lead from them to the update than from its momentum."""

    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        params, momentum = state
        value, gradients = jax.value_and_grad(lambda w: jnp.mean(sum(jnp.tanh(x @ each) for each in w) ** 2))(params)
        momentum = [((m * 0.5) * 1.1) * 0.9 + g for m, g in zip(momentum, gradients, strict=True)]
        return ([w - orthogonal(m) for w, m in zip(params, momentum, strict=True)], momentum), value

    params = [jnp.ones((16, 32)), jnp.ones((16, 32))]
    made = autoshard.plan(step, (params, params), jnp.ones((32, 16)), plan="fsdp:8")
    assert made.bound is not None
    axes = made.bound.layout.axes
    sources = [axes.program.inputs.index(source) for source in spread_matrices_of(axes).sources.values()]
    assert sorted(sources) == [2, 2, 3, 3]  # the momentum, before and after the exchange


def test_each_matrix_has_its_own_coefficients():
    def update(m: jax.Array) -> jax.Array:
        return orthogonal(m, (3.4445 + jnp.tanh(10 * jnp.sum(m)), -4.7750, 2.0315))

    check(by_hand(update), momentum_of(layers()), "fsdp:8")


@pytest.mark.parametrize("plan", ["ep:8", pytest.param("ep:4 fsdp:2", marks=pytest.mark.slow)])
def test_experts_are_exchanged_in_shards(plan):
    """Without a step in between, XLA gathers the experts of all devices before it stacks the layers."""
    step, state = by_optax(muon(), loss_of_experts), moments_of(experts(), muon())
    check(step, state, plan)
    _, lines = lines_of(step, state, plan)
    assert any(" all-to-all(" in line for line in lines)
    assert max(map(math.prod, sizes_of(lines, "all-gather"))) < 8 * 16 * 32


def test_the_estimate_counts_the_matrices_of_one_device():
    step, state = program("list")

    def large(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(256 * d if d in (16, 32) else d for d in x.shape), x.dtype)

    big = jax.tree.map(large, state)
    x = jax.ShapeDtypeStruct((8, 8, 4096), jnp.float32)
    made = autoshard.plan(step, big, x, target="v5p:2x2x2", plan="fsdp:8")
    assert made.alone is not None
    assert made.estimate.compute_us < 0.3 * made.alone.compute_us


def test_a_note_names_the_line_and_the_matrices_of_a_device():
    step, state = program("five layers")
    made = autoshard.plan(step, state, rows(), plan="fsdp:8")
    (note,) = [each for each in made.notes if "whole matrices" in each]
    assert re.match(r"at \S*programs\.py:\d+ .*, each device updates whole matrices, at most 2 of 10;", note)


@pytest.mark.parametrize("plan", ["fsdp:8", "dp:2 tp:4"])
def test_a_plan_from_json(plan):
    step, state = program("list")
    made = autoshard.plan(step, state, rows(), plan=plan)
    read = Plan.from_json(made.to_json())
    assert read.spread_updates
    _, loss = auto_shard(step, plan=read)(state, rows())
    np.testing.assert_allclose(loss, jax.jit(step)(state, rows())[1], rtol=1e-5)


def test_a_plan_in_shards_stays_so(monkeypatch):
    monkeypatch.setattr("autoshard.sharding.planner.update_choice._rank", lambda bound: bound.plan.spread_updates)
    step, state = program("list")
    made = autoshard.plan(step, state, rows(), plan="fsdp:8")
    read = Plan.from_json(made.to_json())
    assert not made.spread_updates and not read.spread_updates and "spread_updates" not in made.to_json()
    assert not auto_shard(step, plan=read).plan(state, rows()).spread_updates


def test_a_pipeline_keeps_its_stages():
    step, state = by_optax(muon()), moments_of(stacks(4), muon())
    sharded = auto_shard(step, plan="pp:2 fsdp:4")
    made, loss = sharded(state, rows())
    expected, expected_loss = jax.jit(step)(state, rows())
    assert not sharded.plan(state, rows()).spread_updates
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
