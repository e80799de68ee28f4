"""A program that no plan fits: the memory it needs, what takes it, and the smallest machine that would fit it."""

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard._units import bytes_text
from autoshard.cli import main
from autoshard.errors import AutoshardWarning, PlanError
from autoshard.sharding.machines.chips import CHIPS
from autoshard.sharding.machines.machine_sizes import larger_machines, machines_with_more_memory, sizes
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.planner import infeasible
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.sharding.planner.infeasible import DoesNotFitError
from tests.sharding.example_step import shapes, train_step

MACHINE = """
platform = "tpu"
flops = 1e12
memory_bytes = {memory}
memory_bandwidth = 1e11
dims = [
  {{name = "host", size = {hosts}, kind = "switch", bandwidth = 1e10, latency_us = 1}},
  {{name = "chip", size = 2, kind = "ring", bandwidth = 1e10, latency_us = 1}},
]
"""


@cache
def peaks(target: str, plan: Any = None) -> float:
    """The least memory of any plan on a target."""
    planned = autoshard.plan(train_step, *shapes(), target=target, plan=plan, donate_argnums=0)
    return min(peak for _, _, peak in planned.candidates)


def refused(**options: Any) -> str:
    with pytest.raises(DoesNotFitError) as caught:
        autoshard.plan(train_step, *shapes(), donate_argnums=0, **options)
    assert isinstance(caught.value, PlanError)
    return str(caught.value)


def machine(folder: Path, memory: float, hosts: int = 1) -> str:
    path = folder / f"small{hosts}.toml"
    path.write_text(MACHINE.format(memory=memory, hosts=hosts))
    return str(path)


def test_the_error_names_the_smallest_machine_that_fits():
    limit = peaks("v5e:2x4") * 1.02
    assert peaks("v5e:2x2") > limit
    text = refused(target="v5e:1x1", memory_limit_bytes=limit)
    assert re.search(r"The smallest v5e that it fits is v5e:2x4 \(\S.*: .* a device\)", text)
    named = re.search(r"v5e:2x4 \((.*): (.*) a device\)", text)
    assert named is not None
    plan = autoshard.plan(train_step, *shapes(), target="v5e:2x4", memory_limit_bytes=limit, donate_argnums=0)
    assert named[1] == plan.chosen and named[2] == bytes_text(plan.estimate.peak_memory_bytes)
    assert text == refused(target="v5e:1x1", memory_limit_bytes=limit)  # deterministic


def test_the_error_names_the_least_memory_and_what_takes_it():
    text = refused(target="v5e:2x2", memory_limit_bytes=1000)
    least = peaks("v5e:2x2")
    assert "no plan fits memory_limit_bytes=1_000 bytes a device on v5e:2x2. The smallest (" in text
    needed, excess = math.ceil(least), math.ceil(least - 1000)
    assert f"needs {needed:_} bytes ({bytes_text(least)}), {excess:_} bytes ({bytes_text(excess)}) too much: " in text
    kinds = re.search(r"too much: (.*?)\. ", text)
    assert kinds is not None
    parts = dict(part.split(" ", 1) for part in kinds[1].split(", "))
    assert {"parameters", "optimizer", "activations"} <= set(parts)
    sizes_there = [size.split() for size in parts.values()]
    total = sum(float(n) * {"B": 1, "KiB": 1024, "MiB": 1024**2}[unit] for n, unit in sizes_there)
    assert total == pytest.approx(least, rel=0.01)
    assert "No v5e machine is large enough, up to v5e:16x16. " in text


@pytest.mark.slow
def test_the_error_advises_to_recompute_if_activations_take_most():
    recompute = "Use a smaller batch, or recompute activations with jax.checkpoint. To plan"
    for batch, width, advised in ((4096, 32, True), (8, 1024, False)):
        with pytest.raises(PlanError) as caught:
            autoshard.plan(train_step, *shapes(batch=batch, width=width), target="v5e:2x2", memory_limit_bytes=1000)
        assert (recompute in str(caught.value)) == advised


def test_what_is_held_at_the_peak_is_sorted_and_sums_to_the_temporaries():
    def bytes_by_kind(batch: int, width: int) -> dict[str, float]:
        plan = autoshard.plan(
            train_step, *shapes(batch=batch, width=width), target="cpu:8", plan="dp:8", donate_argnums=0
        )
        planner, layout = bound_or_error(plan.bound).problem, bound_or_error(plan.bound).layout
        kinds = planner.memory.kinds_at_peak(layout, planner.cost(layout).live_buffers)
        assert sum(kinds.values()) == pytest.approx(plan.estimate.memory_bytes["temporary"])
        return kinds

    small, large, wide = bytes_by_kind(64, 32), bytes_by_kind(256, 32), bytes_by_kind(8, 1024)
    assert small["activation"] > small["gradient"]
    assert large["activation"] == pytest.approx(4 * small["activation"], rel=0.05)  # activations scale with the batch
    assert large["gradient"] == small["gradient"]
    assert wide["gradient"] > wide["activation"]


