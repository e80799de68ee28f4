"""Compare the planner with an expert's plans and with common practice, compiled for the same machine.

    python benchmarks/bench_plans.py [CASE ...] [--quick] [--few 4] [--minutes 30] [--schedule] [--figures]

For each case, these programs are compiled:

    expert     the grid `expert_plans.styles` x remat x microbatches, in the order of lower bounds (`rooflines`), until
               the next bound exceeds the fastest time so far. Programs that cannot fit are left out. Experts have the
               kernels of the machine in the planner's blocks, and what the planner's candidates keep and offload beside
               their own policies
    planner    its best variant by its own estimate, and the best of its candidates by the compiler (`verify=3`)
    options    the best program of both, under every option set
    today      common practice, under the expert's remat, microbatches and options

`estimate.py` gives the times. All rows are stored in `results/plans/CASE.json`, in place of an earlier run's; a program
in the compiler's cache is not compiled again. `--quick` compiles four cases and only the first programs of their grids,
and reports how many it left out. `--few N` ranks the grid by the planner's estimate of the same strategies instead,
compiles the first N programs of both sides, one by one, and leaves out mixes of policies, `options` and `today`.

With `--schedule`, the compiler stops before machine code (`compile_job`). A program then takes seconds instead of
minutes and is judged by the roofline only. The order of two programs can differ from that by machine code: with ViT-L,
2 microbatches are faster by the roofline, and 4 by cycles. Each file lists the measures of its rows. Programs of
different measures are never compared.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import common  # noqa: F401  sets up the path and the devices first
from estimate import find_target
from expert_plans import CASES, OPTION_SETS, Case, Style, styles, today
from expert_ranking import most_promising
from expert_step import expert_step, planned_blocks
from plan_figures import show
from plan_rows import Planned, Row, Store, add_schedule_option, best, requested_until
from rooflines import bound

from autoshard import plan
from autoshard.errors import AutoshardError
from autoshard.sharding.audit import CompileJob
from autoshard.sharding.audit.export import export, export_plan
from autoshard.sharding.autotune.selection import requested_selection
from autoshard.sharding.machines.device_mesh import traced_machine
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.sharding.planner.variants import Attempt, variant_rounds
from autoshard.train.program.build import (
    remat_unit_count,
    variant_search,
    workload_step,
    workload_variants,
)
from autoshard.train.program.constants import REMATS
from autoshard.train.program.workload_search import workload_search

QUICK = ("gpt-1.3b", "llama2-7b-2k", "moe-2.4b", "vit-l16")
QUICK_PROGRAMS, CANDIDATES = 4, 3  # programs of a quick grid, candidates as with verify=3
SPARE = 4  # chosen: so many times `--few` programs are ranked, because some may not fit


def export_expert(case: Case, style: Style, remat: str, microbatches: int, options: Mapping[str, str]) -> CompileJob:
    """Export an expert's step for the compiler."""
    platform = "cuda" if find_target(case.target).gpu else "tpu"
    with planned_blocks(case.target):
        made = expert_step(case.variant(remat), style, microbatches, traced_machine(None, case.target))
        program = export(made.fn, made.avals, made.in_shardings, made.out_shardings, platform)
    return CompileJob(program, platform, case.target, made.mesh, tuple(range(case.devices)), made.donated, options)


def grid(case: Case, more: Sequence[tuple[str, int]] = ()) -> tuple[list[Planned], list[dict[str, Any]]]:
    """Return the expert's programs in the order of their bounds, and those that cannot fit.

    Args:
        case: the case.
        more: remat and microbatches to try beside those of the case.
    """
    limit = find_target(case.target).chip.memory_bytes
    found, pruned = [], []
    for style in styles(case):
        for remat, microbatches in dict.fromkeys([*case.variants, *more]):
            if case.work.batch_size // microbatches % style.ways(style.batch):
                continue
            low = bound(case, style, remat, microbatches)
            made = partial(export_expert, case, style, remat, microbatches)
            one = Planned(
                "expert", style.name, style.words, remat, microbatches, made, bound=low.seconds,
                family=(style.sizes[2:], style.sequence), least_bytes=low.memory,
            )  # fmt: skip
            if low.memory > limit:
                pruned.append(_pruned(one, f"at least {low.memory / 2**30:.1f} GiB"))
            else:
                found.append((low, one))
    # Bounds within 5 % of each other count as equal. Of those, the program that sends least comes first.
    least = min((low.seconds for low, _ in found), default=1.0)
    found.sort(key=lambda pair: (int(pair[0].seconds / least * 20), pair[0].wire))
    return _leanest_first([one for _, one in found]), pruned


