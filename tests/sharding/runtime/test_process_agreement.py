"""Processes that made different plans all raise before the first step."""

import pytest

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
        lines = [line for line in printed.splitlines() if "[Gloo]" not in line]
        assert lines and lines[0] == "agreed True", errors
        assert "made different plans" in lines[1]
        assert "step 'dp:4' in process 0" in lines[1] and "step 'fsdp:4' in process 1" in lines[1]
    assert "process 1 has not planned after 1 s" in outputs[0][0]
