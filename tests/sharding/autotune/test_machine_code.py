"""Plans are compared by schedules, and only the chosen one gets machine code. The compiler is faked, except where the
real one is marked."""

import importlib
from dataclasses import replace

import pytest

from autoshard.sharding.audit import Audit
from autoshard.sharding.audit.aot_compile import Until
from autoshard.sharding.audit.constants import TIMEOUT_S
from autoshard.sharding.planner.bound_plan import bound_or_error
from tests.sharding.autotune.test_compiled_options import LAYOUT, LIMIT, VMEM, planned

compiled_options = importlib.import_module("autoshard.sharding.autotune.compiled_options")
machine_code = importlib.import_module("autoshard.sharding.autotune.machine_code")
compiled_time = importlib.import_module("autoshard.sharding.autotune.compiled_time")


def audit(us, until: Until = "schedule", kind="ok", **more):
    return Audit(kind, step_time_us=us if kind == "ok" else None, peak_bytes=1e6, program=f"{us}", until=until, **more)


@pytest.fixture
def compiler(monkeypatch):
    """A faked compiler: (option or own, until) -> audit. `made` lists what was compiled."""

    class Compiler:
        outcomes = {}
        made = []

        def under(self, executable, options, timeout_s=1.0, until: Until = "code"):
            own = executable.plan.compiler_options["tpu"]
            name = next((n for n in (LAYOUT, VMEM) if (n, until) in self.outcomes and n in options), "own")
            if name == VMEM and own.get(VMEM) == options[VMEM]:
                name = "own"
            self.made.append((name, until))
            found = self.outcomes.get((name, until), audit(100.0 if until == "schedule" else 150.0, until))
            return replace(found, options=dict(options))

        def verify(self, executable, *, timeout_s, until: Until = "code"):
            assert 0 < timeout_s <= TIMEOUT_S
            return self.under(executable, executable.plan.compiler_options["tpu"], timeout_s, until)

    found = Compiler()
    found.outcomes, found.made = {}, []
    monkeypatch.setattr(compiled_options, "verify_under", found.under)
    monkeypatch.setattr(machine_code, "verify_under", found.under)
    monkeypatch.setattr(machine_code, "verify", found.verify)
    return found


def chosen(target="v6e:2x4", until=float("inf")):
    bound = bound_or_error(planned(target).bound)
    return machine_code.with_code(bound, machine_code.scheduled(bound.executable), LIMIT, until)


def test_option_sets_are_compared_by_schedules(compiler):
    compiler.outcomes = {(LAYOUT, "schedule"): audit(80.0), (LAYOUT, "code"): audit(120.0, "code")}
    bound, found = chosen()
    assert found.until == "code" and found.step_time_us == 120.0
    assert bound.plan.compiler_options["tpu"][LAYOUT] == "true"
    assert [name for name, until in compiler.made if until == "code"] == [LAYOUT]
    assert "compiler options, by schedules for v6e:2x4: plan's own 100 us; " in bound.plan.notes[-1]


def test_sets_that_change_machine_code_are_compared_by_it(compiler):
    compiler.outcomes = {(VMEM, "code"): audit(90.0, "code"), (VMEM, "schedule"): audit(1.0)}
    bound, found = chosen("v5e:2x4")
    assert (VMEM, "schedule") not in compiler.made and (VMEM, "code") in compiler.made
    assert found.step_time_us == 90.0 and VMEM in bound.plan.compiler_options["tpu"]
    assert "compiler options, compiled for v5e:2x4: plan's own 150 us; scoped-vmem 90.0 us" in bound.plan.notes[-1]


def test_a_set_without_machine_code_is_dropped(compiler):
    failure = audit(0.0, "code", "error", message="no registers")
    compiler.outcomes = {(LAYOUT, "schedule"): audit(80.0), (LAYOUT, "code"): failure}
    bound, found = chosen()
    assert found.ok and found.until == "code" and LAYOUT not in bound.plan.compiler_options["tpu"]
    assert bound.plan.notes[-1] == ("the option set was dropped, because its machine code fails: error: no registers")