def _leanest_first(ordered: Sequence[Planned]) -> list[Planned]:
    """Move the program with the least state before the others with equal activations: if it does not fit, none does."""
    leanest: dict[Any, Planned] = {}
    for one in ordered:
        key = one.family, one.remat, one.microbatches
        if key not in leanest or one.least_bytes < leanest[key].least_bytes:
            leanest[key] = one
    found: dict[int, Planned] = {}
    for one in ordered:
        for each in (leanest[one.family, one.remat, one.microbatches], one):
            found.setdefault(id(each), each)
    return list(found.values())


def run_experts(case: Case, store: Store, clock: Clock, programs: int | None, few: int | None = None) -> None:
    """Compile the grid, until no bound is below the fastest time.

    Args:
        case: the case.
        store: its rows. Those of the planner say what the expert tries beside the case's own variants.
        clock: when to stop.
        programs: the number of programs that compile, after which it ends; None for all.
        few: the number of programs that compile, in the order of the planner's estimate; None for all.
    """
    planners = [(row.remat, row.microbatches) for row in store.rows if row.side == "plan"]
    remaining, pruned = grid(case, planners)
    if few is not None:
        programs, chosen = few, most_promising(case, remaining, SPARE * few)
        pruned += [_pruned(one, "not among the best by estimate") for one in remaining if one not in chosen]
        remaining = chosen
    options, reached = OPTION_SETS[case.target.partition(":")[0]][0], 0
    failed: list[Planned] = []
    while remaining:
        done = [row for row in store.rows if row.side == "expert" and row.ok]
        fastest = min((row.step["roofline"] for row in done), default=float("inf"))
        batch: list[Planned] = []
        while remaining and len(batch) < store.at_once:
            one = remaining.pop(0)
            if one.bound >= fastest:
                pruned.append(_pruned(one, f"at least {one.bound * 1e3:.0f} ms"))
            elif any(_needs_at_least_as_much(one, other) for other in failed):
                pruned.append(_pruned(one, "needs more memory than one that did not fit"))
            else:
                batch.append(one)
        if not batch or clock.over or (programs is not None and reached >= programs):
            pruned += [_pruned(one, "not reached") for one in [*batch, *remaining]]
            break
        rows = compile_all(store, [(one, options) for one in batch])
        failed += [one for one, row in zip(batch, rows, strict=True) if row.too_large]
        reached += sum(row.ok for row in rows)
    store.pruned = pruned
    store.save()
    if few is not None:
        return
    run_mixed_remat(case, store, clock)
    run_options(case, store, "expert", clock)


def run_mixed_remat(case: Case, store: Store, clock: Clock) -> None:
    """Compile the expert's best program with mixes of two remat policies over the layers, as the planner tries them."""
    options = OPTION_SETS[case.target.partition(":")[0]][0]
    winner = best([row for row in store.rows if row.side == "expert" and row.options == options])
    if winner is None or winner.remat not in REMATS:
        return
    style, parts = next(s for s in styles(case) if s.name == winner.style), winner.microbatches
    lighter = REMATS[: REMATS.index(winner.remat)][-1:]
    search = variant_search(
        {"remat": [*lighter, winner.remat], "microbatches": [parts]}, remat_unit_count(case.work.config)
    )
    attempts: list[Attempt] = []
    for choice in itertools.chain.from_iterable(variant_rounds(search, attempts)):
        if clock.over:
            return
        remat = choice["remat"]
        made = partial(export_expert, case, style, remat, parts)
        one = Planned("expert", style.name, style.words, remat, parts, made)
        row = winner if remat == winner.remat else compile_all(store, [(one, options)])[0]
        attempts.append(Attempt(choice, row.ok, row.seconds, row.needed_bytes or math.inf, row.limit_bytes))


