"""The note on work that several devices repeat."""

import jax
import jax.numpy as jnp
import pytest

from autoshard import plan
from tests.sharding.programs import descent

WIDTH = 1024
WEIGHTS = [jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")] * 2


@descent
def step(weights, x):
    return jnp.mean((jnp.tanh(x @ weights[0]) @ weights[1]) ** 2)


def notes(words, rows, target="v5e:2x4"):
    made = plan(step, WEIGHTS, jax.ShapeDtypeStruct((rows, WIDTH), "float32"), target=target, plan=words)
    return [note for note in made.notes if note.startswith("devices repeat work")]


def test_the_update_that_every_device_repeats_is_noted_with_its_line():
    (note,) = notes("dp:8", 64)
    assert "if all 8 devices divided it, compute would take" in note and "tests/sharding/programs.py" in note


@pytest.mark.parametrize(("words", "rows"), [("fsdp:8", 64), ("dp:8", 1 << 16)])
def test_work_that_is_divided_or_takes_little_time_is_not_noted(words, rows):
    assert notes(words, rows) == []


def test_weights_that_are_only_stored_in_shards_divide_no_work():
    """`tp` shards only the classes. Its devices store shards of the weights before the head, but repeat their work."""

    @descent
    def step(weights, x):
        hidden = x + jnp.tanh(x @ weights["up"]) @ weights["down"]
        return -jnp.mean(jax.nn.log_softmax(hidden @ weights["head"])[:, 0])

    shapes = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH), "head": (WIDTH, 2 * WIDTH)}
    weights = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((1 << 17, WIDTH), "float32")
    made = plan(step, weights, x, target="v5e:2x4", plan="dp:2 tp:4 tp-ffn state")
    assert "tp" in made.in_specs[0]["up"][1]
    (note,) = [note for note in made.notes if note.startswith("devices repeat work")]
    assert "test_repeated_work.py" in note


def test_one_device_repeats_nothing():
    assert notes("dp:1", 64, target="v5e:1x1") == []
