"""`verify="auto"`: which plans are compiled, which one is chosen, and its notes. The compiler is faked."""

import json
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard import Plan, plan
from autoshard.errors import AutoshardWarning, PlanError
from autoshard.sharding.audit import Audit
from autoshard.sharding.audit.audit import AuditError
from autoshard.sharding.autotune import settling
from autoshard.sharding.autotune.constants import MOST_CLOSE
from autoshard.sharding.planner.bound_plan import BoundPlan
from autoshard.sharding.search.constants import MOST_KIND_ERROR, SAME_KIND_ERROR
from autoshard.sharding.search.strategy_kinds import kind_of
from tests.sharding.runtime.two_processes import run_in_two_processes

pytestmark = pytest.mark.filterwarnings("error")


def step(w: Any, x: Any, *, scale: float = 1.0) -> Any:
    def loss(w):
        def layer(h, w):
            return h + jnp.tanh(h @ w["up"]) @ w["down"], None

        return jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2) * scale

    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))


SHAPES = (
    {
        "up": jax.ShapeDtypeStruct((4, 2048, 8192), "bfloat16"),
        "down": jax.ShapeDtypeStruct((4, 8192, 2048), "bfloat16"),
    },
    jax.ShapeDtypeStruct((8192, 2048), "bfloat16"),
)


@dataclass
class Compiler:
    """A faked compiler.

    Attributes:
        ratios: compiled over estimated step time by strategy or kind; 1 for others.
        kinds: results of scheduling by kind; `ok` for other kinds.
        compiled: the strategies that were scheduled.
        codes: results of generating machine code by kind; `ok` for other kinds.
        coded: the strategies for which machine code was requested.
    """

    ratios: dict[str, float] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    compiled: list[str] = field(default_factory=list)
    codes: dict[str, str] = field(default_factory=dict)
    coded: list[str] = field(default_factory=list)

    def scheduled(self, executable: Any, timeout_s: float) -> Audit:
        made = executable.plan
        assert timeout_s > 0
        self.compiled.append(made.chosen)
        kind = kind_of(made.chosen)
        us = made.estimate.step_time_us * self.ratios.get(made.chosen, self.ratios.get(kind, 1.0))
        peak = made.estimate.peak_memory_bytes
        return Audit(self.kinds.get(kind, "ok"), step_time_us=us, peak_bytes=peak, options=made.compiler_options["tpu"])

    def with_code(
        self, bound: BoundPlan, audit: Audit, limit: float, until: float, code: bool
    ) -> tuple[BoundPlan, Audit]:
        if not code:
            return bound, audit
        self.coded.append(bound.plan.chosen)
        kind = self.codes.get(kind_of(bound.plan.chosen), "ok")
        return bound, replace(audit, kind=kind)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Compiler:
    found = Compiler()
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path))
    monkeypatch.setattr(settling, "scheduled", found.scheduled)
    monkeypatch.setattr(settling, "with_code", found.with_code)
    return found


def planned(**options: Any) -> Plan:
    return plan(step, *SHAPES, target="v5e:2x4", **{"verify": "auto", **options})


def test_the_kinds_that_may_be_the_best_are_compiled_and_no_others(compiler: Compiler) -> None:
    estimated = planned(verify=0)
    kinds = estimated.best_of_kinds()
    close = [best.strategy for best in kinds.values() if best.ratio < 1 + MOST_KIND_ERROR]
    assert 2 <= len(close) < len(kinds)
    made = planned()
    assert compiler.compiled[: len(close)] == close and made.chosen == estimated.chosen
    assert set(compiler.compiled[len(close) :]) <= {*plans_close_to(estimated)}
    assert len(made.audits) == 1 and made.notes[-1].startswith("compiled for v5e:2x4, the fastest of each kind")
    assert all(strategy in made.notes[-1] for strategy in close)


def plans_close_to(made: Plan) -> list[str]:
    """Return the plans of the chosen kind with nearly the estimate of the chosen plan."""
    kind, most_us = kind_of(made.chosen), (1 + SAME_KIND_ERROR) * made.estimate.step_time_us
    found = [(strategy, us) for strategy, us, _ in made.candidates if strategy != made.chosen]
    return [strategy for strategy, us in found if kind_of(strategy) == kind and us <= most_us]


