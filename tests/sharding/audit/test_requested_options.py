"""`Plan.verify(options=...)`: names of sets, options that need others, options without effect."""

import importlib

import pytest

from autoshard.sharding.audit import Audit, AuditError
from autoshard.sharding.audit.aot_compile import Until
from autoshard.sharding.audit.requested_options import requested_options
from tests.sharding.autotune.test_compiled_options import planned

verification = importlib.import_module("autoshard.sharding.audit.verification")
REDUCE = "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter"
GATHER = "xla_tpu_enable_sparse_core_collective_offload_all_gather"
LAYERS = "xla_tpu_enable_latency_hiding_layer_scheduler"
AGGREGATOR = "xla_tpu_enable_sparse_core_collective_aggregator"


def test_a_name_adds_its_set_to_the_options_of_the_plan():
    made = planned()
    found = requested_options(made, "sparse-core-reductions")
    assert {REDUCE, GATHER} <= found.options.keys() and found.own == made.compiler_options["tpu"]
    assert found.notes == ["option set sparse-core-reductions: AXLearn reports abnormal losses"]
    assert REDUCE in found.changed and GATHER not in found.changed


def test_unknown_names_list_the_sets():
    with pytest.raises(AuditError, match="verify: there is no option set 'fastest'; the sets of v6e are no-collective"):
        planned().verify(options="fastest")
    with pytest.raises(AuditError, match="cpu has no sets; pass a mapping"):
        planned("cpu:8").verify(options="gather-fusion")


def test_options_that_need_or_exclude_others():
    found = requested_options(planned(), {LAYERS: "true"})
    assert found.options[AGGREGATOR] == "true" and found.added == [f"{AGGREGATOR}=true, which {LAYERS} needs"]
    fuse = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"
    found = requested_options(planned(), {GATHER: "true", fuse: "true"})
    assert f"{GATHER} and {fuse} exclude each other: turn one of them off" in found.notes


def fake_compiler(monkeypatch, programs):
    """Fake the compiler.

    Args:
        programs: option -> the digest of programs with this option. The first option that is set decides.

    Returns:
        A list that receives the options of each program for which machine code is generated.
    """
    compiled = []

    def compile_under(executable, options, timeout_s=0.0, until: Until = "code"):
        compiled.extend([dict(options)] * (until == "code"))
        digest = next((program for name, program in programs.items() if name in options), "plain")
        dropped = tuple(name for name in options if name.startswith("xla_unknown"))
        return Audit("ok", step_time_us=1.0, program=digest, options=dict(options), dropped=dropped, until=until)

    monkeypatch.setattr(verification, "verify_under", compile_under)
    return compiled


def test_options_without_effect_are_named(monkeypatch):
    compiled = fake_compiler(monkeypatch, {"xla_real": "real"})
    made = planned()
    own = dict(made.compiler_options["tpu"])
    audit = made.verify(options=own | {"xla_idle": "1", "xla_unknown_1": "1"})
    assert audit.notes == ("these options change nothing in the compiled program: xla_idle",)
    assert len(compiled) == 2
    assert not made.verify(options=own | {"xla_real": "1"}).notes
    assert len(compiled) == 3  # the schedules differ, so there is no need for machine code without the option
    assert not made.verify().notes and not made.verify(options=own | {"xla_unknown_1": "1"}).notes
    assert len(compiled) == 5  # the plan's own options, and options of which none is known, need no comparison


def test_options_that_change_only_machine_code_have_an_effect(monkeypatch):
    """Their schedules are the same, so machine code is compared."""

    def compile_under(executable, options, timeout_s=0.0, until: Until = "code"):
        program = str("xla_tiles" in options) if until == "code" else "schedule"
        return Audit("ok", step_time_us=1.0, program=program, options=dict(options), until=until)

    monkeypatch.setattr(verification, "verify_under", compile_under)
    made = planned()
    assert not made.verify(options=dict(made.compiler_options["tpu"]) | {"xla_tiles": "1"}).notes


def test_a_schedule_does_not_say_that_machine_code_stays_the_same(monkeypatch):
    """All schedules are the same. `scoped-vmem` changes only machine code, so it may have an effect."""

    def compile_under(executable, options, timeout_s=0.0, until: Until = "code"):
        return Audit("ok", step_time_us=1.0, program="schedule", options=dict(options), until=until)

    monkeypatch.setattr(verification, "verify_under", compile_under)
    made = planned("v5e:2x4")
    assert not made.verify(options="scoped-vmem", until="schedule").notes
    given = dict(made.compiler_options["tpu"]) | {"xla_idle": "1"}
    audit = made.verify(options=given, until="schedule")
    assert audit.notes == ("these options change nothing in the schedule: xla_idle",)


@pytest.mark.slow
def test_the_option_that_the_compiler_knows_reports_its_effect():
    made = planned("cpu:8")
    audit = made.verify(options={"xla_cpu_enable_fast_math": False, "xla_no_such_option": "1"})
    assert audit.ok and audit.dropped == ("xla_no_such_option",)
    assert audit.notes == ("these options change nothing in the compiled program: xla_cpu_enable_fast_math",)
    assert audit.options["xla_cpu_enable_fast_math"] is False and audit.program == made.verify().program


@pytest.mark.slow
@pytest.mark.tpu_compile
def test_options_of_the_tpu_compiler():
    """One is refused and named, one has no effect in a program without collectives and is named."""
    made = planned("v6e:1x1", "dp:1")
    audit = made.verify(options={**made.compiler_options["tpu"], "xla_sc_disjoint_spmem": "false",
                                 "xla_max_concurrent_host_send_recv": "100"})  # fmt: skip
    assert audit.ok and audit.dropped == ("xla_sc_disjoint_spmem",)
    assert any("change nothing in the compiled program: xla_max_concurrent_host_send_recv" in n for n in audit.notes)
    assert made.verify(options={LAYERS: "true"}).ok  # the compiler refuses it without the option that it needs
