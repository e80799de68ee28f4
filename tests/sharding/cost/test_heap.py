"""The heap in which XLA:TPU places buffers."""

import jax
import jax.numpy as jnp
import pytest

from autoshard import plan
from autoshard.sharding.cost.heap import ALIGNMENT, first_stacks, heap_bytes
from autoshard.sharding.planner.bound_plan import bound_or_error


def placed(*lives, divided=()):
    """The heap of buffers of (first, last, units), in units."""
    first, last, units = zip(*lives, strict=True)
    return heap_bytes(first, last, [n * ALIGNMENT for n in units], divided) // ALIGNMENT


def test_a_buffer_takes_the_lowest_hole_that_is_large_enough():
    below = [(0, 1, 2), (0, 9, 1), (0, 1, 4), (0, 9, 1)]  # leave holes of 2 and 4
    assert placed(*below, (2, 9, 2), (2, 9, 4)) == 8
    assert placed(*below, (2, 9, 4), (2, 9, 2)) == 8
    assert placed(*below, (2, 9, 2), (3, 9, 3), (4, 9, 1)) == 8
    assert placed(*below, (2, 9, 3), (3, 9, 3)) == 11


def test_holes_that_meet_are_one():
    first, second, third = (0, 1, 2), (0, 2, 2), (0, 3, 2)
    assert placed(first, second, third, (3, 9, 4)) == 6
    assert placed(first, second, third, (2, 9, 4)) == 10
    assert placed(second, third, first, (4, 9, 6)) == 6


def test_a_buffer_is_live_while_its_last_operator_runs():
    assert placed((0, 1, 2), (1, 2, 2)) == 4
    assert placed((0, 1, 2), (2, 2, 2)) == 2
    assert placed((1, 0, 2), (2, 2, 1)) == 1  # never live


def test_sizes_are_multiples_of_the_alignment():
    assert heap_bytes([0, 0], [1, 1], [1.0, ALIGNMENT + 0.5]) == 2 * ALIGNMENT
    assert heap_bytes([0, 0], [1, 1], [1.0, ALIGNMENT + 1]) == 3 * ALIGNMENT
    assert heap_bytes([], [], []) == 0


def test_small_arrays_fill_all_holes():
    below = [(0, 1, 2), (0, 9, 1), (0, 1, 4), (0, 9, 1)]
    assert placed(*below, (2, 2, 7), divided=[False] * 4 + [True]) == 9
    assert placed(*below, (2, 2, 7), divided=[False] * 5) == 15
    assert placed(*below, (2, 2, 7), (3, 9, 2), divided=[*[False] * 4, True, False]) == 9  # and leave them again


def perceptron(weights, x):
    def layer(x, w):
        return x + jax.nn.gelu(x @ w["up"], approximate=False) @ w["down"]

    for w in weights:
        x = jax.checkpoint(layer)(x, w)
    return jnp.mean(x.astype("float32") ** 2)


@pytest.mark.parametrize("target", ["v5e:2x2", "h100:4"])
def test_kept_residuals_leave_a_hole_that_is_too_small(target):
    """The first activation has the lowest place. What the layers keep lies above it, and what is small is below.

    Compiled for v5e:2x2 (libtpu 0.0.42.1), `plain-erf full` of `benchmarks/peak_memory.py` has such a hole of one
    activation: 250 MiB of 1282.
    """
    rows, width, hidden = 65_536, 1024, 4096
    shapes = {"up": (width, hidden), "down": (hidden, width)}
    weights = [{name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}] * 4
    x = jax.ShapeDtypeStruct((rows, width), "bfloat16")
    made = plan(jax.grad(perceptron, (0, 1)), weights, x, plan="dp:4", target=target)
    bound = bound_or_error(made.bound)
    live = bound.problem.memory.at_peak(bound.layout, bound.problem.cost(bound.layout).live_buffers)
    gaps = made.estimate.memory_bytes["temporary"] - sum(size for _, size in live)
    one = rows / 4 * hidden * 2
    assert gaps == pytest.approx(0 if target == "h100:4" else one, abs=0.01 * one)


def test_stacks_of_the_first_loop_are_placed_before_activations():
    def loss(params, tokens):
        x = params["embed"][tokens]
        x, kept = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, params["layers"])
        return jnp.sum(jnp.cumsum(kept, 0))

    params = {"embed": jax.ShapeDtypeStruct((8192, 256), "float32")}
    params |= {"layers": jax.ShapeDtypeStruct((4, 256, 256), "float32")}
    tokens = jax.ShapeDtypeStruct((64, 128), "int32")
    problem = bound_or_error(plan(loss, params, tokens, plan="dp:8", target="v5e:2x4").bound).problem
    stacks, before = first_stacks(problem.program, problem.roles, problem.cost.fusion)
    assert [problem.program.avals[v].shape for v in stacks] == [(4, 64, 128, 256)]
    assert before is not None and before.name == "gather"
    assert problem.memory.birth[stacks] == problem.memory.birth[before.results[0]]


def test_a_value_that_is_written_over_another_one_has_its_place():
    """The gradient of the loss is written over the last activation, and does not move to the hole below.

    Compiled for v5e:2x2 (libtpu 0.0.42.1), `plain-gelu full` of `benchmarks/peak_memory.py` does so. The hole is then a
    little too small for the activation that is recomputed next: 1.19 GiB instead of 1.13.
    """
    rows, width = 65_536, 1024
    weights = [{"up": jax.ShapeDtypeStruct((width, 4 * width), "bfloat16"),
                "down": jax.ShapeDtypeStruct((4 * width, width), "bfloat16")}] * 2  # fmt: skip
    x = jax.ShapeDtypeStruct((rows, width), "bfloat16")
    made = plan(jax.grad(perceptron, (0, 1)), weights, x, plan="dp:4", target="v5e:2x2")
    problem = bound_or_error(made.bound).problem
    memory, avals = problem.memory, problem.program.avals
    pairs = [pair for pair in memory.written_over.items() if avals[pair[1]].shape == (rows, width)]
    (activation, gradient) = min(pairs, key=lambda pair: memory.birth[pair[0]])
    assert memory.death[activation] < memory.birth[gradient]
    assert memory.freed[activation] >= memory.death[gradient]
    assert activation in memory.placed and gradient not in memory.placed
