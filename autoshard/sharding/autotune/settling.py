"""`verify="auto"` and `verify="schedule"`: compile the fewest plans that settle which kind of plan is the fastest.

The estimate compares plans of one kind well, and plans of different kinds less well (`search.constants`). So the
fastest plan of each kind is a contender if, within the error of the estimate, it may be the fastest of all. Contenders
are compiled one after another, up to the schedule where the compiler stops there (`machine_code`):

    first    the fastest by the estimate
    next     the fastest of those that may still be faster than the best compiled plan. The expected time of a contender
             is its estimate, times the mean ratio of compiled to estimated time so far
    close    up to `MOST_CLOSE` further plans of the best plan's kind, if their estimates are within the error of plans
             of one kind (`SAME_KIND_ERROR`). They often differ in the number of devices that share weights
    end      no contender may be faster, or the time is over

With `auto`, nothing is compiled if there is no other contender, the plan certainly fits, and it moves nothing to host
memory. The speed of such transfers depends on compiler options.

A contender that does not compile or fit is replaced by the next plan of its kind that needs less memory. One more
contender is the fastest plan that exceeds the memory by the estimate, because XLA rematerializes what does not fit. The
winner is also compared under other compiler options. With `auto` it is then compiled to machine code. If that fails,
the comparison goes on without it. The results are kept (`lessons`), so planning the same program again compiles only
new plans.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import jax

from autoshard._processes import DEADLINE_S, exchange
from autoshard._shown import shown
from autoshard._tracebacks import users_stacklevel
from autoshard._units import bytes_text, percent_text, ratio_text, time_text
from autoshard.errors import AutoshardError, AutoshardWarning
from autoshard.sharding.audit.aot_compile import missing_compiler
from autoshard.sharding.audit.audit import Audit, AuditError
from autoshard.sharding.audit.verification import compile_target
from autoshard.sharding.autotune.compiled_options import compared_by, failure_text, fits
from autoshard.sharding.autotune.constants import MOST_CLOSE, MOST_TRIES, OVER_LIMIT, POOL_OF_KIND
from autoshard.sharding.autotune.lessons import Lesson, Lessons, lesson_of
from autoshard.sharding.autotune.machine_code import scheduled, with_code
from autoshard.sharding.layout.plan_request import is_request
from autoshard.sharding.plan.memory_doubt import ranked_us, usable_bytes_of
from autoshard.sharding.planner.bound_plan import BoundPlan
from autoshard.sharding.planner.shortlist import without_near_duplicates
from autoshard.sharding.planner.variants import PlannedVariant, fastest, variant_name, variant_table
from autoshard.sharding.search.constants import MOST_KIND_ERROR, MOST_MEMORY_ERROR, SAME_KIND_ERROR
from autoshard.sharding.search.strategy_kinds import kind_of

Replan = Callable[[BoundPlan, str], BoundPlan | None]
OVER = "over the limit"  # the kind of the contender whose estimated memory exceeds the limit


@shown
@dataclass(frozen=True)
class Contender:
    """A plan that may be the fastest.

    Attributes:
        step_us: estimated step time, in microseconds.
        peak_bytes: estimated peak of a device.
        variant: index of its variant among those that were planned.
        strategy: its strategy; None for the plan that was chosen for the variant.
        kind: its kind, see `strategy_kinds`.
    """

    step_us: float
    peak_bytes: float
    variant: int
    strategy: str | None
    kind: str


@shown
@dataclass
class Settling:
    """One comparison of kinds.

    Attributes:
        made: the variants, each with its plan.
        replan: plans the program of a plan again under another strategy; returns None if that raises an error.
        seconds: time for all compilations.
        code: whether the best plan gets machine code (`auto`).
        started: the value of `time.monotonic()` at the start.
        compiled: the plans with their lessons, in the order of compilation. Plans with a known lesson are among them.
        audits: contender -> its last audit, unless the lesson was known.
        failed: for each plan that does not compile or fit, its name and the reason.
    """

    made: Sequence[PlannedVariant]
    replan: Replan
    seconds: float
    code: bool = True
    started: float = field(default_factory=lambda: time.monotonic())
    compiled: list[tuple[Contender, BoundPlan, Lesson]] = field(default_factory=list)
    audits: dict[Contender, Audit] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    @property
    def limit(self) -> float:
        """Memory limit in bytes of one device, the same for all variants."""
        return self.made[0][1].plan.limit_bytes or math.inf

    @property
    def left(self) -> float:
        """Seconds that are left for compilations."""
        return self.seconds - (time.monotonic() - self.started)

    @property
    def best(self) -> tuple[Contender, BoundPlan, Lesson] | None:
        """The fastest compiled plan that fits."""
        fitting = [each for each in self.compiled if each[2].fits(self.limit)]
        return min(fitting, key=lambda each: each[2].step_us, default=None)

    def plan(self) -> BoundPlan:
        """Compile contenders until one is settled as the fastest, and return its plan with notes and its audit."""
        waiting = {kind: list(found) for kind, found in contenders(self.made, self.limit)}
        ahead = fastest(self.made)
        heads = [queue[0] for queue in waiting.values()]
        rivals = [each for each in heads if each.step_us <= (1 + MOST_KIND_ERROR) * ahead.plan.estimate.step_time_us]
        if self.code and len(rivals) < 2 and self._is_certain(ahead):
            return _alone(ahead, heads)
        queues = dict(waiting)
        while True:
            self._settle(queues, waiting)
            self._compare_close(waiting)
            if self.best is None:
                return self._unfit(ahead)
            contender, bound, lesson = self.best
            schedule = self.audits.get(contender) or scheduled(bound.executable, max(self.left, 1.0))
            found, audit = with_code(bound, schedule, self.limit, self.started + self.seconds, self.code)
            if fits(audit, self.limit) or audit.kind == "timeout":
                notes = self._notes(bound, lesson, found, [queue[0] for queue in queues.values()])
                return found.where(notes=(*bound.plan.notes, *notes), audits=(audit,))
            too_large = audit.ok or audit.kind == "oom"
            self._reject(contender, audit, "oom" if too_large else audit.kind)
            left = waiting[contender.kind] if self._tries(contender.kind) < MOST_TRIES else []
            left = [each for each in left if not too_large or each.peak_bytes < contender.peak_bytes]
            if left:
                queues[contender.kind] = left

    def _settle(self, queues: dict[str, list[Contender]], waiting: dict[str, list[Contender]]) -> None:
        """Compile contenders until no other may be faster than the best, or the time is over.

        Args:
            queues: kind -> its contenders, in the order in which they are compiled. Settled kinds are removed.
            waiting: kind -> all its contenders that are not compiled; those that are compiled are removed.
        """
        while queues and self.left > 0:
            kind = min(queues, key=lambda kind: queues[kind][0].step_us)
            if not self._may_win(queues[kind][0]):
                break
            contender = queues[kind][0]
            waiting[kind] = [each for each in waiting[kind] if each is not contender]
            settled = self._compile(contender) or self._tries(kind) >= MOST_TRIES
            queues[kind] = [each for each in waiting[kind] if not settled and each.peak_bytes < contender.peak_bytes]
            if not queues[kind]:
                del queues[kind]

    def _compare_close(self, waiting: dict[str, list[Contender]]) -> None:
        """Compile close plans of the best plan's kind.

        Args:
            waiting: as for `_settle`.
        """
        for _ in range(MOST_CLOSE):
            if self.best is None or self.left <= 0 or self._tries(self.best[0].kind) >= MOST_TRIES:
                break
            best, left = self.best[0], waiting.get(self.best[0].kind, [])
            close = close_plans(best.step_us, left)
            if not close:
                break
            waiting[best.kind] = [each for each in left if each is not close[0]]
            self._compile(close[0])

    def _is_certain(self, bound: BoundPlan) -> bool:
        """Whether a plan fits in any case and moves nothing to the host's memory."""
        here = bound.plan.estimate
        with_error = here.peak_memory_bytes * (1 + MOST_MEMORY_ERROR)
        return bound.plan.fits and with_error <= self.limit and not here.host_traffic_bytes

    def _may_win(self, contender: Contender) -> bool:
        """Whether a contender may be faster than the best compiled plan, within the error of the estimate."""
        if self.best is None:
            return True
        ratios = [math.log(seen.step_us / one.step_us) for one, _, seen in self.compiled if seen.fits(self.limit)]
        expected = contender.step_us * math.exp(sum(ratios) / len(ratios))
        return expected < (1 + MOST_KIND_ERROR) * self.best[2].step_us

    def _tries(self, kind: str) -> int:
        return sum(each.kind == kind for each, *_ in self.compiled)

    def _compile(self, contender: Contender) -> bool:
        """Compile a contender, unless its lesson is known. Return whether it compiles and fits."""
        choice, bound = self.made[contender.variant]
        found = bound if contender.strategy is None else self.replan(bound, contender.strategy)
        if found is None:
            return False
        found = variant_table(found, choice, self.made)
        lessons = Lessons(found)
        lesson = lessons.of(found.plan)
        if lesson is None:
            audit = scheduled(found.executable, max(self.left, 1.0))
            lesson = lesson_of(found.plan, audit)
            lessons.add(found.plan, lesson)
            self.audits[contender] = audit
        if not lesson.fits(self.limit) and contender.kind != OVER:
            message = self.audits[contender].message if contender in self.audits else ""
            reason = failure_text(lesson.kind, message, lesson.peak_bytes, self.limit)
            self.failed.append(f"{variant_name(found.plan)}: {reason}")
        self.compiled.append((contender, found, lesson))
        return lesson.fits(self.limit)

    def _reject(self, rejected: Contender, audit: Audit, kind: str) -> None:
        """Replace the lesson of a plan by the failure of its machine code."""
        n = next(n for n, (contender, *_) in enumerate(self.compiled) if contender is rejected)
        _, bound, lesson = self.compiled[n]
        failed = replace(lesson, kind=kind)
        self.compiled[n] = rejected, bound, failed
        Lessons(bound).add(bound.plan, failed)
        self.audits[rejected] = audit
        reason = failure_text(audit.kind, audit.message, audit.peak_bytes, self.limit)
        self.failed.append(f"{variant_name(bound.plan)}: {reason}")

    def _notes(self, bound: BoundPlan, lesson: Lesson, found: BoundPlan, rest: Sequence[Contender]) -> list[str]:
        """Return the notes on the best plan: what was compiled, `found`'s notes on options, and what is open."""
        notes = [*self._comparison(bound, lesson), *found.plan.notes[len(bound.plan.notes) :], *self._failures()]
        if self.left <= 0 and any(map(self._may_win, rest)):
            open_kinds = ", ".join(each.kind for each in rest if self._may_win(each))
            notes.append(f"the {self.seconds:g} s for compilations are over; not settled: {open_kinds}")
        return notes

    def _unfit(self, ahead: BoundPlan) -> BoundPlan:
        """Return the plan that is the fastest by the estimate, because no compiled plan can be used."""
        notes = [*self._failures(), "no compiled plan can be used; this one is chosen by the estimate"]
        return ahead.where(notes=(*ahead.plan.notes, *notes), audits=tuple(self.audits.values()))

    def _failures(self) -> list[str]:
        return [f"compiled, but not chosen: {text}" for text in self.failed]

    def _comparison(self, bound: BoundPlan, lesson: Lesson) -> list[str]:
        """Return notes on the step times of the plans that were compared, and on the memory of the chosen one."""
        rows = [(variant_name(b.plan), seen.step_us) for _, b, seen in self.compiled if seen.fits(self.limit)]
        listed = ", ".join(f"{name} {time_text(us)} ({ratio_text(us, lesson.step_us)})" for name, us in rows)
        kinds = "the fastest of each kind that may be the best, and close ones of the best kind"
        notes = [f"{compared_by(lesson.until)} for {bound.plan.target}, {kinds}: {listed}"]
        if lesson.peak_bytes > bound.plan.estimate.peak_memory_bytes > self.limit:
            notes.append(f"takes {bytes_text(bound.plan.estimate.peak_memory_bytes)} per device by the estimate and "
                         f"{bytes_text(lesson.peak_bytes)} compiled: XLA rematerializes what does not fit")  # fmt: skip
        return notes


