"""Graph networks of Jraph, with networks of Haiku for nodes and edges."""

import haiku as hk
import jax
import jax.numpy as jnp
import jraph
import numpy as np

from tests.foreign.one_step import Program, normal


def _graphs():
    """Returns 8 graphs of 8 nodes with 24 edges each, as one."""
    rng = np.random.default_rng(0)
    edges = rng.integers(0, 8, (2, 8, 24)) + 8 * np.arange(8)[:, None]
    senders, receivers = (jnp.asarray(x.ravel(), jnp.int32) for x in edges)
    counts = jnp.full(8, 8, jnp.int32), jnp.full(8, 24, jnp.int32)
    return jraph.GraphsTuple(
        normal(64, 16), normal(192, 16, seed=1), receivers, senders, normal(8, 16, seed=2), *counts
    )


def _fit(make):
    def forward(graphs):
        return make()(graphs)

    net, graphs = hk.without_apply_rng(hk.transform(forward)), _graphs()
    targets = normal(64, 16, seed=3)

    def loss(params, graphs, targets):
        return jnp.mean((net.apply(params, graphs).nodes - targets) ** 2)

    return Program(loss, net.init(jax.random.key(0), graphs), (graphs, targets), plans=("fsdp:8", "dp:4 fsdp:2"))


def _mlp():
    mlp = hk.nets.MLP([64, 16])
    return lambda *xs: mlp(jnp.concatenate([x for x in xs if x is not None], -1))


def graph_network():
    return _fit(lambda: jraph.GraphNetwork(_mlp(), _mlp(), _mlp()))


def interaction_network():
    return _fit(lambda: jraph.InteractionNetwork(_mlp(), _mlp()))


def graph_convolution():
    return _fit(lambda: jraph.GraphConvolution(hk.Linear(16), add_self_edges=True))


def graph_attention():
    def make():
        query, logits = hk.Linear(32), hk.Linear(1)
        return jraph.GAT(query, lambda sent, received, edges: logits(sent + received), hk.Linear(16))

    return _fit(make)


PROGRAMS = (graph_network, interaction_network, graph_convolution, graph_attention)
