"""Sums of several scatters, which one collective reduces."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.sharding.axes.analysis import analyse
from autoshard.sharding.axes.weights.joined_sums import joined_sums
from autoshard.sharding.program.tracing import trace
from tests.sharding.graph_step import LAYERS, graph_shapes, graph_step

NODES, EDGES = 16, 64


def sums(fn, *args):
    analysis = analyse(trace(fn, args, {}))
    return joined_sums(analysis.axes, analysis.roles.rows)


def test_the_gradient_of_nodes_is_one_sum_in_each_layer():
    """The nodes of the first layer have a gradient, too: that of the weight which computes them."""
    found = sums(graph_step, *graph_shapes())
    assert [(len(each.scatters), len(each.additions)) for each in found] == [(2, 3)] * LAYERS
    assert all(len(each.others) == 2 for each in found)  # the residual and the update


def terms(combine):
    """A step in which `combine` adds two scatters of edges to their nodes."""

    def step(w, nodes, edges, senders, receivers):
        def loss(w):
            sent = jnp.tanh((edges + nodes[senders]) @ w)
            a, b = (jax.ops.segment_sum(sent, ends, num_segments=NODES) for ends in (senders, receivers))
            return jnp.mean(jnp.square(combine(a, b, nodes)))

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    ends = [jnp.zeros(EDGES, int)] * 2
    return sums(step, jnp.ones((8, 8)), jnp.ones((NODES, 8)), jnp.ones((EDGES, 8)), *ends)


@pytest.mark.parametrize(("combine", "joined"), [
    (lambda a, b, nodes: (a + b) * nodes, 1),
    (lambda a, b, nodes: (nodes + a) + b, 1),
    (lambda a, b, nodes: (a + nodes) + (nodes + b), 1),
    (lambda a, b, nodes: a - b, 0),
    (lambda a, b, nodes: a * b, 0),
    (lambda a, b, nodes: (a + b) + jnp.tanh(a), 0),  # another operator takes a scatter
    (lambda a, b, nodes: (s := nodes + a) + b + jnp.tanh(s), 0),  # another operator takes a part of the sum
    (lambda a, b, nodes: a.astype(jnp.bfloat16) + b.astype(jnp.bfloat16), 0),  # each is rounded first
])  # fmt: skip
def test_only_the_sum_takes_its_terms(combine, joined):
    assert len(terms(combine)) == joined


def test_terms_with_other_rows_are_apart():
    """Two kinds of edges may be sharded differently, so only the terms of one kind are joined."""

    def step(w, nodes, senders, receivers, others):
        def loss(w):
            node = nodes @ w
            reads = node[senders], node[receivers], node[others]
            return sum(jnp.mean(jnp.square(jnp.tanh(each))) for each in reads)

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    ends = [jnp.zeros(n, int) for n in (EDGES, EDGES, EDGES // 2)]
    (found,) = sums(step, jnp.ones((8, 8)), jnp.ones((NODES, 8)), *ends)
    assert len(found.scatters) == 2 and len(found.others) == 1


def test_programs_without_other_rows_have_none():
    def step(table, tokens, targets):
        def loss(table):
            return jnp.mean(jnp.square(jnp.tanh(table[tokens]) - table[targets]))

        return table - 0.1 * jax.grad(loss)(table)

    assert sums(step, jnp.ones((32, 8)), *[jnp.zeros((4, 16), int)] * 2) == []
