"""Models and data as users of `--model` and `--data` write them, valid and invalid ones."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from autoshard.models import GPTConfig, MoE, MoEConfig


class Bigram(nnx.Module):
    """Predicts a token from the previous one."""

    def __init__(self, vocab: int, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(vocab, vocab, rngs=rngs)

    def __call__(self, tokens):
        return self.table(tokens)


def factory(*, vocab, rngs):
    """A model factory that accepts two of the three possible arguments."""
    return Bigram(vocab, rngs)


def experts(*, vocab, context, rngs):
    """A factory of a built-in model that no command-line option selects."""
    gpt = GPTConfig(vocab=vocab, layers=1, heads=2, width=16, context=context)
    return MoE(MoEConfig(gpt, experts=4), rngs=rngs)


def not_a_model():
    """Return something that is not a model."""
    return 3


def counting(config):
    """Cyclic tokens, which a bigram model can learn."""
    return np.arange(4000) % 7, np.arange(400) % 7


def words(config):
    """Return something that is not token arrays."""
    return "once", "upon"


class Named(nnx.Module):
    """A network of one hidden layer whose values have names: one of its own, and one as the layers here have."""

    def __init__(self, vocab: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocab, 32, rngs=rngs)
        self.up, self.head = nnx.Linear(32, 128, rngs=rngs), nnx.Linear(128, vocab, rngs=rngs)

    def __call__(self, tokens):
        hidden = checkpoint_name(jnp.tanh(self.up(self.embed(tokens))), "hidden")
        squared = checkpoint_name(hidden * hidden, "mlp_in")
        return self.head(squared * squared)


def named(*, vocab, rngs):
    """A factory of a model with named values."""
    return Named(vocab, rngs)
