"""Rows of the data beside the batch: the nodes of a graph whose edges are the batch."""

import jax
import jax.numpy as jnp

from autoshard.sharding.axes.analysis import analyse
from autoshard.sharding.program.tracing import trace
from tests.sharding.graph_step import EDGES, NODES, graph_shapes, graph_step


def analysed(fn, *args):
    traced = trace(fn, args, {})
    return traced, analyse(traced)


def test_nodes_are_rows_beside_the_batch():
    _, found = analysed(graph_step, *graph_shapes())
    assert found.roles.batch is not None and found.axes.sizes[found.roles.batch] == EDGES
    assert [found.axes.sizes[c] for c in found.roles.other_rows] == [NODES]
    assert found.roles.rows == {found.roles.batch, *found.roles.other_rows}


def test_weights_that_only_nodes_use_are_parameters():
    """No value of theirs has the batch: not the last layer's, and not those after it."""
    traced, found = analysed(graph_step, *graph_shapes())
    roles = dict(zip(traced.in_paths, (found.roles.inputs[v] for v in traced.program.inputs), strict=True))
    of_state = [role for path, role in roles.items() if path.startswith("0/")]
    assert of_state == ["parameter"] * 11
    assert list(roles.values())[11:] == ["data"] * 5


def test_values_of_nodes_are_no_gradients():
    traced, found = analysed(graph_step, *graph_shapes())
    of_nodes = [v for v, dims in enumerate(found.axes.of_value) if set(found.roles.other_rows) & {*sum(dims, ())}]
    assert len(of_nodes) > 20 and not found.roles.gradients & {*of_nodes}
    gradients = traced.program.outputs[12:]  # after the state and the loss
    assert len(gradients) == 11 and found.roles.gradients >= {*gradients}


def test_graphs_in_rows_of_a_batch_are_no_other_rows():
    """Each row of the batch has a graph of its own, so all its values have the batch."""

    def step(w, nodes, senders, receivers):
        def loss(w):
            def total(nodes, senders, receivers):
                return jax.ops.segment_sum(jnp.tanh(nodes[senders] @ w), receivers, num_segments=16)

            return jnp.mean(jnp.square(jax.vmap(total)(nodes, senders, receivers)))

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    ends = [jnp.zeros((4, 64), int)] * 2
    _, found = analysed(step, jnp.ones((8, 8)), jnp.ones((4, 16, 8)), *ends)
    assert found.roles.batch is not None and found.axes.sizes[found.roles.batch] == 4
    assert found.roles.other_rows == ()