def test_close_plans_of_the_best_kind_are_compiled(compiler: Compiler) -> None:
    others = plans_close_to(planned(verify=0))
    assert others
    made = planned()
    tried = [strategy for strategy in compiler.compiled if strategy in others]
    assert 1 <= len(tried) <= MOST_CLOSE
    compiler.ratios = {tried[-1]: 0.9}
    other = planned(variants={"scale": [2.0]})  # another program, without lessons
    assert made.chosen not in others and other.chosen == tried[-1]


def test_the_fastest_compiled_plan_is_chosen(compiler: Compiler) -> None:
    compiler.ratios = {"tp": 1.3}
    assert kind_of(planned(verify=0).chosen) == "tp"
    made = planned()
    assert made.chosen == planned(verify=0).best_of_kinds()["fsdp"].strategy
    assert "fsdp:4 tp:2" in made.notes[-1] and made.audits[0].step_time_us


def test_the_estimate_is_corrected_by_what_was_compiled(compiler: Compiler) -> None:
    """All programs take twice their estimate. So the ratios are as estimated, and no other plan is compiled."""
    planned()
    before = list(compiler.compiled)
    compiler.ratios, compiler.compiled[:] = dict.fromkeys(("dp", "fsdp", "tp", "cp", "hybrid"), 2.0), []
    planned(variants={"scale": [2.0]})  # another program, without lessons
    assert compiler.compiled == before


def test_a_kind_far_ahead_is_not_compiled(compiler: Compiler) -> None:
    made = plan(step, SHAPES[0], jax.ShapeDtypeStruct((256, 2048), "bfloat16"), target="v5e:2x4", verify="auto")
    assert not compiler.compiled and not made.audits
    assert made.notes[-1].startswith("verify='auto' compiled nothing: by the estimate, the next kind, fsdp, takes 1.")


def test_a_kind_far_ahead_is_scheduled_on_request(compiler: Compiler) -> None:
    x = jax.ShapeDtypeStruct((256, 2048), "bfloat16")
    made = plan(step, SHAPES[0], x, target="v5e:2x4", verify="schedule")
    assert compiler.compiled[0] == made.chosen and not compiler.coded and made.audits
    assert {kind_of(strategy) for strategy in compiler.compiled} == {kind_of(made.chosen)}


def test_a_plan_that_may_not_fit_is_compiled_though_it_is_far_ahead(compiler: Compiler) -> None:
    shapes = SHAPES[0], jax.ShapeDtypeStruct((256, 2048), "bfloat16")
    best = plan(step, *shapes, target="v5e:2x4")
    limit = best.estimate.peak_memory_bytes * 1.05
    made = plan(step, *shapes, target="v5e:2x4", verify="auto", memory_limit_bytes=limit)
    assert compiler.compiled[:1] == [best.chosen] and made.audits


