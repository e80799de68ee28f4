"""Programs that are compiled for eight CPU devices in a separate process, compared with their plans."""

import dataclasses
import gzip
import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autoshard import plan
from autoshard.sharding.audit import Audit, Compiled, verification
from autoshard.sharding.audit.export import topology_name
from autoshard.sharding.audit.replicated_arrays import ReplicatedArray
from autoshard.sharding.audit.traffic_diff import CompiledCollective, Missing, Unplanned
from autoshard.sharding.hlo.parser import parse_program
from autoshard.sharding.hlo.rematerializations import Rematerialization
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.planner.bound_plan import bound_or_error
from tests.sharding import programs
from tests.sharding.programs import OPTIMIZER, adamw_step, batch, mlp_state

ROWS = 256


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def planned(strategy, target="cpu:8"):
    """The plan of a train step of an MLP with AdamW, with donated state."""
    params = mlp_state()
    state = shapes((params, OPTIMIZER.init(params)))
    return plan(adamw_step, state, shapes(batch(size=ROWS)), target=target, plan=strategy, donate_argnums=0)


def with_input_spec(plan, path, spec):
    """The plan with another sharding of one input. The compiled traffic then differs from the planned traffic."""
    assert any(leaf.path == path for leaf in plan.inputs)
    inputs = (dataclasses.replace(leaf, spec=spec) if leaf.path == path else leaf for leaf in plan.inputs)
    return plan.where(inputs=tuple(inputs))


@pytest.mark.few(1)
@pytest.mark.parametrize("strategy", ["dp:8", "tp:8"])
def test_compiled_traffic_equals_the_planned(strategy):
    plan = planned(strategy)
    audit = plan.verify()
    assert audit.ok and audit.message == ""
    assert audit.wire_bytes == pytest.approx(plan.estimate.comm_bytes, rel=0.1)
    assert (audit.unplanned, audit.missing, audit.replicated, audit.remarks) == ((), (), (), ())
    assert {(f.kind, f.axes) for f in audit.collectives} == {("all-reduce", tuple(plan.mesh.axis_names))}
    assert all(f.line.startswith(f"{programs.__file__}:") for f in audit.collectives)


def test_sharded_state_is_reduced_by_all_reduces_on_a_cpu():
    """XLA:CPU has no reduce-scatters. All other traffic is as planned."""
    plan = planned("fsdp:8")
    audit = plan.verify()
    assert {u.cause for u in audit.unplanned} == {"an all-reduce instead of a reduce-scatter"}
    assert {u.kind for u in audit.unplanned} == {"all-reduce"}
    assert audit.wire_bytes is not None
    assert audit.wire_bytes - audit.unplanned_bytes == pytest.approx(plan.estimate.comm_bytes, rel=0.1)
    assert {f.kind for f in audit.collectives} == {"all-gather", "all-reduce"}
    assert not audit.replicated


def test_times_and_memory_add_up():
    plan = planned("dp:8")
    audit = plan.verify()
    assert audit.compute_us is not None and audit.exposed_us is not None
    assert audit.step_time_us == pytest.approx(audit.compute_us + audit.exposed_us)
    assert audit.compute_us == audit.compute_us_roofline
    assert (audit.cycles, audit.compute_us_cycles) == (None, None)
    assert audit.comm_us == pytest.approx(sum(f.wire_us for f in audit.collectives))
    assert audit.exposed_us == pytest.approx(audit.comm_us)  # XLA:CPU hides none
    kinds = audit.memory
    together = kinds["argument"] + kinds["output"] - kinds["alias"] + kinds["temp"]  # not all are alive at once
    assert kinds["argument"] < (audit.peak_bytes or 0) == (kinds["peak"] or together) <= together
    assert kinds["alias"] > 0.9 * kinds["output"]  # the state is donated
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(mlp_state()))
    assert kinds["argument"] == pytest.approx(3 * whole + ROWS * 64 * 4 / 8, rel=0.01)
    assert audit.predicted_peak_bytes == plan.estimate.peak_memory_bytes


