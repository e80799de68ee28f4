"""Traffic of what only the loops of microbatches and stages add has a line of the user's step, too."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard import plan

LAYERS, ROWS, EMBED, HIDDEN = 4, 32, 8, 16


def layer(x, weights):
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None


def step(weights, x):
    def loss(weights):
        y = jax.lax.scan(layer, x @ weights["first"], weights["layers"])[0]
        return (y @ weights["head"]).mean(), y.sum(-1)

    (value, rows), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value, rows


def shapes() -> Any:
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)  # noqa: E731
    layers = {"up": shape(LAYERS, EMBED, HIDDEN), "down": shape(LAYERS, HIDDEN, EMBED)}
    return {"first": shape(EMBED, EMBED), "layers": layers, "head": shape(EMBED, EMBED)}, shape(ROWS, EMBED)


@pytest.mark.parametrize(
    ("words", "schedule"),
    [("dp:4", None), ("pp:2 dp:2", "1f1b"), ("pp:2 fsdp:2", "zb"), ("pp:2 dp:2", "interleaved:2")],
)
def test_every_collective_has_a_line_of_the_step(words, schedule):
    made = plan(step, *shapes(), target="cpu:4", plan=words, microbatches=4, schedule=schedule)
    lines = {line for *_, line in made.traffic}
    assert lines and all(re.search(r"/test_lines\.py:.* \((layer|step\.<locals>\.loss)\)", line) for line in lines)