def test_a_plan_that_needs_less_memory_takes_the_place_of_one_that_does_not_fit(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_the_leanest(*given: Any) -> Any:
        return [(kind, [c for c in found if c.peak_bytes > 3.3e8 or kind != "tp"]) for kind, found in found_by(*given)]

    found_by = settling.contenders
    monkeypatch.setattr(settling, "contenders", without_the_leanest)
    compiler.kinds = {"tp": "oom"}
    made = planned()
    tried = [strategy for strategy in compiler.compiled if kind_of(strategy) == "tp"]
    peaks = {strategy: peak for strategy, _, peak in planned(verify=0).candidates}
    assert 1 < len(tried) <= settling.MOST_TRIES and peaks[tried[0]] > peaks[tried[1]]
    assert kind_of(made.chosen) == "fsdp"
    assert any(note.startswith(f"compiled, but not chosen: {tried[0]}: oom") for note in made.notes)


def test_machine_code_is_made_for_the_winner_alone(compiler: Compiler) -> None:
    made = planned()
    assert compiler.coded == [made.chosen] and len(compiler.compiled) > 1
    again = planned(verify="schedule")
    assert again.chosen == made.chosen and len(compiler.coded) == 1


def test_a_plan_without_machine_code_is_replaced_by_the_next_best(compiler: Compiler) -> None:
    compiler.codes = {"tp": "error"}
    assert kind_of(planned(verify=0).chosen) == "tp"
    made = planned()
    assert kind_of(made.chosen) == "fsdp" and compiler.coded[-1] == made.chosen
    assert f"compiled, but not chosen: {compiler.coded[0]}: error" in made.notes


def test_plans_that_were_not_compiled_take_the_place_of_one_without_machine_code(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one kind may win by the estimate. Then other plans of this kind are next, and other kinds."""
    monkeypatch.setattr(settling, "MOST_KIND_ERROR", 0.0)
    monkeypatch.setattr(settling, "MOST_MEMORY_ERROR", 99.0)
    compiler.codes = {"tp": "error"}
    made = planned()
    tried = [strategy for strategy in compiler.coded if kind_of(strategy) == "tp"]
    assert 2 <= len(tried) <= settling.MOST_TRIES and kind_of(made.chosen) != "tp"
    assert compiler.coded == [*tried, made.chosen]
    assert [note for note in made.notes if "but not chosen" in note] == [
        f"compiled, but not chosen: {strategy}: error" for strategy in tried
    ]


def test_machine_code_that_does_not_fit_is_replaced(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_code(bound: BoundPlan, audit: Audit, limit: float, *rest: Any) -> tuple[BoundPlan, Audit]:
        return bound, replace(audit, peak_bytes=2 * limit if kind_of(bound.plan.chosen) == "tp" else audit.peak_bytes)

    monkeypatch.setattr(settling, "with_code", with_code)
    made = planned()
    assert kind_of(made.chosen) != "tp" and any("needs " in note and " of " in note for note in made.notes)
    compiler.compiled.clear()
    planned()
    assert not any(kind_of(strategy) == "tp" for strategy in compiler.compiled)  # its lesson says that it does not fit


def test_without_time_for_machine_code_the_schedule_decides(compiler: Compiler) -> None:
    compiler.codes = {"tp": "timeout"}
    made = planned()
    assert kind_of(made.chosen) == "tp" and compiler.coded == [made.chosen]


def test_nothing_that_fits(compiler: Compiler) -> None:
    compiler.kinds = dict.fromkeys(("dp", "fsdp", "tp", "cp", "hybrid"), "error")
    made = planned()
    assert made.chosen == planned(verify=0).chosen
    assert made.notes[-1] == "no compiled plan can be used; this one is chosen by the estimate"


def test_what_was_compiled_is_kept_for_the_next_plan(compiler: Compiler) -> None:
    first = planned()
    compiler.compiled.clear()
    again = planned()
    assert compiler.compiled == [first.chosen] and again.chosen == first.chosen  # for its audit
    assert again.notes[-1] == first.notes[-1]


def test_a_plan_with_another_estimate_is_compiled_again(compiler: Compiler, tmp_path: Any) -> None:
    planned()
    before, compiler.compiled[:] = list(compiler.compiled), []
    (file,) = (tmp_path / "lessons").iterdir()
    rows = json.loads(file.read_text())
    file.write_text(json.dumps({name: row | {"estimated_us": row["estimated_us"] + 1} for name, row in rows.items()}))
    planned()
    assert compiler.compiled == before


def test_what_did_not_fit_is_named_in_the_next_plan_too(compiler: Compiler) -> None:
    compiler.kinds = {"tp": "oom"}
    first, again = planned(), planned()
    assert [note for note in first.notes if "but not chosen" in note] == list(again.notes[1:]) != []


def step_with_sine(w: Any, x: Any) -> Any:
    return step(w, jnp.sin(x))


def step_with_cosine(w: Any, x: Any) -> Any:
    return step(w, jnp.cos(x))


@pytest.mark.parametrize(
    ("other", "options"), [(step_with_sine, {"donate_argnums": 0}), (step_with_cosine, {})], ids=["donated", "operator"]
)
def test_a_program_with_the_same_shapes_and_estimates_is_compiled(
    compiler: Compiler, other: Any, options: dict[str, Any]
) -> None:
    compiler.kinds = {"tp": "oom"}
    assert kind_of(plan(step_with_sine, *SHAPES, target="v5e:2x4", verify="auto").chosen) == "fsdp"
    compiler.kinds = {}
    made = plan(other, *SHAPES, target="v5e:2x4", verify="auto", **options)
    assert kind_of(made.chosen) == "tp" and made.audits[0].ok


def test_warnings_of_the_chosen_plan_are_shown_once(compiler: Compiler) -> None:
    def with_callback(w: Any, x: Any) -> Any:
        new = step(w, x)
        return jax.tree.map(lambda a: jax.pure_callback(lambda a: a, a, a), new)

    compiler.ratios = {"tp": 1.5}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = plan(with_callback, *SHAPES, target="v5e:2x4", verify="auto")
    assert kind_of(made.chosen) == "fsdp" and len(caught) == 1


def test_a_damaged_file_of_lessons_counts_as_none(compiler: Compiler, tmp_path: Any) -> None:
    planned()
    before, compiler.compiled[:] = list(compiler.compiled), []
    (file,) = (tmp_path / "lessons").iterdir()
    file.write_text('{"plan fsdp:8": {"kind": 3}}')
    planned()
    assert compiler.compiled == before


def test_the_time_is_over(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling.time, "monotonic", lambda: 200.0 * len(compiler.compiled))  # one takes 200 s
    made = planned(verify_timeout_s=150)
    assert len(compiler.compiled) == 1
    assert any("the 150 s for compilations are over; not settled: fsdp" in note for note in made.notes)


def test_all_variants_compete(compiler: Compiler) -> None:
    made = planned(variants={"scale": [1.0, 2.0]})
    assert len(compiler.compiled) >= 2 and made.variant and len(made.variants) == 2


def test_a_requested_plan_has_no_rivals(compiler: Compiler) -> None:
    made = planned(plan="fsdp:8")
    assert not compiler.compiled and made.chosen == "fsdp:8"
    assert made.notes == (
        "verify='auto' compiled nothing: there is no plan of another kind that fits. verify=1 compiles this plan",
    )


def test_without_a_compiler_the_estimate_decides(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "missing_compiler", lambda platform: "the compiler is missing: pip install it")
    with pytest.warns(AutoshardWarning, match="the plan is not verified: the compiler is missing: pip install it"):
        made = planned()
    assert not compiler.compiled and made.notes[-1] == "not verified: the compiler is missing: pip install it"


def test_a_target_that_the_compiler_rejects(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def rejected(*_: Any, **__: Any) -> Audit:
        raise AuditError("the compiler does not support the topology")

    monkeypatch.setattr(settling, "scheduled", rejected)
    with pytest.warns(AutoshardWarning, match="is not verified: the compiler does not support the topology"):
        made = planned()
    assert made.chosen == planned(verify=0).chosen and made.notes[-1].startswith("not verified: the compiler does not")


CODE = """
import jax, jax.numpy as jnp, sys
from autoshard import auto_shard
from autoshard.sharding.audit import Audit
from autoshard.sharding.autotune import settling
from autoshard.sharding.search.strategy_kinds import kind_of
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
def scheduled(executable, timeout_s):
    return Audit("ok", step_time_us=1.0 if kind_of(executable.plan.chosen) == "fsdp" else 9.0, peak_bytes=1.0)
def with_code(bound, audit, limit, until, code):
    return bound.where(compiler_options={"cpu": {"xla_cpu_enable_fast_math": False}}), audit
settling.scheduled, settling.with_code, settling.MOST_KIND_ERROR = scheduled, with_code, 99.0
# Process 1 has no compiler: process 0 decides for it.
settling.missing_compiler = lambda platform: "missing" if jax.process_index() else None
def step(w, x):
    loss = lambda w: jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))
