"""Positions of the largest or smallest element of a sharded dimension, such as the next token of a decode step."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import auto_shard

VOCAB, WIDTH, HIDDEN, ROWS, LAYERS = 128, 16, 64, 8, 8


def decode_step(find):
    def decode(weights, state):
        def layer(x, w):
            return x + jnp.tanh(x @ w["up"]) @ w["down"], None

        x, _ = jax.lax.scan(layer, weights["embed"][state["tokens"]] + state["kept"], weights["layers"])
        return {"kept": jnp.round(x), "tokens": find(x @ weights["head"], axis=-1).astype(jnp.int32)}

    return decode


def arguments():
    """Small integers, so that sums are exact. Every column of the head occurs in all shards, so that many are equal."""
    rng = np.random.default_rng(0)
    sizes = {"embed": (VOCAB, WIDTH), "up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)}
    drawn = {name: rng.integers(-2, 3, size).astype(np.float32) for name, size in sizes.items()}
    few = rng.integers(-2, 3, (WIDTH, VOCAB // 16)).astype(np.float32)
    weights = {"embed": drawn["embed"], "head": np.tile(few, 16), "layers": {k: drawn[k] for k in ("up", "down")}}
    state = {"kept": np.zeros((ROWS, WIDTH), np.float32), "tokens": rng.integers(0, VOCAB, ROWS).astype(np.int32)}
    return weights, state


@pytest.mark.parametrize("words", ["tp:8", "tp:4 fsdp:2"])
@pytest.mark.parametrize("find", [jnp.argmax, jnp.argmin])
def test_the_vocabulary_of_a_head_whose_best_token_is_taken_is_sharded(find, words):
    step, given = decode_step(find), arguments()
    planned = auto_shard(step, plan=words)
    plan = planned.plan(*given)
    spec = next(leaf.spec for leaf in plan.inputs if leaf.path.endswith("head"))
    assert "tp" in str(spec[1])
    tokens = jax.jit(step)(*given)["tokens"]
    assert (np.asarray(tokens) < VOCAB // 16).all()  # the first of 16 equal ones
    np.testing.assert_array_equal(planned(*given)["tokens"], tokens)
    text = planned.lower(*given).compile().as_text()
    gathered = [tuple(map(int, m[1].split(","))) for m in re.finditer(r"= \w+\[([\d,]+)\]\S* all-gather\(", text)]
    assert not any(shape[-1:] == (VOCAB,) and shape[0] in (ROWS, ROWS // 2) for shape in gathered)  # the logits
