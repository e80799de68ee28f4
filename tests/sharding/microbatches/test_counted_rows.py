"""Gathers and scatters whose index counts the rows: each microbatch computes them for its own rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import auto_shard

ROWS, SEQ, EMBED, VOCAB = 8, 4, 8, 16
NUMBERS = np.arange(ROWS)


def chunked(pick: Any) -> Any:
    """The loss of one position after another, recomputed in the backward pass."""

    def losses(logits: Any, labels: Any) -> Any:
        one = jax.checkpoint(lambda xs: pick(jax.nn.log_softmax(xs[0]), xs[1]))
        return jax.lax.map(one, (logits.swapaxes(0, 1), labels.swapaxes(0, 1)))

    return losses


def counted(logits: Any, labels: Any) -> Any:
    return logits[jnp.arange(len(logits)), labels]


FORMS: dict[str, Any] = {
    "last position": lambda x, labels: counted(x[:, -1], labels[:, -1]),
    "all positions": lambda x, labels: x[jnp.arange(ROWS)[:, None], jnp.arange(SEQ), labels],
    "numpy": lambda x, labels: x[:, 0][NUMBERS, labels[:, 0]],
    "filled": lambda x, labels: x[:, 0].at[jnp.arange(ROWS), labels[:, 0]].get(mode="fill", fill_value=0.0),
    "set": lambda x, labels: x[:, 0] * jnp.zeros((ROWS, VOCAB)).at[jnp.arange(ROWS), labels[:, 0]].set(1.0),
    "in loops": chunked(counted),
}


def make_step(form: str) -> Any:
    def loss(weights, x, labels):
        return -FORMS[form](jax.nn.log_softmax(jnp.tanh(x @ weights)), labels).mean()

    return lambda *args: jax.value_and_grad(loss)(*args)


def arguments() -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    x, labels = jax.random.normal(keys[1], (ROWS, SEQ, EMBED)), jax.random.randint(keys[2], (ROWS, SEQ), 0, VOCAB)
    return jax.random.normal(keys[0], (EMBED, VOCAB)), x, labels


@pytest.mark.filterwarnings("ignore:.*devices")
@pytest.mark.parametrize("form", FORMS)
def test_rows_picked_by_their_number_are_not_gathered(form):
    """Only the loss and the gradient are summed: the loop does not return rows for a pick after it."""
    step = auto_shard(make_step(form), plan="dp:2", target="cpu:2", microbatches=2)
    made = step.plan(*arguments())
    assert {kind for kind, *_ in made.traffic} == {"all-reduce"}
    assert made.estimate.comm_bytes <= 4 * (EMBED * VOCAB + 8)
    expected = jax.tree.leaves(jax.jit(make_step(form))(*arguments()))
    for found, wanted in zip(jax.tree.leaves(step(*arguments())), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