w, x = {"a": jnp.ones((16, 8)), "b": jnp.ones((8, 16))}, jnp.ones((32, 16))
planned = auto_shard(step, verify="auto")
out = planned(w, x)
made = planned.plan(w, x)
print("chosen", kind_of(made.chosen), *made.compiler_options["cpu"], made.notes[-1][:12])
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_process_0_decides_for_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path))
    for printed, errors in run_in_two_processes(CODE):
        assert "chosen fsdp xla_cpu_enable_fast_math compiled for" in printed, errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"verify": "all"},
            "verify is 'all'; give the number of plans to compile for the target, 0 for none, 'auto' or",
        ),
        ({"verify": 2, "verify_timeout_s": 9}, "verify_timeout_s is 9, but it applies only to verify='auto'"),
        ({"verify_timeout_s": 0}, "verify_timeout_s is 0; give a positive number of seconds"),
        ({"verify_timeout_s": float("inf")}, "verify_timeout_s is inf; give a positive number of seconds"),
        ({"verify_timeout_s": "9"}, "verify_timeout_s is '9'; give a positive number of seconds"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned(**options)


@pytest.mark.tpu_compile
@pytest.mark.slow
def test_with_the_real_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path))
    made = planned()
    (audit,) = made.audits
    assert audit.ok and audit.cycles and audit.until == "code"
    assert made.notes[-2].startswith("by schedules for v5e:2x4, the fastest of each kind")
    again = planned()
    assert again.audits[0].cached and again.chosen == made.chosen
