"""Weights of heads are stored where XLA:TPU reduce-scatters their gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.sharding.axes.weights.storage_dims import stored_dim

Weights = dict[str, jax.Array]


def planned(width: int, heads: int, features: int, words: str) -> autoshard.Plan:
    """Plan a layer of attention, without its products of queries and keys."""

    def step(weights: Weights, x: jax.Array) -> Weights:
        def loss(weights: Weights) -> jax.Array:
            y = jnp.tanh(jnp.einsum("bse,ehd->bshd", x, weights["query"]))
            return (jnp.einsum("bshd,hde->bse", y, weights["out"]) ** 2).mean()

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    sizes = {"query": (width, heads, features), "out": (heads, features, width)}
    weights = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}
    x = jax.ShapeDtypeStruct((64, 128, width), jnp.float32)
    return autoshard.plan(step, weights, x, plan=words, target="v5e:2x4")


def specs(width: int, heads: int, features: int, words: str) -> dict[str, Any]:
    """Return the stored sharding of the weights."""
    made = planned(width, heads, features, words)
    return {leaf.path.rpartition("/")[2]: tuple(leaf.spec) for leaf in made.inputs if leaf.role == "parameter"}


@pytest.mark.parametrize(
    ("sizes", "words", "query", "out"),
    [
        ((2560, 32, 80), "fsdp:8", (None, "fsdp"), ("fsdp",)),
        ((1024, 16, 64), "fsdp:8", (None, "fsdp"), ("fsdp",)),
        ((2048, 32, 64), "fsdp:8", ("fsdp",), (None, None, "fsdp")),  # 256 elements in a shard
        ((2560, 20, 128), "fsdp:8", ("fsdp",), (None, None, "fsdp")),  # the features fill the lanes
        ((1920, 12, 80), "fsdp:8", ("fsdp",), (None, None, "fsdp")),  # 12 heads cannot be sharded
    ],
)
def test_heads(sizes: tuple[int, int, int], words: str, query: Any, out: Any) -> None:
    assert specs(*sizes, words) == {"query": query, "out": out}


def test_the_explanation_says_why_a_smaller_dimension_is_sharded() -> None:
    made = {width: planned(width, 32, 80, "fsdp:8") for width in (2560, 2048)}
    reasons = {width: " ".join(each.explain("weights/query").split()) for width, each in made.items()}
    assert "collectives cost less along it" in reasons[2560]
    assert "the largest dimension" in reasons[2048]


@pytest.mark.parametrize(
    ("sizes", "outputs", "dim"),
    [
        ((3, 3, 64, 128), 3, 2),  # along input features, if there are enough
        ((3, 3, 4, 128), 3, 3),
        ((640, 4096), 2, 1),  # a matrix is sharded along its largest dimension
        ((640, 5, 4), 3, 0),  # its first other dimension is not divisible
    ],
)
def test_other_tensors(sizes: tuple[int, ...], outputs: int, dim: int) -> None:
    every = range(len(sizes))
    choices = [d for d in every if sizes[d] % 4 == 0]
    assert stored_dim(sizes, [[]] * len(sizes), every, choices, outputs, 4) == dim


def test_heads_that_are_sharded_are_not_sharded_again() -> None:
    sizes, every = (2560, 16, 80), range(3)
    assert [stored_dim(sizes, used, every, every, 3, 8) for used in ([[], [], []], [[], ["tp"], []])] == [1, 0]
