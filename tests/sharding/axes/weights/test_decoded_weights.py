"""Codes of a stored weight, its scales and its zero points are gathered. The decoded weight is not."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import auto_shard, plan

ROWS, COLUMNS, BLOCK = 32, 128, 16
LEVELS = np.linspace(-1, 1, 16, dtype="float32")


def by_table(p):
    codes = jnp.stack([p["codes"] & 15, p["codes"] >> 4], -1)
    return jnp.asarray(LEVELS)[codes].reshape(-1, BLOCK) * p["scale"][:, None]


# What decodes a weight, in any shape of as many elements; and the shapes of the codes and of what else is stored.
CODINGS = {
    "rows": (lambda p: p["codes"] * p["scale"][:, None], {"codes": (ROWS, COLUMNS), "scale": (ROWS,)}),
    "columns": (lambda p: p["codes"] * jnp.exp(p["scale"]), {"codes": (ROWS, COLUMNS), "scale": (COLUMNS,)}),
    "blocks": (
        lambda p: p["codes"].reshape(ROWS, -1, BLOCK) * p["scale"][..., None],
        {"codes": (ROWS, COLUMNS), "scale": (ROWS, COLUMNS // BLOCK)},
    ),
    "few blocks": (  # the blocks of a row are fewer than the shards
        lambda p: p["codes"].reshape(ROWS, -1, 2 * BLOCK) * p["scale"][..., None],
        {"codes": (ROWS, COLUMNS), "scale": (ROWS, COLUMNS // BLOCK // 2)},
    ),
    "zeros": (
        lambda p: (p["codes"].reshape(-1, BLOCK, COLUMNS).astype("float32") - p["zeros"][:, None]) * p["scale"],
        {"codes": (ROWS, COLUMNS), "scale": (COLUMNS,), "zeros": (ROWS // BLOCK, COLUMNS)},
    ),
    "repeated": (
        lambda p: p["codes"] * jnp.repeat(p["scale"], BLOCK, axis=1),
        {"codes": (ROWS, COLUMNS), "scale": (ROWS, COLUMNS // BLOCK)},
    ),
    "repeated rows": (
        lambda p: p["codes"] * jnp.repeat(p["scale"], 2)[:, None],
        {"codes": (ROWS, COLUMNS), "scale": (ROWS // 2,)},
    ),
    "table": (by_table, {"codes": (ROWS, COLUMNS // 2), "scale": (ROWS * COLUMNS // BLOCK,)}),
}


def step_and_inputs(coding):
    """A step of plain gradient descent on two products, the second with a frozen weight that is decoded."""
    decode, shapes = CODINGS[coding]

    def loss(w, frozen, x):
        return jnp.mean((jnp.tanh(x @ w) @ decode(frozen).reshape(ROWS, COLUMNS)) ** 2)

    def step(state, x):
        value, gradient = jax.value_and_grad(loss)(state["w"], state["frozen"], x)
        return {**state, "w": state["w"] - 0.1 * gradient}, value

    drawn = np.random.default_rng(0)
    frozen = {n: drawn.integers(0, 100, shape).astype("uint8") for n, shape in shapes.items() if n != "scale"}
    frozen["scale"] = drawn.random(shapes["scale"], "float32") / 100
    state = {"w": drawn.normal(size=(ROWS, ROWS)).astype("float32") / 8, "frozen": frozen}
    return step, (state, drawn.normal(size=(128, ROWS)).astype("float32"))


def check_gathers(step, given):
    """Check that the compiled step gathers each array of its state once, as its plan says, and nothing else."""
    made = plan(step, *given, plan="fsdp:8")
    gathered = re.findall(r"= (\w+)\[([\d,]+)\]\S* all-gather\(", made.jit().lower(*given).compile().as_text())
    sizes = {"f32": 4, "u8": 1}
    compiled = sorted(sizes[dtype] * np.prod([int(n) for n in shape.split(",")]) for dtype, shape in gathered)
    assert compiled == sorted(array.nbytes for array in jax.tree.leaves(given[0]))
    planned = sum(sent for kind, _, sent, _ in made.traffic if kind == "all-gather")
    assert planned == sum(compiled) * 7 / 8


@pytest.mark.parametrize("coding", CODINGS)
def test_codes_and_scales_are_gathered_but_not_the_decoded_weight(coding):
    check_gathers(*step_and_inputs(coding))


def test_blocks_of_a_square_weight_are_gathered_as_codes():
    """Both dimensions of the weight are the same logical axes, and the blocks divide one of them."""

    def step(state, x):
        def loss(w):
            y = x + jnp.tanh(x @ w) @ w.T
            square = state["codes"].reshape(COLUMNS, -1, BLOCK) * state["scale"][..., None]
            return jnp.mean((y + y @ square.reshape(COLUMNS, COLUMNS)) ** 2)

        return {**state, "w": state["w"] - 0.1 * jax.grad(loss)(state["w"])}, x.sum()

    codes, scale = np.ones((COLUMNS, COLUMNS), "uint8"), np.ones((COLUMNS, COLUMNS // BLOCK), "float32")
    state = {"w": np.ones((COLUMNS, ROWS), "float32"), "codes": codes, "scale": scale}
    check_gathers(step, (state, np.ones((128, COLUMNS), "float32")))


@pytest.mark.parametrize("words", ["fsdp:8", "fsdp:2 tp:4", "tp:8", "zero1:8"])
def test_values_equal_those_of_one_device(words):
    for coding in CODINGS:
        step, given = step_and_inputs(coding)
        expected, loss = jax.jit(step)(*given)
        state, value = auto_shard(step, plan=words)(*given)
        np.testing.assert_allclose(value, loss, rtol=1e-6)
        np.testing.assert_allclose(state["w"], expected["w"], rtol=1e-5, atol=1e-6 * np.max(np.abs(expected["w"])))
