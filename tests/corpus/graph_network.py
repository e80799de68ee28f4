"""A graph attention network in plain JAX: a batch joined to one graph, messages by gather and `segment_sum`; Adam."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

GRAPHS, NODES, EDGES = 8, 64, 256
tx = optax.adam(3e-3)


def dense(layer, x):
    return x @ layer["w"] + layer["b"]


def segment_softmax(scores, segments, count):
    """Softmax of scores over the edges of each receiver."""
    peak = jax.ops.segment_max(scores, segments, count)
    weights = jnp.exp(scores - jax.lax.stop_gradient(peak)[segments])
    return weights / (jax.ops.segment_sum(weights, segments, count)[segments] + 1e-9)


def message_passing(layer, nodes, graph):
    edge_inputs = jnp.concatenate([nodes[graph["senders"]], nodes[graph["receivers"]], graph["edges"]], axis=-1)
    messages = jax.nn.relu(dense(layer["message"], edge_inputs))
    weights = segment_softmax(messages @ layer["score"], graph["receivers"], NODES)
    weighted = weights[..., None] * messages.reshape(EDGES, weights.shape[-1], -1)
    received = jax.ops.segment_sum(weighted.reshape(EDGES, -1), graph["receivers"], NODES)
    return nodes + dense(layer["update"], jnp.concatenate([nodes, received], axis=-1))


def forward(params, graph):
    nodes = dense(params["inputs"], graph["nodes"])
    for layer in params["layers"]:
        nodes = jax.nn.relu(message_passing(layer, nodes, graph))
    size = jax.ops.segment_sum(jnp.ones(NODES), graph["graph_of"], GRAPHS)
    pooled = jax.ops.segment_sum(nodes, graph["graph_of"], GRAPHS) / jnp.maximum(size, 1)[:, None]
    return dense(params["outputs"], pooled)[:, 0]


def loss_fn(params, graph):
    return jnp.mean(optax.huber_loss(forward(params, graph), graph["target"]))


def train_step(state, graph):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], graph)
    updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss


def make(features=8, dim=32):
    rng = np.random.default_rng(0)

    def layer(inputs, outputs):
        return {
            "w": jnp.asarray(rng.normal(size=(inputs, outputs)) / inputs**0.5, jnp.float32),
            "b": jnp.zeros(outputs),
        }

    def block():
        return {"message": layer(2 * dim + features, dim), "score": layer(dim, 4)["w"], "update": layer(2 * dim, dim)}

    params = {"inputs": layer(features, dim), "layers": [block(), block()], "outputs": layer(dim, 1)}
    graph_of = np.sort(rng.integers(0, GRAPHS, NODES))
    senders = rng.integers(0, NODES, EDGES)
    # An edge stays within its graph: its receiver is drawn from the nodes of its sender's graph.
    receivers = [rng.choice(np.flatnonzero(graph_of == graph_of[s])) for s in senders]
    arrays = {"nodes": rng.normal(size=(NODES, features)), "edges": rng.normal(size=(EDGES, features))}
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
    links = {"senders": senders, "receivers": receivers, "graph_of": graph_of}
    links = {name: jnp.asarray(x, jnp.int32) for name, x in links.items()}
    graph = arrays | links | {"target": jnp.asarray(rng.normal(size=GRAPHS), jnp.float32)}
    return train_step, ({"params": params, "opt_state": tx.init(params)},), graph
