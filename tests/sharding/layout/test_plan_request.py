"""What strategies mean: how state is stored, and how the mesh is split."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autoshard import plan
from autoshard.errors import AutoshardWarning
from autoshard.sharding.axes.analysis import analyse
from autoshard.sharding.layout.plan_request import classes_for, may_be_mesh_axis, parse_request
from autoshard.sharding.program.tracing import trace
from tests.sharding.graph_step import graph_shapes, graph_step
from tests.sharding.programs import OPTIMIZER, adamw_step, batch, mlp_state


def mesh_sizes(plan):
    return dict(zip(plan.mesh.axis_names, plan.mesh.axis_sizes, strict=True))


@pytest.mark.parametrize(
    ("words", "parameter", "moment", "data"),
    [
        ("dp:8", P(), P(), P("dp")),
        ("zero1:8", P(), P(None, "zero1"), P("zero1")),
        ("fsdp:8", P(None, "fsdp"), P(None, "fsdp"), P("fsdp")),
        ("fsdp:4 dp:2", P(None, "fsdp"), P(None, "fsdp"), P(("dp", "fsdp"))),
        ("dp:2 zero1:4", P(), P(None, "zero1"), P(("dp", "zero1"))),
        ("dp:8 state", P(None, "dp"), P(None, "dp"), P("dp")),
        ("tp:4 fsdp:2", P("fsdp", "tp"), P("fsdp", "tp"), P("fsdp")),
    ],
)
def test_how_strategies_store_state_and_shard_data(words, parameter, moment, data):
    state = mlp_state(), OPTIMIZER.init(mlp_state())
    planned = plan(adamw_step, state, batch(), plan=words)
    specs = {leaf.path: leaf.spec for leaf in planned.inputs}
    assert specs["0/0/w"] == parameter and specs["0/1/0/mu/w"] == specs["0/1/0/nu/w"] == moment
    assert specs["1"] == data
    # The kind of parallelism that communicates most is innermost.
    kinds = ["dp", "zero1", "fsdp", "tp"]
    assert list(mesh_sizes(planned)) == sorted(mesh_sizes(planned), key=kinds.index)


def test_a_mesh_axis_is_split_if_only_a_part_of_it_divides():
    def fn(x, a, b, c, d):
        return jnp.tanh(x @ a) @ b + jnp.tanh(x @ c) @ d

    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((32, 64), (64, 4), (4, 64), (64, 256), (256, 64))]
    planned = plan(fn, *shapes, plan="tp:8")
    specs = {leaf.path: leaf.spec for leaf in planned.inputs}
    assert mesh_sizes(planned) == {"tp": 4, "tp_1": 2}
    assert specs["1"] == P(None, "tp") and specs["3"] == P(None, ("tp", "tp_1"))
    on_given_mesh = plan(fn, *shapes, plan="tp=tp:8", mesh={"tp": 8})
    assert mesh_sizes(on_given_mesh) == {"tp": 8}  # a given mesh is never split


@pytest.mark.parametrize(
    ("axis", "mesh", "words", "may"),
    [
        ("tp", None, None, True),
        ("tp_1", None, "fsdp:8", True),  # another plan may be requested, and its mesh axis split
        ("model", None, "model=tp:8", True),
        ("model", None, "fsdp:8", False),
        ("tp_x", None, None, False),
        ("model", {"model": 8}, None, True),
        ("tp", {"model": 8}, None, False),
    ],
)
def test_which_mesh_axes_a_plan_may_have(axis, mesh, words, may):
    assert may_be_mesh_axis(axis, mesh, words) is may


@pytest.mark.parametrize(
    ("words", "canonical"),
    [
        ("FSDP:4 Tp:2 SEQ", "fsdp:4 tp:2 seq"),
        ("TP:8 TP-ffn Tp_1+Batch", "tp:8 tp-ffn tp_1+Batch"),
        ("TP=DP:8 TP-ffn", "TP=dp:8 TP-ffn"),  # names of mesh axes and logical axes keep their case
    ],
)
def test_words_may_be_in_upper_case(words, canonical):
    assert str(parse_request(words)) == canonical


def test_ep_also_shards_rows_and_the_experts_of_the_router():
    roles = analyse(trace(graph_step, graph_shapes(), {})).roles
    batch, (nodes,) = roles.batch, roles.other_rows
    assert classes_for("ep", roles, frozenset()) == ()  # no experts
    mixed = dataclasses.replace(roles, experts=(1000,), routers=(1001,))
    assert classes_for("ep", mixed, frozenset()) == (1000, 1001, batch, nodes)
    assert classes_for("dp", mixed, frozenset()) == (batch, nodes)


def test_a_mesh_axis_is_not_split_for_other_rows_than_the_batch():
    with pytest.warns(AutoshardWarning, match="repeat the work on the rows of nodes: nodes 12 .* Pad nodes to 16"):
        made = plan(graph_step, *graph_shapes(nodes=12, edges=256, width=32), target="cpu:8", plan="dp:8")
    assert mesh_sizes(made) == {"dp": 8}  # the nodes alone would split it into 4 and 2
