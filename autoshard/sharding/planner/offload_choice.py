"""Plans a step with what `offload=` moves to the host, and chooses it for `offload="auto"`.

The trials are, in this order:

    values of the forward pass   the residual first, then named values by bytes; each trial adds one value
    the optimizer's state        alone, then with the values of the first trial, then with those of the last trial

Every value crosses the link twice, so all values save the same number of bytes per microsecond on the link. Values of
the forward pass come first, because they move while both passes compute. The optimizer's state moves during the update,
which is short.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from autoshard._tracebacks import users_stacklevel
from autoshard._units import bytes_text, time_text
from autoshard.errors import AutoshardWarning
from autoshard.sharding.offload.rewriting import Offloader
from autoshard.sharding.offload.words import AUTO, OPTIMIZER, RESIDUAL, NotMovable, Words
from autoshard.sharding.plan.memory_doubt import plan_ranked_us
from autoshard.sharding.plan.sharding_plan import ShardingPlan
from autoshard.sharding.planner.bound_plan import BoundPlan
from autoshard.sharding.planner.constants import MOST_OFFLOADS, MOST_OFFLOADS_IF_FITS, OFFLOAD_MARGIN
from autoshard.sharding.planner.problem import PlanningProblem
from autoshard.sharding.program.tracing import Traced
from autoshard.sharding.search.candidate import Candidate

Planned = tuple[BoundPlan, Sequence[Any]]  # a plan, and the warnings that were raised while it was made


def plan_with_offload(traced: Traced, words: Words, planned: Callable[[Traced], BoundPlan]) -> BoundPlan:
    """Plan a step with the values of these words in host memory.

    Args:
        traced: the step.
        words: the words of `offload=`.
        planned: plans a step that is already rewritten.

    Raises:
        PlanError: the step has no value of a word.
    """
    if not words:
        return planned(traced)
    offloader = Offloader(traced)
    if words == (AUTO,):
        return _automatic(offloader, planned)
    rewritten = offloader.rewritten(words)
    for problem in offloader.problems:
        warnings.warn(f"auto_shard({traced.name}): {problem}", AutoshardWarning, stacklevel=users_stacklevel())
    return planned(rewritten)


def _automatic(offloader: Offloader, planned: Callable[[Traced], BoundPlan]) -> BoundPlan:
    """The plan without offload, unless it does not fit or one with offload is faster by a clear margin."""

    def recorded(words: Words) -> Planned:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            return planned(offloader.rewritten(words)), caught or []

    plain = recorded(())
    fits = plain[0].plan.fits
    trials = trial_words(offloader.sizes)
    trials = _ends(trials, MOST_OFFLOADS_IF_FITS if fits else MOST_OFFLOADS)
    made = []
    for words in trials:
        with suppress(NotMovable):
            made.append(recorded(words))
    bound, caught = _best(plain, made)
    for warning in caught:
        warnings.warn(warning.message, warning.category, stacklevel=users_stacklevel())
    if not made:
        return bound
    rows = [f"{_words_text(one.plan.offload)} {_figures_text(one)}" for one, _ in [plain, *made]]
    note = f"offload='auto' compared {'; '.join(rows)}, and chose {_words_text(bound.plan.offload)}"
    return bound.where(notes=(*bound.plan.notes, note))


def trial_words(sizes: Any) -> list[Words]:
    """The words that `offload="auto"` tries, in order.

    Args:
        sizes: word -> bytes that it moves in one step.
    """
    values = sorted((w for w in sizes if w != OPTIMIZER), key=lambda w: (w != RESIDUAL, -sizes[w], w))
    trials = [tuple(values[: n + 1]) for n in range(len(values))]
    trials = _ends(trials, MOST_OFFLOADS - 3)
    if OPTIMIZER in sizes:
        with_state = [(*words, OPTIMIZER) for words in dict.fromkeys([*trials[:1], *trials[-1:]])]
        trials += [(OPTIMIZER,), *with_state]
    return trials


def _ends(trials: list[Words], count: int) -> list[Words]:
    """At most `count` trials: the first ones and the last."""
    return trials if len(trials) <= count else [*trials[: count - 1], trials[-1]]


def _best(plain: Planned, made: Sequence[Planned]) -> Planned:
    if plain[0].plan.fits:
        most_us = _ranked_us(plain) * (1 - OFFLOAD_MARGIN)
        faster = [one for one in made if one[0].plan.fits and _ranked_us(one) < most_us]
        return min(faster, key=_ranked_us, default=plain)
    fitting = [one for one in made if one[0].plan.fits]
    if fitting:
        return min(fitting, key=_ranked_us)
    within = [one for one in made if one[0].plan.fits_host]
    return min([plain, *within], key=lambda one: one[0].plan.estimate.peak_memory_bytes)


def _ranked_us(one: Planned) -> float:
    return plan_ranked_us(one[0].plan)


def _words_text(words: Any) -> str:
    return "+".join(words) or "none"


def _figures_text(bound: BoundPlan) -> str:
    estimate = bound.plan.estimate
    return f"({time_text(estimate.step_time_us)}, {bytes_text(estimate.peak_memory_bytes)})"


def host_memory_notes(best: Candidate) -> list[str]:
    """A note if the values of a plan take more of the host's memory than its devices may use."""
    if best.fits_host:
        return []
    return [
        f"each device keeps {bytes_text(best.host_bytes)} in the host's memory, more than the limit of "
        f"{bytes_text(best.host_limit)}: offload fewer values, recompute some, or shard over more devices"
    ]


def warn_of_host_memory(name: str, plan: ShardingPlan) -> None:
    """Warn of a plan whose values take more of the host's memory than its devices may use."""
    if not plan.fits_host:
        warnings.warn(
            f"auto_shard({name}): plan {plan.chosen} keeps {bytes_text(plan.estimate.host_memory_bytes)} of each "
            f"device in the host's memory, more than the limit of {bytes_text(plan.host_limit_bytes)}. Offload fewer "
            "values, recompute some, or plan for more devices",
            AutoshardWarning,
            stacklevel=users_stacklevel(),
        )


def offload_notes(problem: PlanningProblem) -> list[str]:
    """What the reader of a plan with offload should know."""
    moved, target = problem.traced.offloaded, problem.machine.target
    if not moved:
        return []
    rows = ", ".join(f"{word} {bytes_text(size)}" for word, size in moved.items())
    notes = [f"moved to host memory in each step, before sharding: {rows}"]
    if not target.chip.host_bandwidth:
        notes.append(f"the bandwidth between {target.name} and its host is unknown; the estimate omits transfers")
    if target.platform in ("gpu", "cuda"):
        notes.append(
            "on GPUs XLA once computed wrong losses with pipelined host transfers. With JAX 0.11.2 on an H200, losses "
            "and gradients were right; with other versions, compare the loss of some steps with offload='none'"
        )
    return notes
