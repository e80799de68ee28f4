"""Hand-written plans compute what one device computes, and shard arrays as their style says."""

import math
from typing import Any

import jax
import pytest
from bench_plans import grid, planned
from expert_plans import CASES, Case, Style, styles, today
from expert_ranking import most_promising
from expert_step import expert_step
from real_steps import batch_of, by_hand, create
from rooflines import bound, parameters, products

from autoshard.models.workloads import Workload, workload
from autoshard.sharding.machines.device_mesh import traced_machine
from autoshard.train.program.build import workload_step

STYLES = {
    "gpt-tiny": [Style((2, 2, 1, 2), 2, sequence=True), Style((1, 1, 1, 8), sequence=True)],
    "llama-tiny": [Style((1, 4, 1, 2), 3), Style((8, 1, 1, 1))],
    "moe-tiny": [Style((1, 2, 4, 1), 3), Style((2, 1, 2, 2))],
    "mixtral-tiny": [Style((1, 4, 1, 2), 3)],
    "wide-resnet-tiny": [Style((1, 4, 1, 2), 3), Style((4, 2, 1, 1), 1)],
    "vit-tiny": [Style((1, 8, 1, 1), 1)],
}
TODAY = Style((1, 8, 1, 1), today=True)


def losses(work: Workload, runs: list[tuple[Style, int]]) -> tuple[float, float, list[tuple[float, float]]]:
    """Return the loss and the gradient's norm on one device, and under each style."""
    state = create(work)(jax.random.key(0))
    _, single_device = jax.jit(workload_step(work)[0])(state, batch_of(work))
    sharded = [by_hand(work, style, microbatches).metrics() for style, microbatches in runs]
    return *_shown(single_device), [_shown(metrics) for metrics in sharded]


def _shown(metrics: dict[str, Any]) -> tuple[float, float]:
    return float(metrics["loss"]), float(metrics["grad_norm"])


@pytest.mark.slow
@pytest.mark.parametrize("name", STYLES)
def test_an_experts_step_computes_what_one_device_does(name):
    work = workload(name)
    runs = [(style, 1) for style in STYLES[name]]
    if name == "gpt-tiny":
        runs = [(STYLES[name][0], 2), *runs[1:], (TODAY, 1)]
    loss, norm, sharded = losses(work, runs)
    assert math.isfinite(loss) and norm > 0
    for other, (style, count) in zip(sharded, runs, strict=True):
        assert other == pytest.approx((loss, norm), rel=2e-5), (style.name, count)


@pytest.mark.slow
def test_an_experts_step_with_the_attention_kernel_computes_what_one_device_does():
    work = workload("llama-tiny").with_(attention="splash", context=128, layers=1, remat="host:residual keep:context")
    styles_tried = [Style((1, 4, 1, 2), 3), Style((2, 2, 1, 2), 2, sequence=True)]
    loss, norm, sharded = losses(work, [(style, 1) for style in styles_tried])
    for other, style in zip(sharded, styles_tried, strict=True):
        assert other == pytest.approx((loss, norm), rel=2e-5), style.name


def specs_of(work: Workload, style: Style) -> dict[str, Any]:
    """Return the spec of each leaf of the state, by its path."""
    _, state, _ = workload_step(work)
    expert = expert_step(work, style)
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    return {name: tuple(sharding.spec) for name, sharding in zip(names, expert.in_shardings, strict=False)}


@pytest.mark.slow
def test_parameters_are_sharded_as_the_style_says():
    work = workload("llama-tiny")
    up, down, wq = (f"params/blocks/{n}" for n in ("mlp/w_up", "mlp/w_down", "attention/wq"))
    full = specs_of(work, Style((1, 4, 1, 2), 3))
    assert full[up] == (None, "fsdp", "tensor") and full[down] == (None, "tensor", "fsdp")
    assert full[wq] == (None, "fsdp", "tensor", None) and full["params/embed"] == ("tensor", "fsdp")
    moments = [spec for name, spec in full.items() if name.startswith("opt_state") and name.endswith("mlp/w_up")]
    assert moments == [full[up]] * 2
    one = specs_of(work, Style((1, 4, 1, 2), 1))
    assert one[up] == (None, None, "tensor")
    assert [s for n, s in one.items() if n.startswith("opt_state") and n.endswith("mlp/w_up")] == [full[up]] * 2
    experts = specs_of(workload("moe-tiny"), Style((1, 2, 4, 1), 3))
    assert experts["params/blocks/moe/experts/w_up"] == (None, "expert", "fsdp", None)
    spread = specs_of(workload("moe-tiny"), Style((1, 2, 4, 1), 3, spread=True))
    assert spread["params/blocks/moe/experts/w_up"] == experts["params/blocks/moe/experts/w_up"]
    assert spread["params/embed"] == (None, ("fsdp", "expert")) != experts["params/embed"]
    common_practice = specs_of(work, TODAY)
    assert common_practice[up] == (None, None, "fsdp") and common_practice[down] == (None, "fsdp", None)


