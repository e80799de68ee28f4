"""Plan public models for pods, and write a page for each.

    python benchmarks/gallery.py                              plan all models for all machines, then write the pages
    python benchmarks/gallery.py llama3.1-8b --target v5p:4x8x8 --schedule
    python benchmarks/gallery.py llama3.1-8b --target v5p:4x8x8 --compile
    python benchmarks/gallery.py --pages                      write the pages from the stored figures

Every machine has 256 chips, and every chip the same share of the batch (`gallery_models.py`). The planner chooses the
strategy, the rematerialization, the values on the host and the microbatches. With `--compile` the plan is compiled by
the machine's own compiler, without the machine, and `estimate.py` judges the program. With `--schedule` no machine code
is made: a plan takes seconds instead of minutes, and is judged by the roofline only. Compilers for GPUs do not stop at
the schedule and state no cycles, so both options compile, and the roofline judges; this needs the extra `aot-cuda`. A
stored figure stays until the plan changes. Results are stored in `results/gallery.json` after each plan, pages in
`docs/gallery/`.

The MFU counts the products of one step without rematerialization, divided by the step time and the chips' peak.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import common
import optax
from gallery_models import MODELS, TARGETS, command, gallery_workload
from gallery_pages import write_pages
from plan_rows import Store
from plan_sides import Side, side_of, unless_impossible, with_compiled

from autoshard import plan
from autoshard.models.workloads import Workload
from autoshard.sharding.audit.aot_compile import Until
from autoshard.sharding.machines.targets import find_target
from autoshard.train.program import model_flops
from autoshard.train.program.build import workload_variants
from autoshard.train.program.workload_search import workload_search
from autoshard.train.step.train_state import make_program

STORED = common.RESULTS / "gallery.json"
FOLDER = common.RESULTS / "gallery"
TIMEOUT_S = 600.0  # chosen: seconds after which a compiler is stopped
LEFT_OUT = ("parameter:", "optimizer:", "data:", "activations")  # beginnings of paragraphs of a plan's text


def step_flops(work: Workload) -> float:
    """Return the FLOPs of the products of a training step on a TPU, without rematerialization."""
    return model_flops.step_flops(make_program(work.build, optax.identity()), work.batch(), platform="tpu")


def shown_text(text: str) -> str:
    """Return what a page shows of a plan's text: all but the paragraphs about single arrays."""
    return "\n\n".join(part for part in text.split("\n\n") if not part.startswith(LEFT_OUT))


def planned(model: str, target: str, until: Until | None, timeout_s: float) -> dict[str, Any]:
    """Plan a model for a machine, compile the plan up to `until`, if given, and return the cell of the gallery."""
    work, since, made = gallery_workload(model, target), time.process_time(), None
    side = Side()
    with unless_impossible() as outcome:
        search = workload_search(work, {"target": target})
        made = plan(*workload_variants(work), target=target, variants=search, donate_argnums=0)
        side = side_of(made, **made.variant)
    if made is None:
        side = Side(problem=outcome.problem)
    planning_s = time.process_time() - since
    if until is not None:
        store = Store(f"{model}-{target.replace(':', '-')}", target, FOLDER, timeout_s, until)
        side = with_compiled(side, made, store, "plan", None)
    machine = find_target(target)
    peak = machine.devices * machine.chip.flops
    return asdict(side) | {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "jax": version("jax"),
        "batch_size": work.batch_size,
        "context": getattr(work.config, "context", None),
        "command": command(work, target),
        "planning_cpu_seconds": round(planning_s, 1),
        "least_seconds": step_flops(work) / peak,
        "options": {} if made is None else dict(made.compiler_options.get(machine.platform, {})),
        "text": [] if made is None else shown_text(str(made)).splitlines(),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"default: all of {', '.join(MODELS)}")
    parser.add_argument("--target", nargs="+", default=list(TARGETS), help="default: %(default)s")
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--compile", action="store_true", help="compile the plans too")
    extent.add_argument("--schedule", action="store_true", help="the same without machine code; judge by the roofline")
    parser.add_argument("--missing", action="store_true", help="plan only what is not stored")
    parser.add_argument("--pages", action="store_true", help="plan nothing; write the pages")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds after which a compiler is stopped")
    given = parser.parse_args(arguments)
    if unknown := [each for each in given.models if each not in MODELS]:
        parser.error(f"unknown model {unknown[0]!r}; the gallery has {', '.join(MODELS)}")
    cells: dict[str, dict[str, Any]] = json.loads(STORED.read_text()) if STORED.exists() else {}
    for target in [] if given.pages else given.target:
        for model in given.models or MODELS:
            stored = cells.get(model, {}).get(target)
            if given.missing and stored is not None:
                continue
            compiled = given.compile or (given.schedule and find_target(target).platform != "tpu")
            until: Until | None = "code" if compiled else "schedule" if given.schedule else None
            found = planned(model, target, until, given.timeout)
            if stored is not None and found["compiled"] is None and _same_plan(found, stored):
                found["compiled"] = stored["compiled"]
            row = cells.get(model, {}) | {target: found}
            cells[model] = {each: row[each] for each in (*TARGETS, *row) if each in row}
            cells = {each: cells[each] for each in (*MODELS, *cells) if each in cells}
            print(f"{model} {target}: {found['words'] or found['problem'][:100]}, {found['planning_cpu_seconds']} s")
            sys.stdout.flush()
            STORED.write_text(json.dumps(cells, indent=1) + "\n")
    write_pages(cells)


def _same_plan(found: dict[str, Any], stored: dict[str, Any]) -> bool:
    names = ("words", "remat", "microbatches", "batch_size", "context")
    compiled = stored["compiled"]
    alike = compiled is None or compiled["options"] == found["options"]
    return alike and all(found[name] == stored[name] for name in names)


if __name__ == "__main__":
    main()
