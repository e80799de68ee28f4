"""`plan.diff(other)`: a line for each difference."""

import re

import numpy as np
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard._units import ratio_text
from autoshard.sharding.plan.tensors import Leaf
from tests.sharding.example_step import shapes, train_step
from tests.sharding.report.plans import planned, unbound


def test_diff_of_the_same_plan():
    assert planned().diff(unbound()) == "the same plan"
    assert planned().diff(planned()) == "the same plan"


def test_diff_lists_changes_with_ratios():
    a, b = planned("dp:8"), planned("fsdp:2 tp:4 seq")
    text = a.diff(b)
    assert text.startswith("dp:8 -> fsdp:2 tp:4 seq\n")
    flat = re.sub(r" +", " ", text)
    assert "mesh dp 8 = 8 devices -> fsdp 2 x tp 4 = 8 devices" in flat
    assert "rule of dp batch -> -" in flat and "rule of fsdp - -> batch" in flat
    assert "storage of parameter - -> fsdp" in flat
    assert "input batch/{x,y} x2: P('dp') -> P('fsdp', 'tp')" in flat
    assert "input attention/wk +3 x8: P() -> P('fsdp', 'tp')" in flat  # wq, wk, wv, mlp/up and their moments
    ratio = ratio_text(b.estimate.peak_memory_bytes, a.estimate.peak_memory_bytes)
    assert re.search(rf"peak memory .* -> .* {re.escape(ratio)}$", flat, re.M)
    assert "result" not in flat  # returned state is sharded like its input; the loss is replicated in both


def test_one_difference_is_one_line():
    plan = planned()
    changed = [x if x.path != "1/x" else Leaf(x.path, x.shape, x.dtype, P("tp"), x.axes, x.role) for x in plan.inputs]
    lines = plan.diff(plan.where(inputs=tuple(changed))).splitlines()[1:]
    assert lines == ["  input batch/x: P('fsdp', 'tp') -> P('tp')"]
    lines = plan.diff(plan.where(target="v5e:2x4")).splitlines()[1:]
    assert [line.split() for line in lines] == [["target", "cpu:8", "->", "v5e:2x4"]]


def test_diff_of_different_programs():
    wide = autoshard.plan(train_step, *shapes(width=64), plan="fsdp:2 tp:4 seq", target="cpu:8")
    assert "input mlp/up x2: float32[32, 128] -> float32[64, 128]" in planned().diff(wide)
    other = autoshard.plan(
        lambda a, b: a @ b, np.ones((8, 8), "f4"), np.ones((8, 8), "f4"), target="cpu:8", plan="dp:8"
    )
    text = planned().diff(other)
    assert "inputs only in the first: state/count" in text and "inputs only in the second: a, b" in text