@pytest.mark.parametrize(("target", "devices"), [("v5p:4x4x4", 64), ("h100:4x8", 32), ("v5e:4x4*2", 32)])
def test_devices_of_a_machine(target, devices):
    assert Case("llama-tiny", workload("llama-tiny"), target).devices == devices


def test_the_grid_is_complete():
    case = CASES["gpt-1.3b"]
    names = {style.name for style in styles(case)}
    expected = {
        "data:16",
        "zero1:16",
        "zero3:16",
        "data:4 zero2:4",
        "zero3:4 tensor:4",
        "zero3:4 tensor:4 seq",
        "tensor:16",
    }
    assert expected <= names and len(names) == len(styles(case))
    assert {s.words for s in styles(case)} >= {"dp:16", "zero1:16", "fsdp:16", "dp:4 zero1:4", "fsdp:4 tp:4 seq"}
    assert {s.sizes[2] for s in styles(CASES["moe-10b"])} == {1, 2, 4, 8, 16}
    spread = {s.name: s.words for s in styles(CASES["moe-10b"]) if s.spread}
    assert spread["zero3:2 expert:8 zero3+expert"] == "fsdp:2 ep:8 ep+optimizer ep+parameter"
    assert "expert:16 zero2+expert" in spread
    assert {s.sizes[2] for s in styles(CASES["mixtral-8x7b"])} == {1}
    assert all(math.prod(s.sizes) == c.devices and not c.work.batch_size % s.ways(s.batch)
               for c in CASES.values() for s in styles(c))  # fmt: skip
    assert today(case).name == "today" and {parts for _, parts in CASES["moe-10b"].variants} == {1}


@pytest.mark.slow
def test_bounds_agree_with_hand_counts():
    work = workload("gpt-tiny").with_(remat="none")
    tokens, width, ffn, layers, vocab, seq = 16 * 32, 64, 128, 2, 128, 32
    forward = 2 * tokens * (layers * (4 * width * width + 2 * width * ffn + 2 * seq * width) + width * vocab)
    assert products(work) == 3 * forward
    total, experts = parameters(workload("moe-tiny"))
    assert experts == 8 * 3 * 64 * 64 and total > experts
    case = Case("tiny", workload("gpt-tiny"), "v5e:2x4")
    plain, recomputed = (bound(case, Style((8, 1, 1, 1)), remat, 1) for remat in ("none", "full"))
    assert recomputed.compute > plain.compute and recomputed.memory < plain.memory
    whole, parts = (bound(case, style, "full", 1) for style in (Style((8, 1, 1, 1)), Style((1, 8, 1, 1))))
    count = parameters(workload("gpt-tiny"))[0]
    assert whole.memory - parts.memory == pytest.approx(12 * count * 7 / 8)
    assert parts.wire == pytest.approx(3 * 2 * count * 7 / 8 / (0.9 * 50e9 * 4))
    assert bound(case, Style((1, 8, 1, 1)), "full", 2).wire == pytest.approx(parts.wire * 5 / 3)
    moe = Case("tiny", workload("moe-tiny"), "v5e:2x4")
    apart, overlapped = (bound(moe, Style((1, 2, 4, 1), spread=spread), "full", 1) for spread in (False, True))
    assert apart.memory - overlapped.memory == pytest.approx(12 * (total - experts) * (1 / 2 - 1 / 8))


def test_bounds_count_kernels_and_values_on_the_host():
    work = workload("gpt-tiny").with_(context=4096, remat="none")
    kernels = traced_machine(None, "v5e:2x4")
    tokens, width, layers = 16 * 4096, 64, 2
    scores = 2 * 2 * tokens * 4096 * width * layers * 3  # of the plain implementation; causal kernels visit fewer pairs
    assert products(work) - scores < products(work, kernels) < products(work)
    case, style = Case("tiny", workload("gpt-tiny"), "v5e:2x4"), Style((1, 8, 1, 1))
    host, full = (bound(case, style, remat, 1).memory for remat in ("host:residual", "full"))
    assert full - host == pytest.approx(2 * 2 * 2 * 32 * 64)  # 2 layers, 16 bits, 2 rows of 32 positions


@pytest.mark.slow
def test_few_programs_of_an_expert_are_those_with_the_fastest_estimates():
    case = Case("tiny", workload("gpt-tiny").with_(batch_size=64), "v5e:2x4")
    programs, pruned = grid(case, [("keep:context", 1)])
    assert not pruned and any(one.remat == "keep:context" for one in programs)
    one, two = most_promising(case, programs, 2)
    assert one in programs and two in programs and one is not two
    times = [planned(case, each.remat, each.microbatches, each.words).estimate.step_time_us for each in (one, two)]
    slow = next(each for each in programs if each.words == "tp:8" and each.remat == "full")
    assert times[0] <= times[1] < planned(case, "full", slow.microbatches, "tp:8").estimate.step_time_us