def contenders(made: Sequence[PlannedVariant], limit: float) -> Iterator[tuple[str, list[Contender]]]:
    """Yield each kind of plan with its plans that fit, the best by the estimate first (`memory_doubt`).

    Near duplicates come last.

    The last kind is `OVER`: the fastest plan whose memory is over the limit, but at most `OVER_LIMIT[0]` times the
    limit. It is a contender only if it is faster than all plans that fit.
    """
    every: list[Contender] = []
    for n, (_, bound) in enumerate(made):
        plan = bound.plan
        own = plan.estimate.step_time_us, plan.estimate.peak_memory_bytes
        every.append(Contender(*own, n, None, kind_of(plan.chosen) or "chosen"))
        every += [
            Contender(us, peak, n, strategy, kind_of(strategy))
            for strategy, us, peak in plan.candidates
            if strategy != plan.chosen and is_request(strategy)
        ]
    usable = usable_bytes_of(made[0][1].plan)
    fitting = [each for each in every if each.peak_bytes <= limit]
    kinds: dict[str, list[Contender]] = {}
    for each in sorted(fitting, key=lambda each: ranked_us(each.step_us, each.peak_bytes, usable)):
        kinds.setdefault(each.kind, []).append(each)
    for kind, found in kinds.items():
        rows = without_near_duplicates([(each.step_us, each.peak_bytes, each) for each in found[:POOL_OF_KIND]])
        yield kind, [row[-1] for row in rows]
    fastest_us = min((each.step_us for each in fitting), default=math.inf)
    over = [c for c in every if limit < c.peak_bytes <= OVER_LIMIT[0] * limit and c.step_us < fastest_us]
    if over:
        best = min(over, key=lambda each: each.step_us)
        yield OVER, [Contender(best.step_us, best.peak_bytes, best.variant, best.strategy, OVER)]


