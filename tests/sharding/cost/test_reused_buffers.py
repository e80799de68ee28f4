"""Results that XLA stores in the buffer of another value."""

import jax
import jax.numpy as jnp
import optax
import pytest

from autoshard import plan
from autoshard.sharding.cost import peak_memory
from autoshard.sharding.cost.reused_buffers import scattered_into_sums
from autoshard.sharding.planner.bound_plan import bound_or_error

ROWS, VOCAB, WIDTH = 4096, 8192, 64
SHAPES = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((WIDTH, VOCAB), (ROWS, WIDTH))]
LABELS = jax.ShapeDtypeStruct((ROWS,), "int32")


def temporary_bytes():
    """The temporaries of the gradient of a loss that picks the targets' logits with a gather."""

    def loss(w, x, labels):
        return optax.softmax_cross_entropy_with_integer_labels((x @ w).astype("float32"), labels).mean()

    return plan(jax.grad(loss), *SHAPES, LABELS, plan="dp:8", target="v5e:2x4").estimate.memory_bytes["temporary"]


def test_the_scatter_of_a_loss_takes_no_memory_of_its_own(monkeypatch):
    shared = temporary_bytes()
    monkeypatch.setattr(peak_memory, "scattered_into_sums", lambda program, written: frozenset())
    assert temporary_bytes() - shared == pytest.approx(4 * ROWS / 8 * VOCAB, rel=0.1)


def found(fn, *shapes):
    program = bound_or_error(plan(fn, *shapes, plan="dp:8", target="v5e:2x4").bound).problem.program
    return [program.avals[v].shape for v in scattered_into_sums(program, set())]


X, INDICES = jax.ShapeDtypeStruct((64, 16), "float32"), jax.ShapeDtypeStruct((64,), "int32")


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x, i: jnp.zeros((64, 16)).at[i].add(2 * x) + jnp.sin(x), [(64, 16)]),
        (lambda x, i: jnp.cos(x).at[i].add(2 * x) + jnp.sin(x), []),  # not into zeros
        (lambda x, i: jnp.zeros((64, 16)).at[i].add(2 * x) * jnp.sin(x), []),  # not a sum
        (lambda x, i: (y := jnp.zeros((64, 16)).at[i].add(x)) + jnp.sin(x) * jnp.sum(y), []),  # used twice
        (lambda x, i: (y := jnp.zeros((64, 16)).at[i].add(x)) + y, []),  # added to itself
        (lambda x, i: jnp.zeros((64, 16)).at[i].add(x) + x @ x.T @ x, []),  # to a product without a buffer
    ],
)
def test_only_scatters_into_zeros_that_are_added_once(fn, expected):
    assert found(fn, X, INDICES) == expected
