"""Processes that made different plans all raise before the first step."""

import itertools

import jax
import pytest

from autoshard import _compat, plan
from autoshard.errors import PlanError
from autoshard.sharding.runtime import process_agreement
from autoshard.sharding.runtime.process_agreement import check_same_plan, digest
from tests.sharding.runtime.two_processes import run_in_two_processes

CODE = """
import jax, jax.numpy as jnp, sys
from autoshard import auto_shard
from autoshard.sharding.runtime.process_agreement import check_same_plan
from autoshard.errors import PlanError
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
mine = jax.process_index()
def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
w, x = jnp.ones((16, 8)), jnp.ones((32, 16))
out = auto_shard(step, plan="fsdp:4")(w, x)
print("agreed", float(out.addressable_shards[0].data[0, 0]) < 1)
try:
    auto_shard(step, plan="fsdp:4" if mine else "dp:4")(w, x)
except PlanError as error:
    print(error)
if mine == 0:
    try:
        check_same_plan(auto_shard(step, plan="dp:4").plan(w, x), timeout_s=1)
    except PlanError as error:
        print(error)
"""


@pytest.mark.whole
@pytest.mark.multiprocess
def test_processes_with_different_plans_raise():
    outputs = run_in_two_processes(CODE)
    for printed, errors in outputs:
        # Two threads of Gloo may write into one line, or end one line twice.
        lines = [line for line in printed.splitlines() if line and "[Gloo]" not in line and "peer ranks" not in line]
        assert lines and lines[0] == "agreed True", errors
        assert "made different plans" in lines[1]
        assert "step 'dp:4' in process 0" in lines[1] and "step 'fsdp:4' in process 1" in lines[1]
    assert "process 1 has not planned after 1 s" in outputs[0][0]


@pytest.fixture
def exchanged(monkeypatch):
    """The texts of two processes, in place of the coordination service: `exchanged(1)` is those of process 1."""
    texts = {}

    def be_process(number):
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(jax, "process_index", lambda: number)
        monkeypatch.setattr(process_agreement, "_check_numbers", itertools.count())
        monkeypatch.setattr(_compat, "publish_text", texts.__setitem__)
        monkeypatch.setattr(_compat, "wait_for_text", lambda key, timeout_s: texts.get(key))
        return texts

    return be_process


@pytest.fixture(scope="module")
def plans():
    """Two plans of one function."""

    def step(w, x):
        return x @ w

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((32, 16), (64, 32))]
    return [plan(step, *shapes, target="cpu:8", plan=request) for request in ("dp:8", "tp:8")]


def test_all_processes_hear_whether_their_plans_are_the_same(plans, exchanged):
    texts = exchanged(1)
    with pytest.raises(PlanError, match="process 0 has not compared the plans of all processes: it failed earlier"):
        check_same_plan(plans[0], timeout_s=1)
    assert list(texts) == ["autoshard/plan/0/1"]
    texts = exchanged(0)
    check_same_plan(plans[0])
    assert texts["autoshard/plan/0/verdict"] == "same"
    exchanged(1)
    check_same_plan(plans[0])
    with pytest.raises(PlanError, match="process 0 has not compared"):
        check_same_plan(plans[0])  # the second check has a key of its own


def test_the_processes_of_each_plan_are_named(plans, exchanged):
    exchanged(1)["autoshard/plan/0/verdict"] = "same"
    check_same_plan(plans[1])
    texts = exchanged(0)
    assert digest(plans[0]) != digest(plans[1])
    with pytest.raises(PlanError, match="different plans: .*'dp:8' in process 0; .*'tp:8' in process 1. Each must run"):
        check_same_plan(plans[0])
    verdict = texts["autoshard/plan/0/verdict"]
    exchanged(1)
    with pytest.raises(PlanError) as raised:
        check_same_plan(plans[1])
    assert str(raised.value) == verdict


def test_a_process_that_did_not_plan_is_named(plans, exchanged):
    exchanged(0)
    with pytest.raises(PlanError, match="process 1 has not planned after 3 s: it failed earlier, or runs other code"):
        check_same_plan(plans[0], timeout_s=3)