def close_plans(best_us: float, plans: Sequence[Contender]) -> list[Contender]:
    """Return the plans of the best plan's kind that may be as fast, within the error of plans of one kind.

    Args:
        best_us: the estimated step time of the best plan, in microseconds.
        plans: other plans of its kind.
    """
    return [each for each in plans if each.step_us <= (1 + SAME_KIND_ERROR) * best_us]


def settled(
    made: Sequence[PlannedVariant], replan: Replan, seconds: float, attached: bool, code: bool = True
) -> BoundPlan:
    """Return the plan that `verify="auto"` or `verify="schedule"` chooses.

    Args:
        made: the variants, each with its plan.
        replan: plans the program of a plan again under another strategy; returns None if that raises an error.
        seconds: time for all compilations.
        attached: whether the plan is for the attached devices. Then process 0 decides for all processes, because clocks
            and files of processes differ.
        code: whether the plan gets machine code (`auto`).
    """
    if not attached or jax.process_count() == 1:
        return _settled_here(made, replan, seconds, code)
    text = ""
    if jax.process_index() == 0:
        chosen = _settled_here(made, replan, seconds, code).plan
        text = json.dumps([chosen.variant, chosen.chosen, chosen.compiler_options, chosen.notes], default=str)
    texts = exchange(f"verify='{'auto' if code else 'schedule'}'", text, DEADLINE_S + 2 * seconds)
    variant, strategy, options, notes = json.loads(texts[0])
    n = next(n for n, (choice, _) in enumerate(made) if json.loads(json.dumps(choice, default=str)) == variant)
    choice, bound = made[n]
    found = bound if bound.plan.chosen == strategy else replan(bound, strategy)
    if found is None:
        raise AutoshardError(
            f"process 0 chose {strategy}, which this process cannot plan; give all processes the same program"
        )
    return variant_table(found, choice, made).where(compiler_options=options, notes=tuple(notes))