def test_collectives_in_loops_count_per_trip():
    def fn(x, w, v):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w) @ v, None), x, None, length=6)[0]

    args = [jax.ShapeDtypeStruct(s, "float32") for s in ((64, 32), (32, 128), (128, 32))]
    planned = plan(fn, *args, target="cpu:8", plan="tp:8")
    (collective,) = planned.verify().collectives
    assert (collective.kind, collective.axes, collective.trips) == ("all-reduce", ("tp",), 6)
    assert (collective.payload_bytes, collective.wire_bytes) == (64 * 32 * 4, 2 * 7 / 8 * 64 * 32 * 4)
    assert collective.step_bytes == pytest.approx(planned.estimate.comm_bytes)


@pytest.mark.whole
def test_unplanned_traffic_has_its_line_and_cost():
    audit = with_input_spec(planned("dp:8"), "0/0/w", P("dp")).verify()
    gathers = [u for u in audit.unplanned if u.kind == "all-gather"]
    assert gathers and len(gathers) == len(audit.unplanned)
    in_the_loss = [u for u in gathers if u.line.startswith(f"{programs.__file__}:{programs.LOSS_LINE}")]
    assert [u.axes for u in in_the_loss] == [("dp",)]
    assert in_the_loss[0].bytes == pytest.approx(7 / 8 * 64 * 128 * 4)
    assert in_the_loss[0].us > 0 and "replicates" in in_the_loss[0].cause
    assert audit.wire_bytes is not None and audit.predicted_wire_bytes is not None
    assert audit.unplanned_bytes == pytest.approx(audit.wire_bytes - audit.predicted_wire_bytes, rel=0.01)
    assert re.search(r"unplanned traffic: (.*\n)+  all-gather over dp, 28.0 KiB, .* \(mlp_loss\)", str(audit))


@pytest.mark.whole
def test_full_rematerialization_has_its_cost_and_cause():
    audit = with_input_spec(planned("dp:2 tp:4"), "0/0/w", P(("tp", "dp"))).verify()
    assert audit.remarks
    remark = audit.remarks[0]
    assert (remark.array, remark.bytes, remark.wire_bytes) == ("f32[8,128]", 64 * 128 * 4, 7 * 8 * 128 * 4)
    assert remark.us > 0 and "cannot reshard from" in remark.cause
    assert any("full rematerialization" in u.cause for u in audit.unplanned)
    assert "involuntary full rematerializations: " in str(audit)
    assert [w.shape for w in audit.replicated] == ["f32[64,128]"]


def test_audit_as_json():
    audit = planned("dp:8").verify()
    data = json.loads(audit.to_json())
    assert data["kind"] == "ok" and data["unplanned_bytes"] == 0
    assert data["collectives"][0]["kind"] == "all-reduce"
    assert data["memory"] == dict(audit.memory)
    assert set(data["versions"]) == {"jax", "jaxlib"}


def test_audit_as_text():
    text = str(planned("dp:8").verify())
    assert text.startswith("audit of adamw_step on cpu:8: dp 8 = 8 devices\n")
    for part in ("planned", " s by jax ", "peak memory", "collectives: ", "unplanned traffic: none", "temp "):
        assert part in text
    assert all(len(line) <= 100 for line in text.splitlines())


COLLECTIVE = CompiledCollective("all-gather", (), 1.0, 1.0, 1.0, "", False, 1.0, 1.0, devices="{0,1}{2,3}")
FULL = {
    "collectives": (COLLECTIVE,) * 12,
    "unplanned": (Unplanned("all-gather", (), "", 1.0, 1.0, "so"),) * 12,
    "missing": (Missing("all-gather", ("dp",), "", 1.0),) * 12,
    "replicated": (ReplicatedArray("temporary", "x", "f32[8]", 32.0, 4.0),) * 12,
    "remarks": (Rematerialization("", 0.0, 0.0, 0.0, "why"),) * 12,
    "notes": ("a note",),
    "dropped": ("an_option",),
    "memory": {"argument": 1, "temp": 0},
}


