"""Sums of rows of the data, such as those of the edges of each node, run on shards."""

import re

import jax
import numpy as np
import pytest

from autoshard import auto_shard
from tests.sharding.graph_step import LAYERS, NODES, WIDTH, graph_arguments, graph_step

PLANS = ["dp:8", "dp:8 dp-nodes", "dp:2 fsdp:4", "dp:2 fsdp:4 dp-nodes", "dp:2 fsdp:4 fsdp-nodes", "fsdp:4 tp:2",
         "dp:2 fsdp:4 dp-nodes fsdp-nodes", "dp:2 zero1:4", "dp:2 fsdp:2 tp:2 state"]  # fmt: skip


@pytest.mark.parametrize("words", PLANS)
def test_loss_and_gradients_are_those_of_one_device(words):
    with jax.enable_x64(True):
        args = graph_arguments(dtype="float64")
        wanted = jax.jit(graph_step)(*args)
        found = auto_shard(graph_step, plan=words)(*args)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            assert a.dtype == "float64"
            np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


def collectives(words, kind, rows):
    """The number of arrays with this many rows that are results of one kind of collective in the compiled step."""
    text = auto_shard(graph_step, plan=words).lower(*graph_arguments()).compile().as_text()
    results = [line.partition(f" {kind}(")[0] for line in text.splitlines() if f" {kind}(" in line]
    return sum(len(re.findall(rf"f32\[{rows},{WIDTH}\]", each)) for each in results)


@pytest.mark.parametrize(("words", "ways"), [("dp:8", 8), ("dp:2 fsdp:4 dp-nodes", 4)])
def test_sums_at_sharded_nodes_are_reduce_scattered(words, ways):
    """A layer has three: its sum of edges, the same sum rematerialized, and the gradients of both reads together."""
    assert collectives(words, "reduce-scatter", NODES // ways) == 3 * LAYERS
    assert collectives(words, "all-reduce", NODES) == 0


def test_sums_at_replicated_nodes_are_reduced_once():
    assert collectives("dp:8 dp-nodes", "all-reduce", NODES) == 3 * LAYERS
