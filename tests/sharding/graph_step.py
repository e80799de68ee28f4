"""A train step of a graph network over one large graph, in plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp

NODES, EDGES, WIDTH, LAYERS = 128, 256, 32, 2


def graph_step(state: Any, nodes: Any, edges: Any, senders: Any, receivers: Any, wanted: Any) -> Any:
    """Each edge reads both its nodes, each node the sum of its edges. Layers are rematerialized.

    Returns:
        The updated state, the loss, and the gradients.
    """

    @jax.checkpoint
    def layer(node, edge, w):
        read = jnp.concatenate([edge, node[senders], node[receivers]], axis=-1)
        edge = edge + jnp.tanh(read @ w["edge"])
        total = jax.ops.segment_sum(edge, receivers, num_segments=node.shape[0])
        update = jnp.tanh(jnp.concatenate([node, total], axis=-1) @ w["node"])
        return node + update * w["scale"] + w["bias"], edge

    def loss(state):
        node, edge = nodes @ state["enter"], edges @ state["edge_in"]
        for w in state["layers"]:
            node, edge = layer(node, edge, w)
        return jnp.mean(jnp.square(node @ state["out"] - wanted))

    value, gradients = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), value, gradients


def graph_arguments(
    nodes: int = NODES, edges: int = EDGES, width: int = WIDTH, layers: int = LAYERS, dtype: Any = "float32"
) -> tuple[Any, ...]:
    """The arguments of `graph_step`, with random values."""
    keys = iter(jax.random.split(jax.random.key(0), 8 + 4 * layers))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, dtype) / 4

    def layer() -> dict[str, jax.Array]:
        return {"edge": normal(3 * width, width), "node": normal(2 * width, width),
                "scale": normal(width), "bias": normal(width)}  # fmt: skip

    state = {"enter": normal(16, width), "edge_in": normal(4, width), "out": normal(width, 8)}
    state |= {"layers": [layer() for _ in range(layers)]}
    ends = [jax.random.randint(next(keys), (edges,), 0, nodes) for _ in range(2)]
    return state, normal(nodes, 16), normal(edges, 4), *ends, normal(nodes, 8)


def graph_shapes(**sizes: Any) -> tuple[Any, ...]:
    """The shapes of the arguments of `graph_step`."""
    return jax.eval_shape(lambda: graph_arguments(**sizes))
