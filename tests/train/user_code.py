"""A model and data as a user of `--model` and `--data` would write them."""

import numpy as np
from flax import nnx

from autoshard.models import GPTConfig, MoE, MoEConfig


class Bigram(nnx.Module):
    """Predicts a token from the one before."""

    def __init__(self, vocab: int, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(vocab, vocab, rngs=rngs)

    def __call__(self, tokens):
        return self.table(tokens)


def factory(*, vocab, rngs):
    """A model, given two of the three arguments that there are."""
    return Bigram(vocab, rngs)


def experts(*, vocab, context, rngs):
    """One of the package's own models, in a shape that no option of the command line asks for."""
    gpt = GPTConfig(vocab=vocab, layers=1, heads=2, width=16, context=context)
    return MoE(MoEConfig(gpt, experts=4), rngs=rngs)


def not_a_model():
    """Nothing that could be trained."""
    return 3


def counting(config):
    """Tokens that follow each other: a bigram model can learn them."""
    return np.arange(4000) % 7, np.arange(400) % 7


def words(config):
    """Not tokens."""
    return "once", "upon"
