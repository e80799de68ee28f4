"""Compare the planner with an expert on the programs of the corpus, compiled for the same machines.

    python benchmarks/bench_formulations.py [NAME ...] [--few 3] [--kinds N] [--held-out | --open]
                                             [--schedule] [--missing] [--show | --predict]

For each program of `formulations/` on each of its machines, these are compiled and judged by `estimate.py`:

    expert   of the grid `expert_plans.style_grid`, the first `--few` programs by the planner's estimate of the same
             strategies, and the fastest of each kind: data, fsdp, tensor, experts. An expert's program has
             the kernels that the planner inserts
    plan     the planner's choice, and the fastest of each other kind that it priced

With `--schedule`, the compiler stops before machine code (`compile_job`). A program then takes seconds instead of
minutes. It is judged by the roofline only, and it has no audit. `--missing` skips programs with stored rows.
`--kinds N` compiles only the N fastest kinds by the estimate on each side. `--predict` computes the estimates of stored
rows again and compiles nothing.

The rows are stored in `results/formulations/NAME@TARGET.json`. A program in the compiler's cache is not compiled again.
The figures are the compiled step over the best expert's, the error of the prediction, and the regret: the chosen plan
over the best of the planner's compiled ones. The audit of the chosen plan lists unplanned collectives and involuntary
rematerializations, each with its cause. Idle devices are listed, too.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import common  # sets up the path and the devices first
from corpus_experts import corpus_step, corpus_styles, most_promising
from corpus_figures import show
from estimate_report import short_source
from expert_plans import Style, device_count
from formulations.corpus import CORPUS
from formulations.formulation import Formulation
from plan_rows import Planned, Store, add_schedule_option, requested_until

from autoshard import Plan, plan
from autoshard.errors import AutoshardError
from autoshard.sharding.audit import Audit, CompileJob, export_plan
from autoshard.sharding.audit.aot_compile import Until
from autoshard.sharding.audit.export import export
from autoshard.sharding.autotune.constants import MOST_CLOSE
from autoshard.sharding.autotune.settling import close_plans, contenders
from autoshard.sharding.machines.device_mesh import traced_machine
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.sharding.planner.notes.idle_devices import IDLE_DEVICES
from autoshard.sharding.search.strategy_kinds import KINDS, kind_of

FOLDER = common.RESULTS / "formulations"
Options = Mapping[str, str]
# Both chosen, not measured.
TIMEOUT_S = 1200.0  # seconds after which a compiler is stopped
LEAST_SHARE = 0.01  # of a program's traffic: smaller unplanned collectives are not listed


def store_of(formulation: Formulation, target: str, timeout_s: float = TIMEOUT_S, until: Until = "code") -> Store:
    """Return the rows of a program on a machine."""
    return Store(f"{formulation.name}@{target.replace(':', '-')}", target, FOLDER, timeout_s, until)


def run(formulation: Formulation, target: str, few: int, kinds: int, store: Store) -> None:
    """Compile and store the rows of a program on a machine."""
    store.begin()
    store.notes = {"style": formulation.style, "held_out": formulation.held_out}
    start = time.process_time()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = _made(formulation, target)
        idle = [str(each.message) for each in caught if re.match(IDLE_DEVICES, str(each.message))]
    except AutoshardError as error:
        store.notes["planner"] = str(error)
        store.save()
        print(f"{store.case}: {error}", flush=True)
        return
    store.notes |= {"planning_seconds": round(time.process_time() - start, 1), "chosen": made.chosen}
    store.notes["idle"] = idle
    given = made.compiler_options.get(find_target(target).platform, {})
    options = {name: str(value).lower() for name, value in given.items()}
    for one in [*_planned(formulation, target, made, kinds), *_experts(formulation, target, few, kinds)]:
        row = store.finish(one, options, one.export(options))
        print(f"{store.case}: {row.side} {row.style}: {row.kind} {row.seconds:.4f} s", flush=True)
    if store.until == "code":
        store.notes["audit"] = audited(made.verify(options=options, timeout_s=store.timeout_s))
    store.save()


def predict(formulation: Formulation, target: str, store: Store) -> None:
    """Renew the estimates of stored rows; those whose words are not possible any more keep theirs."""
    styles = corpus_styles(formulation, target)
    of_experts = {style.name: price for style, price in most_promising(formulation, target, styles, math.inf)}
    for index, row in enumerate(store.rows):
        if row.side == "expert":
            price = of_experts.get(row.style)
        else:
            try:
                price = _made(formulation, target, row.words).estimate
            except AutoshardError as error:
                print(f"{store.case}, {row.words}: {error}", file=sys.stderr)
                continue
        if price is not None:
            figures = {"step": price.step_time_us / 1e6, "memory_bytes": price.peak_memory_bytes}
            store.rows[index] = replace(row, predicted={**row.predicted, **figures})
    store.save()


def audited(audit: Audit) -> dict[str, Any]:
    """Return the unplanned collectives and the rematerializations of a compiled plan, with their causes.

    The share of unplanned traffic includes collectives below `LEAST_SHARE` of the traffic, which are not listed.
    """
    wire = audit.wire_bytes or 0.0
    listed = [each for each in audit.unplanned if each.bytes > LEAST_SHARE * wire]
    return {
        "kind": audit.kind,
        "unplanned_share": round(audit.unplanned_bytes / wire, 4) if wire else 0.0,
        "unplanned": [
            f"{each.kind} {each.bytes / 2**20:.1f} MiB {short_source(each.line)}: {each.cause}" for each in listed
        ],
        "rematerializations": [
            f"{each.array} {short_source(each.line) or each.op_name}: {each.cause}" for each in audit.remarks
        ],
    }


def _made(formulation: Formulation, target: str, words: str | None = None) -> Plan:
    program = formulation.program(target)
    state, batch = program.shapes()
    return plan(program.step, state, *batch, target=target, donate_argnums=0, plan=words, kernels="auto")


def _planned(formulation: Formulation, target: str, made: Plan, kinds: int) -> list[Planned]:
    """Return the plans to compile: the planner's choice, the fastest plans of other kinds, and close plans.

    There are at most `kinds` kinds. The close plans are those of the kind of the choice that `verify="auto"` compiles.
    """
    best = sorted(made.best_of_kinds().values(), key=lambda each: (each.strategy != made.chosen, each.step_time_us))
    estimates = {each.strategy: (each.step_time_us, each.peak_bytes) for each in best[:kinds]}
    estimates[made.chosen] = made.estimate.step_time_us, made.estimate.peak_memory_bytes
    by_kind = dict(contenders([({}, bound_or_error(made.bound))], made.limit_bytes or math.inf))
    others = [each for each in by_kind.get(kind_of(made.chosen), []) if each.strategy]
    for each in close_plans(made.estimate.step_time_us, others)[:MOST_CLOSE]:
        estimates.setdefault(each.strategy or made.chosen, (each.step_us, each.peak_bytes))
    return [
        Planned("plan", words, words, "own", 1, partial(_export_ours, formulation, target, words),
                {"step": time_us / 1e6, "memory_bytes": peak})
        for words, (time_us, peak) in estimates.items()
    ]  # fmt: skip


def _export_ours(formulation: Formulation, target: str, words: str, options: Options) -> CompileJob:
    return export_plan(bound_or_error(_made(formulation, target, words).bound).executable, options)


def _experts(formulation: Formulation, target: str, few: int, kinds: int) -> list[Planned]:
    """Return the most promising programs of an expert, and the most promising of each of the first `kinds` kinds."""
    ranked = most_promising(formulation, target, corpus_styles(formulation, target))
    first = {kind_of(style.words): number for number, (style, _) in reversed([*enumerate(ranked)])}
    chosen = ranked[:few] + [ranked[number] for number in sorted(first.values())[:kinds]]
    return [
        Planned("expert", style.name, style.words, "own", 1, partial(_export_expert, formulation, target, style),
                {"step": price.step_time_us / 1e6, "memory_bytes": price.peak_memory_bytes})
        for style, price in dict(chosen).items()
    ]  # fmt: skip


def _export_expert(formulation: Formulation, target: str, style: Style, options: Options) -> CompileJob:
    made = corpus_step(formulation, target, style, traced_machine(None, target))
    program = export(made.fn, made.avals, made.in_shardings, made.out_shardings, "tpu")
    devices = tuple(range(device_count(target)))
    return CompileJob(program, "tpu", target, made.mesh, devices, made.donated, options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile the requested programs, store their rows, and print their figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs; default: all")
    parser.add_argument("--few", type=int, default=3, help="programs of an expert's grid to compile")
    parser.add_argument("--kinds", type=int, default=len(KINDS), help="kinds of strategies to compile on each side")
    parser.add_argument("--target", help="one machine only")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds after which a compiler is stopped")
    add_schedule_option(parser)
    parser.add_argument("--missing", action="store_true", help="only programs without stored rows")
    half = parser.add_mutually_exclusive_group()
    half.add_argument("--held-out", action="store_true", help="only programs that were not used to develop the planner")
    half.add_argument("--open", action="store_true", help="only programs that were used to develop the planner")
    stored = parser.add_mutually_exclusive_group()
    stored.add_argument("--show", action="store_true", help="print the stored rows only")
    stored.add_argument("--predict", action="store_true", help="renew the estimates of stored rows, compile nothing")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.names if name not in CORPUS]:
        parser.error(f"unknown program {unknown[0]!r}; choose from {', '.join(CORPUS)}")
    wanted = [
        (CORPUS[name], target)
        for name in given.names or CORPUS
        for target in CORPUS[name].targets
        if given.target in (None, target)
        and not (given.held_out and not CORPUS[name].held_out)
        and not (given.open and CORPUS[name].held_out)
    ]
    for formulation, target in wanted if not given.show else ():
        if not given.predict:
            store = store_of(formulation, target, given.timeout, requested_until(given))
            if not (given.missing and store.path.exists()):
                run(formulation, target, given.few, given.kinds, store)
        elif (store := store_of(formulation, target)).path.exists():
            predict(formulation, target, store)
    stores = [store_of(formulation, target) for formulation, target in wanted]
    show([store for store in stores if store.path.exists()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
