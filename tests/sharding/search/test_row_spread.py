"""How far rows other than the batch are spread, such as the nodes of a graph whose edges are the batch."""

import functools

import pytest

from autoshard import plan
from autoshard.sharding.axes.analysis import analyse
from autoshard.sharding.layout.plan_request import parse_request
from autoshard.sharding.program.tracing import trace
from autoshard.sharding.search.row_spread import row_spreads
from tests.sharding.graph_step import graph_shapes, graph_step
from tests.sharding.programs import batch, mlp_state, sgd_step

LARGE = {"nodes": 65536, "edges": 524288, "width": 512}


@functools.cache
def made(words=None, target="v5e:4x4", **sizes):
    return plan(graph_step, *graph_shapes(**(sizes or LARGE)), target=target, plan=words)


def variations(words, fn=graph_step, args=None):
    found = analyse(trace(fn, args or graph_shapes(), {}))
    return [str(each) for each in row_spreads(found.axes, found.roles, parse_request(words))]


@pytest.mark.parametrize(("words", "varied"), [
    ("dp:8", ["dp:8 dp-nodes"]),
    ("dp:2 fsdp:8", ["dp:2 fsdp:8 dp-nodes"]),
    ("dp:4 tp:2", ["dp:4 tp:2 dp-nodes"]),
    ("fsdp:8", []),  # state is stored over these devices
    ("dp:2 fsdp:4 state", []),
    ("tp:8", []),
    ("dp:256", []),  # more devices than nodes
    ("data=dp:2 model=tp:4", ["data=dp:2 model=tp:4 data-nodes"]),
])  # fmt: skip
def test_nodes_are_spread_over_fewer_devices(words, varied):
    assert variations(words) == varied


def test_other_programs_have_no_variations():
    assert variations("dp:2 fsdp:8", sgd_step, (mlp_state(), batch())) == []


def test_the_plan_of_a_large_graph_shards_its_nodes():
    chosen = made()
    (features,) = (each for each in chosen.inputs if each.shape == (65536, 16))
    assert features.spec[0]
    replicated = made("dp:2 fsdp:8 dp-nodes fsdp-nodes")
    assert chosen.estimate.step_time_us < 0.9 * replicated.estimate.step_time_us
    assert chosen.estimate.compute_us < 0.65 * replicated.estimate.compute_us


def test_the_plan_on_a_given_mesh_shards_nodes_too():
    chosen = plan(graph_step, *graph_shapes(**LARGE), target="v5e:4x4", mesh={"x": 2, "y": 8})
    (features,) = (each for each in chosen.inputs if each.shape == (65536, 16))
    assert features.spec[0]


@pytest.mark.parametrize(("nodes", "edges", "faster"), [(65536, 524288, "dp:16"), (64, 524288, "dp:16 dp-nodes")])
def test_sizes_decide_whether_nodes_are_sharded(nodes, edges, faster):
    """The gathers of a few nodes take longer than the work on them."""
    plans = [made(words, nodes=nodes, edges=edges, width=512) for words in ("dp:16", "dp:16 dp-nodes")]
    assert min(plans, key=lambda each: each.estimate.step_time_us).chosen == faster


def test_a_sum_at_nodes_is_priced_as_one_reduction():
    """A layer sums edges forward, again when it is rematerialized, and the gradients of both reads together."""
    replicated, sharded = made("dp:16 dp-nodes"), made("dp:2 fsdp:8 dp-nodes")
    whole, layers = 65536 * 512 * 4, 2
    weights = 4 * (layers * 3 * 512 + 4) * 512  # of the edges
    assert totals(replicated)["all-reduce", "dp"] == pytest.approx(
        2 * 15 / 16 * (3 * layers * whole + weights), rel=1e-3
    )
    of_nodes = totals(sharded)
    for kind in ("reduce-scatter", "all-gather"):  # besides the small ones of weights
        assert of_nodes[kind, "fsdp"] == pytest.approx(7 / 8 * 3 * layers * whole, rel=0.03)


def totals(chosen):
    """The bytes that each device sends, by the kind of collective and the mesh axes."""
    found: dict[tuple[str, str], float] = {}
    for kind, axes, size, _ in chosen.traffic:
        found[kind, axes] = found.get((kind, axes), 0.0) + size
    return found
