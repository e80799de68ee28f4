"""`step.shard_batch`: the global batch from each process's rows; and batches of an evaluation step."""

from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import auto_shard
from autoshard.errors import PlanError
from autoshard.sharding.runtime import batch_sharding
from tests.sharding.programs import assert_close, batch, mlp_loss, mlp_state, sgd_step
from tests.sharding.runtime.two_processes import run_in_two_processes

CODE = """
import jax, jax.numpy as jnp, numpy as np, sys
from autoshard import auto_shard
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
def step(w, data):
    def loss(w):
        return jnp.mean((jnp.tanh(data["x"] @ w["up"]) @ w["down"] - data["y"]) ** 2 * data["scale"])
    value, gradients = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, gradients), value
rng = np.random.default_rng(0)
x, y = rng.normal(size=(8, 16)).astype(np.float32), rng.normal(size=(8, 16)).astype(np.float32)
w = {"up": rng.normal(size=(16, 32)).astype(np.float32), "down": rng.normal(size=(32, 16)).astype(np.float32)}
whole = {"x": x, "y": y, "scale": np.float32(2)}
print("one device p:1", float(jax.jit(step)(w, whole)[1]))
own = slice(jax.process_index() * 4, jax.process_index() * 4 + 4)
for plan in ("dp:4", "tp:4", "dp:2 tp:2", "fsdp:4"):
    planned = auto_shard(step, plan=plan, example=(w, whole))
    data = planned.shard_batch({"x": x[own], "y": y[own], "scale": whole["scale"]})
    for shard in data["x"].addressable_shards:
        np.testing.assert_array_equal(shard.data, x[shard.index])
    print(plan, float(planned(planned.init(lambda: jax.tree.map(jnp.asarray, w)), data)[1]))
"""


@pytest.mark.whole
@pytest.mark.multiprocess
@pytest.mark.slow
def test_each_process_passes_its_rows():
    outputs = run_in_two_processes(CODE)
    for printed, _ in outputs:
        losses = [float(line.split()[-1]) for line in printed.splitlines() if "p:" in line and "[Gloo]" not in line]
        assert len(losses) == 5 and losses == pytest.approx([losses[0]] * 5, rel=1e-5)


def test_in_one_process_the_rows_are_all_rows():
    step = auto_shard(sgd_step, plan="dp:8", example=(mlp_state(), batch()))
    placed = step.shard_batch(batch())
    assert placed.sharding.spec == step.plan(mlp_state(), batch()).in_specs[1]
    np.testing.assert_array_equal(placed, batch())
    for local, message in (
        (
            batch(size=16),
            r"'x' has shape \(16, 64\) in process 0, but the plan is for \(32, 64\) over 1 process\. Pass",
        ),
        ({"x": batch()}, "none of the planned arguments: 'x' is one array, but this is a dict"),
    ):
        with pytest.raises(PlanError, match=message):
            step.shard_batch(local)
    with pytest.raises(PlanError, match="no further argument that is data"):
        step.shard_batch(batch(), batch())


@pytest.mark.parametrize("process", [0, 1])
def test_rows_of_another_process_are_gathered(monkeypatch, process):
    """Both processes are this one: every device needs rows of the process that it is not in."""
    rows, gathered = batch(), []

    def gather(own, tiled):
        gathered.append((own, tiled))
        return rows

    step = auto_shard(sgd_step, plan="tp:8", example=(mlp_state(), rows))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: process)
    monkeypatch.setattr(batch_sharding.multihost_utils, "process_allgather", gather)
    own = rows[16 * process : 16 * process + 16]
    placed = step.shard_batch(own.astype(np.float64))  # the plan is for float32
    assert placed.dtype == np.float32 and placed.shape == (32, 64)
    np.testing.assert_array_equal(placed, rows)
    [(passed, tiled)] = gathered
    np.testing.assert_array_equal(passed, own)
    assert tiled
    with pytest.raises(PlanError, match=rf"shape \(20, 64\) in process {process}, but .* over 2 processes\. Pass"):
        step.shard_batch(rows[:20])


class Device(NamedTuple):
    number: int
    process_index: int


@pytest.mark.parametrize(
    ("places", "holds"),
    [
        ([(0, 2), (2, 4), (4, 6), (6, 8)], True),
        ([(0, 4), (0, 4), (4, 8), (4, 8)], True),
        ([(0, 8)] * 4, False),  # replicated
        ([(0, 2), (4, 6), (2, 4), (6, 8)], False),  # one row block of each process is on the other
    ],
)
def test_rows_are_exchanged_unless_each_process_holds_its_own(places, holds):
    """Four devices in two processes, eight rows along the second dimension."""
    found = {Device(n, n // 2): (slice(None), slice(*place)) for n, place in enumerate(places)}
    sharding = SimpleNamespace(devices_indices_map=lambda shape: found)
    assert batch_sharding._holds_own_rows(cast(Any, sharding), (3, 8), dim=1, count=4) == holds


def weighted_loss(params, data):
    losses = jnp.mean((jnp.tanh(data["x"] @ params["w"] + params["b"]) @ params["v"] - data["x"]) ** 2, axis=-1)
    return jnp.sum(losses * data["weight"]), jnp.sum(data["weight"])


def test_an_evaluation_step_keeps_the_layout_of_the_state():
    step = auto_shard(sgd_step, plan="fsdp:8", example=(mlp_state(), batch()))
    params, evaluation = step.init(mlp_state), auto_shard(mlp_loss)
    assert_close(mlp_loss(mlp_state(), batch()), evaluation(params, batch()))
    specs = jax.tree.map(lambda x: x.sharding.spec, params)
    assert evaluation.plan(params, batch()).in_specs[0] == specs
    few = batch(size=8)  # another size has a plan of its own, with the state as it is
    assert_close(mlp_loss(mlp_state(), few), evaluation(params, few))
    assert evaluation.plan(params, few).in_specs[0] == specs


def test_a_padded_last_batch_needs_no_other_plan(monkeypatch):
    params, evaluation = auto_shard(sgd_step, plan="fsdp:8", example=(mlp_state(), batch())).init(mlp_state), None
    evaluation = auto_shard(weighted_loss)
    evaluation(params, {"x": batch(), "weight": np.ones(32, np.float32)})
    monkeypatch.setattr("autoshard.sharding.runtime.dispatch.plan_traced", None)  # nothing may be planned again
    few = batch(size=5)
    padded = {"x": np.pad(few, ((0, 27), (0, 0))), "weight": np.pad(np.ones(5, np.float32), (0, 27))}
    expected = weighted_loss(mlp_state(), {"x": few, "weight": np.ones(5, np.float32)})
    assert_close(expected, evaluation(params, padded))
