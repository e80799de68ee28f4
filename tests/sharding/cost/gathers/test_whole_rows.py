"""Rows that others refer to stay whole once they are gathered."""

import jax.numpy as jnp
import numpy as np

from autoshard import plan
from autoshard.sharding.axes.analysis import analyse
from autoshard.sharding.cost.collectives import LiveBuffers
from autoshard.sharding.cost.gathers.whole_rows import Rows, kept_whole, rows_of_gathers
from autoshard.sharding.program.tracing import trace
from tests.sharding.graph_step import graph_shapes, graph_step

NODES, WIDTH = 16384, 256


def temporary(layers, target):
    shapes = graph_shapes(nodes=NODES, edges=NODES, width=WIDTH, layers=layers)
    made = plan(graph_step, *shapes, target=target, plan="fsdp:8", donate_argnums=0)
    return made.estimate.memory_bytes["temporary"]


def test_nodes_of_all_layers_stay_whole_until_the_backward_pass_on_tpus():
    whole = NODES * WIDTH * jnp.dtype("float32").itemsize
    on_tpu, on_gpu = (temporary(6, target) - temporary(2, target) for target in ("v5e:2x4", "h100:1x8"))
    assert 4 * whole < on_tpu < 6 * whole
    assert on_gpu < 2 * whole


def test_each_value_is_held_once_from_its_operator_to_its_last_use():
    rows = Rows(value=7, nbytes=64, first=2, last=40)
    buffers = [
        LiveBuffers(64.0, np.array([5, 10]), np.array([6, 11])),  # the forward pass, and another value
        LiveBuffers(64.0, np.array([30]), np.array([31])),  # the backward pass
        LiveBuffers(32.0, np.array([5]), np.array([6])),  # gathered in part
    ]
    found = kept_whole(buffers, {5: rows, 30: rows})
    spans = sorted((x.nbytes, a, b) for x in found for a, b in zip(x.first.tolist(), x.last.tolist(), strict=True))
    assert spans == [(32.0, 5, 6), (64, 2, 40), (64.0, 10, 11)]
    assert kept_whole(buffers, {}) == buffers


def test_rows_are_held_until_the_last_operator_that_takes_them():
    """The nodes of a layer are added to its update, after the gathers of both ends of the edges."""
    found = analyse(trace(graph_step, graph_shapes(), {}))
    ops = list(found.axes.program.ops())
    rows = rows_of_gathers(found.axes.program, found.roles, lambda v: True)
    assert rows
    for each in rows.values():
        assert each.value in ops[each.first].results and each.value in ops[each.last].operands
        assert not any(each.value in op.operands for op in ops[each.last + 1 :])
    assert any(each.last > number for number, each in rows.items())