def test_a_failure_without_other_options_is_returned(compiler):
    compiler.outcomes = {("own", "code"): audit(0.0, "code", "crash")}
    assert chosen()[1].kind == "crash"


def test_a_set_whose_machine_code_does_not_fit_is_dropped(compiler):
    compiler.outcomes = {(LAYOUT, "schedule"): audit(80.0), (LAYOUT, "code"): replace(audit(9.0), peak_bytes=2 * LIMIT)}
    bound, found = chosen()
    assert found.until == "code" and LAYOUT not in bound.plan.compiler_options["tpu"]
    assert bound.plan.notes[-1].endswith("its machine code fails: needs 64.0 GiB of 32.0 GiB")


@pytest.mark.parametrize(
    ("until", "reason"),
    [(float("inf"), "the compiler was stopped after 900 s"), (0.0, "the time for compilations is over")],
)
@pytest.mark.parametrize("dropped", [False, True], ids=["own", "after a set"])
def test_without_time_for_machine_code_the_audit_is_that_of_the_schedule(compiler, until, reason, dropped):
    compiler.outcomes = {("own", "code"): audit(0.0, "code", "timeout")}
    if dropped and until:
        compiler.outcomes |= {(LAYOUT, "schedule"): audit(80.0), (LAYOUT, "code"): audit(0.0, "code", "error")}
    bound, found = chosen(until=until)
    assert found.ok and found.until == "schedule" and found.step_time_us == 100.0
    assert LAYOUT not in bound.plan.compiler_options["tpu"]
    assert bound.plan.notes[-1] == f"there is no machine code: {reason}"


def test_notes_on_requested_options_are_kept(compiler, monkeypatch):
    """`verify` writes them. A schedule has them, too."""
    monkeypatch.setattr(machine_code, "verify", lambda executable, **_: audit(1.0, notes=("these options",)))
    bound = bound_or_error(planned("v5e:2x4", compiler_options={"xla_any": "1"}).bound)
    own = machine_code.scheduled(bound.executable)
    assert machine_code.with_code(bound, own, LIMIT, code=False)[1].notes == ("these options",)
    assert not machine_code.with_code(bound_or_error(planned("v5e:2x4").bound), own, LIMIT, code=False)[1].notes


def test_verify_k_makes_machine_code_for_the_fastest_alone(compiler, monkeypatch):
    plans = [bound_or_error(planned(words=words).bound) for words in ("dp:8", "fsdp:8", "dp:2 fsdp:4")]
    us = {"dp:8": 90.0, "fsdp:8": 80.0, "dp:2 fsdp:4": 70.0}
    monkeypatch.setattr(compiled_time, "scheduled", lambda executable: audit(us[executable.plan.chosen]))
    coded = []

    def with_code(bound, own, limit):
        coded.append(bound.plan.chosen)
        return bound, replace(own, until="code", kind="error" if bound.plan.chosen == "dp:2 fsdp:4" else "ok")

    monkeypatch.setattr(compiled_time, "with_code", with_code)
    made = compiled_time.fastest_compiled(plans, LIMIT).plan
    assert coded == ["dp:2 fsdp:4", "fsdp:8"] and made.chosen == "fsdp:8"  # the fastest has no machine code
    assert made.notes[-1] == "the fastest of 2 by schedules for v6e:2x4: dp:8 90.0 us, fsdp:8 80.0 us"
    assert [(each.kind, each.until) for each in made.audits] == [
        ("ok", "schedule"),
        ("ok", "code"),
        ("error", "code"),
    ]


@pytest.mark.tpu_compile
@pytest.mark.slow
def test_a_plan_verified_up_to_its_schedule():
    made = planned("v5e:2x4")
    found = made.verify(until="schedule")
    assert found.ok and found.until == "schedule" and found.cycles is None and found.peak_bytes
    assert "scheduled, without machine code, in" in str(found)
    code = made.verify()
    assert code.until == "code" and code.cycles
    assert found.compute_us == pytest.approx(code.compute_us_roofline, rel=1e-6)
    assert [(c.kind, c.trips, c.payload_bytes) for c in found.collectives] == [
        (c.kind, c.trips, c.payload_bytes) for c in code.collectives
    ]
