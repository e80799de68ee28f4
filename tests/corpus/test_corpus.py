"""Train steps of twelve kinds of models: operators have rules, results match one device, batches are sharded.

A program's `make()` returns `(train_step, state, batch)`, where `state` is a tuple. `train_step(*state, batch)` returns
`(new state, loss)` if the state is one pytree. If the state is nnx objects, the step updates them in place and returns
the loss.
"""

import inspect
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import autoshard
from tests.corpus import (
    actor_critic,
    decoder,
    diffusion,
    encoder_decoder,
    graph_network,
    lstm,
    moe,
    resnet,
    state_space,
    unet,
    vae,
    vit,
)
from tests.foreign import harness

MODULES = (
    decoder, encoder_decoder, moe, resnet, unet, vit, lstm, state_space, graph_network, vae, diffusion, actor_critic,
)  # fmt: skip
PROGRAMS = {module.__name__.rpartition(".")[2]: module for module in MODULES}
QUICKEST = ("decoder", "moe", "resnet", "lstm", "actor_critic")  # the slow tests check the parity of the others
STEPS = 2  # `optax.MultiSteps` updates parameters in its second step

ALL_GATHER = re.compile(r"^.* = (.*) all-gather(?:-start)?\(.*$", re.MULTILINE)
OP_NAME = re.compile(r'op_name="(?:[^"]*/)?([^"/]*)"')


@dataclass(frozen=True)
class Planned:
    """A program's step under `auto_shard`, its initial arguments and its plan."""

    step: Any
    args: tuple[Any, ...]
    plan: autoshard.Plan


@cache
def planned(name: str, plan: str | None) -> Planned:
    """Plans a program, with the planner's choice if `plan` is None."""
    step, state, batch = PROGRAMS[name].make()
    step = autoshard.auto_shard(step, plan=plan)
    return Planned(step, (*state, batch), step.plan(*state, batch))


@cache
def single(name: str) -> tuple[harness.Arrays, harness.Arrays]:
    """Runs a program as its author would, on one device."""
    step, state, batch = PROGRAMS[name].make()
    return train(name, (nnx.jit if harness.is_nnx(PROGRAMS[name]) else jax.jit)(step), state, batch)


def train(name: str, step: Any, state: tuple[Any, ...], batch: Any) -> tuple[harness.Arrays, harness.Arrays]:
    """Trains a program.

    Returns:
        The optimizer's state, in which errors of gradients are not rescaled, and the other state with the losses.
    """
    losses = []
    for _ in range(STEPS):
        out = step(*state, batch)
        state, loss = (state, out) if harness.is_nnx(PROGRAMS[name]) else ((out[0],), out[1])
        losses.append(loss)
    arrays = harness.arrays(state) | harness.arrays({"losses": losses})
    optimizer = {path: x for path, x in arrays.items() if "opt_state" in path}
    assert optimizer
    return optimizer, {path: x for path, x in arrays.items() if path not in optimizer}


def gathered(text: str) -> list[tuple[str, str]]:
    """Returns the (result type, operator) of each all-gather in a compiled program."""
    lines = [(match[1], OP_NAME.search(match[0])) for match in ALL_GATHER.finditer(text)]
    return [(kind, name[1] if name else "") for kind, name in lines]


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:.*devices have work of their own")
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_operator_has_a_rule(name):
    """A fixture also turns each of our warnings into an error."""
    assert planned(name, None).plan.unknown == {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*devices have work of their own")
@pytest.mark.whole
@pytest.mark.parametrize(
    "plan", [None, pytest.param("dp:2 fsdp:2 tp:2", marks=pytest.mark.slow)], ids=lambda plan: plan or "chosen"
)
@pytest.mark.parametrize(
    "name", [name if name in QUICKEST else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS]
)
def test_parity_with_one_device(name, plan):
    program = planned(name, plan)
    if plan is not None:
        assert dict(program.plan.mesh.shape) == {"dp": 2, "fsdp": 2, "tp": 2}
        assert all(program.plan.axis_rules.values())  # each mesh axis shards something
    *state, batch = program.args
    sharded = train(name, program.step, tuple(state), batch)
    for reference, other in zip(single(name), sharded, strict=True):
        assert harness.differences(reference, other, harness.TOLERANCE) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_data_parallel_steps_keep_their_batch_sharded(name):
    """Gradients are reduced, and no activation is gathered. Sharded nodes of a graph would be gathered by its edges."""
    program = planned(name, "dp:8 dp-nodes dp-graphs" if name == "graph_network" else "dp:8")
    data = [leaf for leaf in program.plan.inputs if leaf.role == "data"]
    assert data
    for leaf in data:
        rows = {"batch", "edges"} & {*leaf.axes}
        assert ("dp" in leaf.spec or ("dp",) in leaf.spec) == bool(rows), leaf.path
    text = program.plan.jit().lower(*program.args).compile().as_text() or ""
    assert "all-reduce" in text
    assert gathered(text) == []


def test_gathers_of_a_compiled_program_are_found(mesh_of):
    """Checks the pattern on a program with one all-gather."""
    mesh = mesh_of(dp=8)
    sharded, replicated = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("dp",), ()))
    double = jax.jit(lambda x: 2 * x, in_shardings=sharded, out_shardings=replicated)
    text = double.lower(jax.ShapeDtypeStruct((16, 8), "float32")).compile().as_text() or ""
    assert [kind.partition("{")[0] for kind, _ in gathered(text)] == ["f32[16,8]"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_do_not_mention_sharding(name):
    source = inspect.getsource(PROGRAMS[name]).lower()
    assert not [word for word in ("autoshard", "sharding", "partitionspec", "mesh") if word in source]