def _needs_at_least_as_much(one: Planned, other: Planned) -> bool:
    """Whether a program needs at least another's memory: no less state, no more microbatches, no stricter remat."""
    order = ("full", "dots", "none")
    known = one.remat in order and other.remat in order
    more = order.index(one.remat) >= order.index(other.remat) if known else one.remat == other.remat
    more = more and one.microbatches <= other.microbatches
    return one.family == other.family and one.least_bytes >= other.least_bytes and more


def _pruned(one: Planned, why: str) -> dict[str, Any]:
    return {"style": one.style, "remat": one.remat, "microbatches": one.microbatches, "why": why}


def run_planner(case: Case, store: Store, clock: Clock, few: int | None = None) -> None:
    """Compile the planner's best variant, and the best of its candidates by the compiler; with `few`, only so many."""
    found, seconds = candidates(case)
    found = found[:few]
    options = OPTION_SETS[case.target.partition(":")[0]][0]
    store.notes["planning_seconds"] = round(seconds, 1)
    if not found:
        store.notes["planner"] = "nothing fits"
        return
    store.notes["chosen"] = found[0].style + ", " + found[0].remat + f", {found[0].microbatches}"
    compile_all(store, [(one, options) for one in found])
    if few is None:
        run_options(case, store, "plan", clock)


def candidates(case: Case) -> tuple[list[Planned], float]:
    """Return the candidates over all variants that `verify` would compile, and the seconds it took to plan them.

    The best by the planner's estimate come first, then faster ones whose estimate exceeds the memory slightly.
    """
    start, found, beyond = time.perf_counter(), [], []
    shortlist = requested_selection({"verify": CANDIDATES}, variants=False).shortlist
    assert shortlist is not None
    search = workload_search(case.work, {"target": case.target})
    step, state, batch = workload_variants(case.work)
    limit = find_target(case.target).chip.memory_bytes
    try:
        variants = plan(step, state, batch, target=case.target, variants=search, donate_argnums=0).variants
    except AutoshardError as error:
        print(f"{case.name}: {error}", file=sys.stderr)
        variants = ()
    seconds = time.perf_counter() - start
    for choice, _, _, peak in variants:
        most = max(shortlist.over) * limit
        if peak <= most:
            how = choice["remat"], choice["microbatches"]
            made = planned(case, *how, limit_bytes=None if peak <= limit else most)
            found += [(c, *how) for c in [c for c in made.candidates if c[2] <= limit][:CANDIDATES]]
            beyond += [(time_us, peak, (words, time_us, peak), *how) for words, time_us, peak in made.candidates]
    found.sort(key=lambda each: each[0][1])
    extra = [each[2:] for each in shortlist.beyond(beyond, limit, found[0][0][1] if found else math.inf)]
    return [_candidate(case, *each) for each in [*found[:CANDIDATES], *extra]], seconds


def _candidate(case: Case, candidate: tuple[str, float, float], remat: str, microbatches: int) -> Planned:
    words = candidate[0]
    made = partial(export_ours, case, words, remat, microbatches)
    return Planned("plan", words, words, remat, microbatches, made, {"step": candidate[1] / 1e6})


@lru_cache(maxsize=32)  # each option set exports the plan, and `predict` reads its estimate
def planned(
    case: Case, remat: str, microbatches: int, words: str | None = None, limit_bytes: float | None = None
) -> Any:
    """Plan a variant with the strategy `words`, or search for the best plan."""
    made = workload_step(case.variant(remat), microbatches)
    return plan(*made, target=case.target, plan=words, donate_argnums=0, memory_limit_bytes=limit_bytes)


def export_ours(case: Case, words: str, remat: str, microbatches: int, options: Mapping[str, str]) -> CompileJob:
    """Export one of the planner's plans for the compiler."""
    return export_plan(bound_or_error(planned(case, remat, microbatches, words).bound).executable, options)


def run_options(case: Case, store: Store, side: str, clock: Clock) -> None:
    """Compile the best program of one side under the other option sets."""
    first, *others = OPTION_SETS[case.target.partition(":")[0]]
    winner = best([row for row in store.rows if row.side == side and row.options == first])
    if winner is None or clock.over:
        return
    for options in others:
        compile_all(store, [(_again(case, winner), options)])