def test_machines_with_equal_device_count_and_more_memory(monkeypatch):
    plan = autoshard.plan(train_step, *shapes(), target="v5e:2x2", donate_argnums=0)
    need = min(peak for _, _, peak in plan.candidates)
    limits = {"v4:2x2x1": 0.6 * need, "v6e:2x2": 1.1 * need, "v5p:2x2x1": 5 * need}
    monkeypatch.setattr(infeasible, "_limit", lambda planner, target: limits.get(target.name, 1e-6 * need))
    text = infeasible._remedies_text([({}, bound_or_error(plan.bound))])
    assert re.search(r"; of other machines with 4 devices, it fits v6e:2x2 \(.* a device\)\. Use a smaller", text)


@pytest.mark.slow
def test_a_machine_from_a_file_is_enlarged(tmp_path):
    least = peaks(machine(tmp_path, 1e9, hosts=4))
    text = refused(target=machine(tmp_path, int(least * 1.01), hosts=1))
    assert re.search(r"small1\.toml that it fits is .*small1\.toml with host = 4 \(", text), text


def test_with_a_given_mesh_only_other_chips_are_named():
    text = refused(target="v5e:2x2", mesh={"data": 2, "model": 2}, memory_limit_bytes=1000)
    assert "smallest v5e" not in text and "large enough" not in text and "memory_limit_bytes=" in text


def test_fixed_shardings_apply_on_the_named_machines(monkeypatch):
    monkeypatch.setattr(infeasible, "larger_machines", lambda target: [find_target("v5e:2x4")])
    fixed = {path: P() for path in ("0/params/*", "0/moments/*")}
    limit = peaks("v5e:2x4") * 1.02  # enough without `fixed`: see the first test
    assert "v5e:2x4 (" not in refused(target="v5e:1x1", memory_limit_bytes=limit, fixed=fixed)


def test_the_named_limit_is_enough():
    text = refused(target="v5e:2x2", memory_limit_bytes=1000)
    limit = re.search(r"memory_limit_bytes=(\S+)$", text)
    assert limit is not None and re.fullmatch(r"[1-9]\d{0,2}(_\d{3})*", limit[1])
    assert "To plan as if each device had enough memory, give memory_limit_bytes=" in text
    plan = autoshard.plan(
        train_step, *shapes(), target="v5e:2x2", memory_limit_bytes=float(limit[1]), donate_argnums=0
    )  # fmt: skip
    assert plan.fits


def test_without_a_limit_a_requested_plan_that_does_not_fit_is_a_warning(tmp_path):
    target = machine(tmp_path, 1000.0, hosts=4)
    with pytest.warns(AutoshardWarning, match="the requested plan does not fit 1000 B .*(fsdp:8).* needs .* Use "):
        plan = autoshard.plan(train_step, *shapes(), target=target, plan="fsdp:8", donate_argnums=0)
    assert not plan.fits
    assert "the requested plan does not fit" in refused(target="cpu:8", plan="fsdp:8", memory_limit_bytes=1000)
    assert "no plan fits" in refused(target=target)


def test_the_error_names_the_variant_that_needs_the_least_memory():
    def fn(x, w, *, parts):
        rows = x.reshape(parts, -1, x.shape[-1])
        return jax.lax.map(lambda row: jnp.tanh(row @ w) @ w.T, rows).reshape(x.shape)

    x, w = jax.ShapeDtypeStruct((4096, 64), "float32"), jax.ShapeDtypeStruct((64, 4096), "float32")
    with pytest.raises(DoesNotFitError, match=r"The smallest \(.*, parts=16\) needs"):
        autoshard.plan(fn, x, w, target="v5e:1x1", memory_limit_bytes=1e5, variants={"parts": [1, 16, 4]})


def test_the_command_prints_one_line_and_fails(tmp_path, capsys):
    target = machine(tmp_path, 1000.0, hosts=4)
    options = ["--remat", "full", "--microbatches", "1"]
    assert main(["plan", "gpt-tiny", "--target", target, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("autoshard plan: error: auto_shard(train_step): no plan fits 1000 B a device on ")
    assert re.search(r"remat=full, microbatches=1\) needs .* too much: .*activations .*\. ", error)
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("key", CHIPS)
def test_larger_machines_exist_and_are_sorted_by_size(key):
    targets = [find_target(name) for name in sizes(key, CHIPS[key])]
    counts = [t.devices for t in targets]
    assert counts == sorted(set(counts)) and counts[-1] >= 256
    larger = larger_machines(targets[2])
    assert [t.name for t in larger] == [t.name for t in targets[3:]]
    assert all(
        t.devices == targets[2].devices and t.chip.memory_bytes > CHIPS[key].memory_bytes
        for t in machines_with_more_memory(targets[2])
    )


def test_larger_machines_of_several_slices_have_more_of_them():
    assert [t.name for t in larger_machines(find_target("v5p:4x4x4*2"))] == [f"v5p:4x4x4*{n}" for n in (4, 8, 16)]
    assert larger_machines(find_target("v5e:16x16")) == []
