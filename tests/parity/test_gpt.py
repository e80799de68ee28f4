"""Under every plan, a GPT's gradients, parameters and losses equal those on one device."""

import itertools

import numpy as np
import pytest

from tests.parity.gpt import Case, run
from tests.sharding.programs import assert_close

PLANS = [None, "dp:8", "fsdp:8", "tp:8", "dp:2 fsdp:2 tp:2", "tp:8 seq", "dp:2 tp:4 seq"]

VARIANTS = {
    "unrolled": Case((("scan_layers", False),)),
    "grouped-queries": Case((("kv_heads", 2),)),
    "microbatches": Case(microbatches=2),
    "remat-full": Case((("remat", "full"),)),
    "remat-dots": Case((("remat", "dots"),)),
    "remat-alternating": Case((("remat", "none,dots"), ("layers", 4))),
    "host": Case((("remat", "host:residual+qkv keep:out_proj"),)),
    "host-everything": Case((("remat", "host:residual+qkv+context+out_proj+mlp_in"), ("attention", "blockwise"))),
    "host-unrolled": Case((("remat", "host:residual+context,full"), ("scan_layers", False))),
    "host-alternating": Case((("remat", "host:residual,none"), ("layers", 4)), microbatches=2),
    "dropout": Case((("dropout", 0.1),)),
    "dropout-remat": Case((("dropout", 0.1), ("remat", "full"))),
    "blockwise": Case((("attention", "blockwise"),)),
    "gpt2": Case((("norm", "layernorm"), ("positions", "learned"), ("mlp", "gelu"), ("bias", True))),
    "untied": Case((("tie_head", False),)),
    "loss-in-chunks": Case((("loss_chunks", 4),)),
    "untied-loss-in-chunks": Case((("tie_head", False), ("loss_chunks", 3)), microbatches=2),  # padded
}
SOME = ["fsdp:8", "dp:2 tp:4 seq"]
QUICK = ("host",)  # `test_every_variant_with_every_plan` runs the others


def compare(case: Case, plan: str | None) -> None:
    single, sharded = run(case, None, False), run(case, plan)
    for expected, actual in zip(single.gradients, sharded.gradients, strict=True):
        assert_close(expected, actual)
    assert_close(single.params, sharded.params)
    np.testing.assert_allclose(sharded.losses, single.losses, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_plans(plan):
    compare(Case(), plan)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), list(zip(QUICK, itertools.cycle(SOME), strict=False)))
def test_variants(name, plan):
    compare(VARIANTS[name], plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [p for p in PLANS])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_with_every_plan(name, plan):
    compare(VARIANTS[name], plan)


@pytest.mark.slow
def test_two_key_value_heads_over_four_devices():
    plan = run(VARIANTS["grouped-queries"], "dp:2 tp:4 seq").plan
    by_name = {leaf.path.rpartition("/")[2]: leaf for leaf in plan.inputs if leaf.role == "parameter"}
    tensor = [axis for axis in plan.mesh.axis_names if axis.startswith("tp")]
    assert [plan.mesh.shape[a] for a in tensor] == [2, 2]  # two devices share a key-value head, each with its queries
    assert tuple(by_name["wq"].spec)[2] == tuple(tensor) and tuple(by_name["wk"].spec)[2] == tensor[0]


@pytest.mark.slow
def test_key_value_heads_that_take_all_devices_split_no_axis():
    """With four key-value heads, `tp:4` gives each device one of them and its query heads. Only `tp:8` is split."""
    case = Case((("kv_heads", 4), ("scan_layers", True)))
    four, eight = run(case, "dp:2 tp:4").plan, run(case, "tp:8").plan
    assert dict(four.mesh.shape) == {"dp": 2, "tp": 4} and not four.notes
    assert dict(eight.mesh.shape) == {"tp": 4, "tp_1": 2}
