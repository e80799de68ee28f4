"""Parameters that are gathered after their update."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard import plan
from autoshard.sharding.cost.gathers import gathered_updates as module
from autoshard.sharding.layout.operator_sharding import AFTER_UPDATE, BEFORE_LOOPS, StateGather

LAYERS, WIDTH, ROWS = 4, 1024, 64


def temporary(words, target="v5e:2x4", scanned=False, donates=True):
    """The temporaries of a step with momentum, in multiples of the bytes of its parameters."""

    def loss(layers, x):
        if scanned:
            return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0] ** 2)
        for w in layers:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def step(state, x):
        layers, moments = state
        gradients = jax.grad(loss)(layers, x)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
        return jax.tree.map(lambda w, m: w - 0.1 * m, layers, moments), moments

    one = jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")
    layers = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), "float32") if scanned else [one] * LAYERS
    rows = jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
    made = plan(step, (layers, layers), rows, target=target, plan=words, donate_argnums=0 if donates else ())
    return made.estimate.memory_bytes["temporary"] / (LAYERS * WIDTH * WIDTH * 4)


@pytest.mark.parametrize("scanned", [False, True])
def test_new_parameters_are_held_until_the_end_on_tpus(scanned):
    assert 1 <= temporary("zero1:8", scanned=scanned) < 1.3
    assert temporary("zero1:8", "h100:1x8", scanned=scanned) < 0.7


def test_parameters_that_are_not_gathered_are_updated_in_place():
    assert temporary("fsdp:8") < 0.7
    assert temporary("dp:8", scanned=True) == pytest.approx(temporary("dp:8", "h100:1x8", scanned=True), rel=0.25)


def test_results_outside_of_donated_memory_count_once():
    assert temporary("zero1:8", donates=False) < 1.6


def test_stacks_that_are_gathered_before_loops_are_no_updates(monkeypatch):
    gathers = [StateGather(0, ("fsdp",), 1.0, when) for when in (BEFORE_LOOPS, AFTER_UPDATE)]
    monkeypatch.setattr(module, "state_gathers", lambda layout, updated: gathers)
    program = SimpleNamespace(avals=[jax.ShapeDtypeStruct((8, 8), "float32")])
    layout: Any = SimpleNamespace(
        axes=SimpleNamespace(program=program), stored_spec=lambda v: ((), ()), shard_count=lambda axes: 1
    )
    (held,) = module.gathered_updates(layout, {0: 5}, last=9)
    assert (held.nbytes, held.first.tolist(), held.last.tolist()) == (256, [5], [9])