@pytest.mark.parametrize("kind", ["ok", "oom", "error", "crash", "timeout", "another"])
@pytest.mark.parametrize("more", [{}, {"step_time_us": float("nan"), "compute_us": float("inf")}, FULL])
def test_every_audit_has_a_text(kind, more):
    audit = Audit(kind, message="first\nsecond", **more)
    assert kind in repr(audit) and "audit of" in str(audit)
    assert json.loads(audit.to_json())["kind"] == kind


def test_text_of_a_failed_audit():
    text = str(Audit("error", "cannot read 'many' into flag xla_own:", options={"xla_own": "many", "xla": "1"}))
    assert "xla_own=many is one of its options: give it another value, or leave it out" in text
    text = str(Audit("oom", "Used 20G of 16G hbm", "step", "v5e:4x4", {"dp": 16}, peak_bytes=20 * 2**30))
    assert "the program does not fit the device" in text and "Used 20G of 16G hbm" in text and "20.0 GiB" in text
    assert "unplanned" not in text


def test_a_peak_below_the_parts_is_explained():
    parts = {"argument": 3 * 2**30, "output": 3 * 2**30, "alias": 3 * 2**30, "temp": 12 * 2**30}
    explanation = "temp is an upper bound: not all temporaries are alive at the peak"
    assert explanation in str(Audit("ok", memory=parts | {"peak": 11 * 2**30}))
    assert explanation not in str(Audit("ok", memory=parts | {"peak": 15 * 2**30}))
    assert explanation not in str(Audit("ok", memory=parts))


def test_an_audit_names_its_plan():
    assert planned("dp:8").verify().strategy == "dp:8"
    assert planned("dp:8").where(variant={"remat": "dots"}).verify().strategy == "dp:8 (remat=dots)"


def test_program_text_that_cannot_be_parsed(tmp_path):
    path = tmp_path / "program.hlo.gz"
    path.write_bytes(gzip.compress(b"something else"))
    plan, memory = planned("dp:8"), {"argument": 3, "output": 2, "alias": 1, "temp": 4}
    audit = verification.audit(
        bound_or_error(plan.bound).executable,
        verification.compile_target("cpu:8"),
        Compiled("ok", memory=memory, path=path),
    )
    assert (audit.kind, audit.ok, audit.peak_bytes) == ("error", False, 8)
    assert "cannot be parsed: ValueError" in audit.message and "cannot be parsed" in str(audit)


def test_topology_names_for_the_compiler():
    names = {"v5e:4x4": "v5e:4x4", "v5litepod:2x4": "v5e:2x4", "v5p:2x2x4*2": "v5p:2x2x4*2", "a100:8": "a100-80:1x8",
             "h100:4x8": "h100:4x8", "ironwood:2x2x1": "tpu7x:2x2x1", "cpu:8": "cpu:1x8"}  # fmt: skip
    assert {name: topology_name(verification.compile_target(name)) for name in names} == names


@pytest.mark.parametrize("until", ["schedule", "code"])
def test_copies_that_do_not_fit_beside_compute(until):
    """A roofline adds them. Without cycles, the compute time of a schedule is that of the roofline."""
    made = planned("dp:8", "h100:8")
    text = """HloModule m, is_scheduled=true

ENTRY %main (x: f32[4096,4096]) -> f32[4096,4096] {
  %x = f32[4096,4096]{1,0} parameter(0)
  %s = (f32[4096,4096]{1,0}, f32[4096,4096]{1,0}, u32[]) copy-start(%x)
  %n = f32[4096,4096]{1,0} negate(%x)
  %d = f32[4096,4096]{1,0} copy-done(%s)
  ROOT %r = f32[4096,4096]{1,0} add(%n, %x)
}
"""
    executable, target = bound_or_error(made.bound).executable, find_target("h100:8")
    found = verification.with_program(Audit("ok", until=until), executable, target, parse_program(text))
    assert found.compute_us is not None and found.compute_us_roofline is not None
    assert found.compute_us_cycles is None and found.step_time_us == found.compute_us
    assert (found.compute_us < 0.9 * found.compute_us_roofline) == (until == "code")