def _again(case: Case, row: Row) -> Planned:
    if row.side == "plan":
        made: Any = partial(export_ours, case, row.words, row.remat, row.microbatches)
    else:
        style = next(s for s in [*styles(case), today(case)] if s.name == row.style)
        made = partial(export_expert, case, style, row.remat, row.microbatches)
    return Planned(row.side, row.style, row.words, row.remat, row.microbatches, made, row.predicted, row.bound)


def run_today(case: Case, store: Store) -> None:
    """Compile common practice, under the remat, microbatches and options of the expert's best."""
    winner = best([row for row in store.rows if row.side == "expert"])
    if winner is None:
        return
    style, rows = today(case), case.work.batch_size // winner.microbatches
    if rows % style.ways(style.batch):
        store.notes["today"] = f"not possible: {rows} rows over {style.ways(style.batch)} devices"
        store.save()
        return
    made = partial(export_expert, case, style, winner.remat, winner.microbatches)
    compile_all(store, [(Planned("today", "today", "", winner.remat, winner.microbatches, made), winner.options)])


def predict(case: Case, store: Store) -> None:
    """Add the planner's estimate to every row. An expert's plan is estimated if the planner has a strategy for it."""
    known: dict[Any, Mapping[str, float]] = {}
    for index, row in enumerate(store.rows):
        if not row.words:
            continue
        key = row.words, row.remat, row.microbatches
        if key not in known:
            try:
                made = planned(case, row.remat, row.microbatches, row.words)
            except AutoshardError as error:
                print(f"{case.name}, {key}: {error}", file=sys.stderr)
                known[key] = {}
            else:
                found = made.estimate
                known[key] = {
                    "step": found.step_time_us / 1e6,
                    "compute": found.compute_us / 1e6,
                    "wire_bytes": found.comm_bytes,
                    "memory_bytes": found.peak_memory_bytes,
                }
        store.rows[index] = replace(row, predicted=known[key])
    store.save()


def compile_all(store: Store, jobs: Sequence[tuple[Planned, Mapping[str, str]]]) -> list[Row]:
    """Compile programs, `store.at_once` at once. They are exported one by one, because tracing is not thread-safe."""
    exported = [(one, options, one.export(options)) for one, options in jobs]
    with ThreadPoolExecutor(store.at_once) as pool:
        rows = list(pool.map(lambda job: store.finish(*job), exported))
    for row in rows:
        outcome = f"{row.seconds * 1e3:.0f} ms" if row.ok else "does not fit" if row.too_large else row.kind
        print(
            f"  {row.side}: {row.name}: {outcome} ({'cached' if row.cached else f'{row.compile_seconds:.0f} s'})",
            flush=True,
        )
    return rows


class Clock:
    """The time limit of a run."""

    def __init__(self, minutes: float):
        self.end = time.monotonic() + 60 * minutes

    @property
    def over(self) -> bool:
        """Whether nothing new should be started."""
        return time.monotonic() > self.end


def main() -> None:
    """Run the cases of the command line."""
    arguments = _parser().parse_args()
    names = arguments.cases or (QUICK if arguments.quick else list(CASES))
    for done, name in enumerate([] if arguments.figures else names):
        case, left = CASES[name], len(names) - done
        clock = Clock(arguments.minutes / len(names) if arguments.quick else arguments.minutes / left)
        store = Store(name, case.target, until=requested_until(arguments))
        print(f"{name} on {case.target}", flush=True)
        if not arguments.predict:
            store.begin()
            store.at_once = 1 if arguments.few else store.at_once
            run_planner(case, store, clock, arguments.few)
            run_experts(case, store, clock, QUICK_PROGRAMS if arguments.quick else None, arguments.few)
            if arguments.few is None:
                run_today(case, store)
        predict(case, store)
    show([Store(name, CASES[name].target) for name in names])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="cases to run; default: all")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}, and the start of their grids")
    parser.add_argument("--few", type=int, help="programs of each side to compile, by the planner's estimate")
    parser.add_argument("--minutes", type=float, default=30.0, help="time after which no compilation starts")
    add_schedule_option(parser)
    parser.add_argument("--predict", action="store_true", help="renew the estimates of stored rows, compile nothing")
    parser.add_argument("--figures", action="store_true", help="print the figures of stored rows, compile nothing")
    return parser


if __name__ == "__main__":
    main()
