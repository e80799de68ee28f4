"""The audit's parser of compiled programs compared with the one in `benchmarks/`, which is independent of it."""

import sys
from pathlib import Path

import pytest

from autoshard.sharding.audit import compile_job, export_plan
from autoshard.sharding.audit.verification import compile_target
from autoshard.sharding.hlo import parser
from autoshard.sharding.hlo.kernel_costs import Kernels
from autoshard.sharding.hlo.link_times import ProgramLinks
from autoshard.sharding.hlo.schedule import Schedule
from autoshard.sharding.planner.bound_plan import bound_or_error
from tests.sharding.audit.test_audit import planned
from tests.sharding.audit.test_compilers import layers_planned

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def referee():
    """The module `estimate` of the benchmarks. The modules there import one another by bare names."""
    before = list(sys.path)
    sys.path.append(str(BENCHMARKS))
    try:
        return pytest.importorskip("estimate", reason="the benchmarks are not installed")
    finally:
        sys.path[:] = before


def both_estimates(plan, referee, referee_target=None):
    """The results of both parsers for a plan's compiled program."""
    target = compile_target(plan.target)
    compiled = compile_job(export_plan(bound_or_error(plan.bound).executable))
    text = compiled.text
    program = parser.parse_program(text)
    schedule = Schedule(program, Kernels(program, target.chip), ProgramLinks(target.topology, plan.device_order))
    coordinates = compiled.coordinates if target.platform != "cpu" else None
    return schedule, schedule.run(), referee.estimate(text, referee_target or plan.target, coordinates)


def check(schedule, runs, estimated):
    assert not schedule.unknown_loops and not estimated.unknown_loops
    assert sum(r.trips * r.collective.wire_bytes for r in runs) == pytest.approx(estimated.wire_bytes)
    payloads = sorted((r.collective.kind, r.trips, r.collective.payload_bytes) for r in runs)
    sending = [t for t in estimated.traffic if t.collective.wire_bytes]
    assert payloads == sorted((t.collective.kind, t.trips, t.collective.payload_bytes) for t in sending)


@pytest.mark.parametrize("strategy", ["tp:4", pytest.param("fsdp:4", marks=pytest.mark.slow)])
@pytest.mark.tpu_compile
def test_tpu_program(referee, strategy):
    schedule, runs, estimated = both_estimates(layers_planned(strategy, "v5e:2x2"), referee)
    check(schedule, runs, estimated)
    assert schedule.totals.compute_us == pytest.approx(estimated.compute["cycles"] * 1e6)
    assert sum(r.exposed_us for r in runs) == pytest.approx(estimated.exposed["cycles"] * 1e6, rel=0.5)


@pytest.mark.cuda_compile
def test_gpu_program(referee):
    schedule, runs, estimated = both_estimates(layers_planned("tp:8", "h100:8"), referee, "h100:1x8")
    check(schedule, runs, estimated)
    assert schedule.totals.compute_us == pytest.approx(estimated.compute["roofline"] * 1e6, rel=0.05)


@pytest.mark.parametrize("strategy", ["dp:8", "fsdp:8"])
def test_cpu_program(referee, strategy):
    check(*both_estimates(planned(strategy), referee, "h100:1x8"))
