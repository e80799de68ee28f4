"""Golden plans: summaries of plans, stored so that a change of a plan is a readable diff.

There is a file for each case of the benchmark. It holds the plan's strategy, variant, mesh and axes, the sharding of
each group of equal inputs, the traffic over each mesh axis, and time and memory to three digits. Different JAX versions
trace different equations for the same step, so times are those of the JAX in requirements.lock for Python 3.11.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from autoshard import Plan, plan
from autoshard._units import bytes_text, spec_text, time_text
from autoshard.sharding.report.summary import groups_by_role, mesh_sizes
from autoshard.train.program.build import workload_step, workload_variants
from autoshard.train.program.workload_search import workload_search

FOLDER = Path(__file__).resolve().parent / "plans"
ROOT = FOLDER.parent.parent.parent
BENCHMARKS = ROOT / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))

from expert_plans import CASES, Case  # noqa: E402

__all__ = ["CASES", "Case", "best_variant", "is_locked_jax", "planned", "stored", "summary", "text", "variant_rows"]


@cache
def planned(name: str, remat: str, microbatches: int) -> Plan:
    """Plans a case's step for a variant."""
    case = CASES[name]
    step, state, batch = workload_step(case.variant(remat), microbatches)
    return plan(step, state, batch, target=case.target, donate_argnums=0)


def summary(plan: Plan, variant: Sequence[Any]) -> dict[str, Any]:
    """Summarises a plan as the contents of its golden file."""
    estimate = plan.estimate
    return {
        "target": plan.target,
        "variant": list(variant),
        "words": plan.chosen,
        "fits": plan.fits,
        "mesh": mesh_sizes(plan),
        "laid": {a: " ".join(f"{d}:{n}/{s}" for d, n, s in where) for a, where in plan.placing.items()},
        "cuts": {axis: ", ".join(names) for axis, names in plan.axis_rules.items()},
        "storage": {role: ", ".join(axes) for role, axes in plan.storage.items()},
        "sizes": {name: size for name, size in plan.axis_sizes.items() if "/" not in name},
        "inputs": _inputs(plan),
        "traffic": _traffic(plan),
        "time": {
            "step": time_text(estimate.step_time_us),
            "compute": time_text(estimate.compute_us),
            "communication": time_text(estimate.comm_us),
        },
        "memory": {"peak": bytes_text(estimate.peak_memory_bytes)}
        | {kind: bytes_text(size) for kind, size in estimate.memory_bytes.items() if size >= 2**20},
        "notes": [*plan.notes, *(f"{p.axis} {p.size} padded to {p.padded}: {p.words}" for p in plan.padding)],
    }


def _inputs(plan: Plan) -> dict[str, list[str]]:
    """Lists, by role, the sharding of each group of equal inputs, with an example and the number of inputs."""
    rows_of: dict[str, list[str]] = {}
    for role, groups in groups_by_role(plan):
        for group in groups:
            leaf = group.first
            axes = ", ".join(name.rpartition("/")[2] for name in leaf.axes)
            row = f"{leaf.path}: [{axes}] -> {spec_text(leaf.spec)}, {leaf.dtype}, x{len(group.leaves)}"
            rows_of.setdefault(role, []).append(row)
    return {role: sorted(rows) for role, rows in rows_of.items()}


def _traffic(plan: Plan) -> dict[str, str]:
    """Sums the bytes that leave each device in a step, by collective and mesh axes, from 0.1 % of the total on."""
    sent_bytes: defaultdict[str, float] = defaultdict(float)
    for kind, axes, size, _ in plan.traffic:
        sent_bytes[f"{kind} over {axes}"] += size
    least = sum(sent_bytes.values()) / 1000
    return {name: bytes_text(size) for name, size in sorted(sent_bytes.items()) if size >= least}


def variant_rows(name: str) -> dict[str, str]:
    """Describes the plan of each variant that the search plans for a case: strategy, time and memory."""
    plan, rows = searched(name), {}
    for variant, words, time, peak in plan.variants:
        fits = f"{words}: {time_text(time)}, {bytes_text(peak)}"
        rows[f"{variant['remat']} {variant['microbatches']}"] = fits if peak <= plan.limit_bytes else "does not fit"
    return rows


@cache
def searched(name: str) -> Plan:
    """Plans a case, with a search over all variants."""
    case = CASES[name]
    search = workload_search(case.work, {"target": case.target})
    return plan(*workload_variants(case.work), target=case.target, variants=search, donate_argnums=0)


def best_variant(name: str) -> tuple[str, int]:
    """Returns the variant of the chosen plan: the fastest that fits, and the first of a tie."""
    variant = searched(name).variant
    return variant["remat"], variant["microbatches"]


def stored(name: str) -> dict[str, Any]:
    """Reads the golden plan of a case."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def text(data: Mapping[str, Any]) -> str:
    """Formats a golden plan as the text of its file."""
    return json.dumps(data, indent=1) + "\n"


def is_locked_jax() -> bool:
    """Returns whether this is the JAX version with which golden plans are made."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    (locked,) = [line for line in lines if line.startswith("jax==") and 'python_version >= "3.12"' not in line]
    return version("jax") == locked.partition("==")[2].split()[0]