def _settled_here(made: Sequence[PlannedVariant], replan: Replan, seconds: float, code: bool) -> BoundPlan:
    """Return the plan that this process chooses; the fastest by the estimate if no compiler supports the target."""
    bound = made[0][1]
    try:
        reason = missing_compiler(compile_target(bound.plan.target).platform)
        if reason is None:
            return Settling(made, replan, seconds, code).plan()
    except AuditError as error:
        reason = str(error)
    warnings.warn(f"auto_shard({bound.plan.function}): the plan is not verified: {reason}", AutoshardWarning,
                  stacklevel=users_stacklevel())  # fmt: skip
    bound = fastest(made)
    return bound.where(notes=(*bound.plan.notes, f"not verified: {reason}"))


def _alone(ahead: BoundPlan, heads: Sequence[Contender]) -> BoundPlan:
    """Return the plan with a note that says why nothing was compiled."""
    here = ahead.plan.estimate.step_time_us
    others = [each for each in heads if each.step_us > here and each.kind != kind_of(ahead.plan.chosen)]
    reason = "there is no plan of another kind that fits. verify=1 compiles this plan"
    if others:
        nearest = min(others, key=lambda each: each.step_us)
        ratio, error = ratio_text(nearest.step_us, here), percent_text(MOST_KIND_ERROR, 1.0)
        reason = (f"by the estimate, the next kind, {nearest.kind}, takes {ratio} the time of this plan, and 9 of 10 "
                  f"such ratios are within {error} of the compiled ones")  # fmt: skip
    return ahead.where(notes=(*ahead.plan.notes, f"verify='auto' compiled nothing: {reason}"))
