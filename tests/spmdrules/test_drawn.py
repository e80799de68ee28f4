"""Random operators and chains of operators: their rules hold, and sharded and planned runs give the same results.

Tests of the default suite draw the same few programs each time. The slow ones draw many, and different ones each time;
a failure is printed with the blob that reproduces it.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from autoshard import auto_shard, check_rule, plan
from autoshard.errors import AutoshardWarning
from tests.spmdrules.drawn import INDICES, MESHES, Chain, chains, goals, placements
from tests.spmdrules.drawn_networks import networks
from tests.spmdrules.drawn_operators import Drawn, exchanges, operators
from tests.spmdrules.simulate import simulate


def few_examples(count: int) -> settings:
    return settings(max_examples=count, suppress_health_check=[HealthCheck.too_slow])


def many_examples(count: int) -> settings:
    return settings(few_examples(count), derandomize=False, print_blob=True)


def assert_close(actual: Any, expected: Any) -> None:
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    scale = float(np.abs(expected).max()) if expected.size else 0.0
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3 * max(1.0, scale))


def check_operator(drawn: Drawn, partitioner: bool) -> None:
    """Checks that the oracle finds the rules of an operator neither wrong nor incomplete."""
    name, fn, args = drawn
    findings = check_rule(fn, *args, partitioner=partitioner)
    assert not findings, f"{name} of {[(str(x.dtype), x.shape) for x in args]}: " + "\n".join(map(str, findings))


@pytest.mark.whole
@few_examples(8)
@given(operators())
def test_rules_hold_on_drawn_operators(drawn):
    check_operator(drawn, False)


@pytest.mark.slow
@many_examples(400)
@given(operators())
def test_rules_hold_on_many_drawn_operators(drawn):
    check_operator(drawn, False)


@pytest.mark.slow
@many_examples(60)
@given(operators())
def test_the_partitioner_agrees_on_drawn_operators(drawn):
    check_operator(drawn, True)


def check_shards(chain: Chain, data: Any) -> None:
    """Checks that the shards of a chain give one device's results, for any placement of arguments and results."""
    mesh = data.draw(st.sampled_from(MESHES), "mesh")
    inputs = [data.draw(placements(mesh, x.shape, i >= INDICES), f"argument {i}") for i, x in enumerate(chain.args)]
    expected = chain(*chain.args)
    requested = [data.draw(goals(mesh, x.shape), f"result {i}") for i, x in enumerate(expected)]
    open_args = [i for i, place in enumerate(inputs) if not place.partial and data.draw(st.integers(0, 4)) == 0]
    for actual, one_device in zip(
        simulate(chain, chain.args, inputs, mesh, requested, open_args), expected, strict=True
    ):
        assert_close(actual, one_device)


@pytest.mark.slow
@few_examples(15)
@given(chains(), st.data())
def test_shards_of_a_chain_give_its_result(chain, data):
    check_shards(chain, data)


@pytest.mark.slow
@many_examples(500)
@given(chains(10), st.data())
def test_shards_of_many_chains_give_their_results(chain, data):
    check_shards(chain, data)


def check_plan(chain: Chain, data: Any) -> None:
    """Checks that a chain and its gradient, under a random table of logical axes, give one device's results."""
    floats = tuple(range(INDICES, len(chain.args)))

    def both(*args: Any) -> Any:
        loss = lambda *xs: sum((jnp.tanh(y) ** 2).sum() for y in chain(*args[:INDICES], *xs))  # noqa: E731
        return chain(*args), jax.grad(loss, tuple(i - INDICES for i in floats))(*args[INDICES:])

    check_under_drawn_plan(both, chain.args, data, MESHES[1:])


def check_under_drawn_plan(fn: Any, args: Any, data: Any, meshes: Any) -> None:
    """Checks that a function gives one device's results under a random table that shards some of its logical axes."""
    mesh = data.draw(st.sampled_from(meshes), "mesh")
    warnings.simplefilter("ignore", AutoshardWarning)  # some plans shard nothing
    axes = plan(fn, *args, mesh=mesh).logical_axes.values()
    names = sorted({part for dims in axes for name in dims for part in name.split("*") if part != "1"})
    assume(names)
    subsets = st.lists(st.sampled_from(names), max_size=3, unique=True)
    table = data.draw(st.fixed_dictionaries(dict.fromkeys(mesh, subsets)), "table")
    assume(any(table.values()))
    results = auto_shard(fn, plan=table, mesh=mesh)(*args)
    for actual, expected in zip(jax.tree.leaves(results), jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        assert_close(actual, expected)


@pytest.mark.whole
@few_examples(6)
@given(chains(6, branching=True), st.data())
def test_a_chain_under_a_drawn_plan_gives_its_result(chain, data):
    check_plan(chain, data)


@pytest.mark.slow
@many_examples(120)
@given(chains(8, branching=True), st.data())
def test_chains_under_drawn_plans_give_their_results(chain, data):
    check_plan(chain, data)


def check_exchange(fn: Any, x: np.ndarray, mesh: Any) -> None:
    """Checks that a collective between planned operators, and its gradient, give the same results as without a plan."""

    def both(x: Any) -> Any:
        loss = lambda x: (jnp.sin(fn(jnp.cos(x))) ** 2).sum()  # noqa: E731
        return fn(x * 2.0), jax.grad(loss)(x)

    for actual, expected in zip(auto_shard(both, mesh=mesh)(x), jax.jit(both)(x), strict=True):
        assert_close(actual, np.zeros(expected.shape, expected.dtype) if not expected.size else expected)
    assert check_rule(both, x, partitioner=False) == []


@pytest.mark.slow
@few_examples(5)
@given(exchanges())
def test_an_exchange_in_a_planned_function(drawn):
    check_exchange(*drawn[1:])


@pytest.mark.slow
@many_examples(30)
@given(exchanges())
def test_exchanges_in_planned_functions(drawn):
    check_exchange(*drawn[1:])


@pytest.mark.slow
@many_examples(150)
@given(networks(), st.data())
def test_networks_under_drawn_plans_give_their_results(drawn, data):
    step, kernels, x = drawn
    try:
        jax.eval_shape(step, kernels, x)
    except (TypeError, ValueError, ZeroDivisionError):
        assume(False)  # nothing is left of the image
    check_under_drawn_plan(step, (kernels, x), data, (*MESHES[1:], {"x": 8}, {"x": 2, "y": 2, "z": 2}))
