"""How fast a step with experts is for each way to compute the gradient of the gates.

    python benchmarks/expert_gates.py [CASE ...]    compile both ways of these cases; default: all
    python benchmarks/expert_gates.py --show        the stored rows, without compiling

Experts with a capacity compute this gradient as a sum over their outputs, or over their hidden units
(`models/capacity/slots.py`). The model chooses by its remat policy. The sides are:

    outputs   a sum over outputs
    hidden    a sum over hidden units

Nothing runs. Rows are stored in `results/expert_gates/`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from unittest.mock import patch

import common  # sets up the path and the devices first
from plan_rows import Store, run_cases
from ranked_plans import Case, compile_row
from rich.console import Console
from rich.table import Table

from autoshard.models import moe

FOLDER = common.RESULTS / "expert_gates"
CASES: Mapping[str, Case] = {
    "recomputed": Case(
        "mixtral-8x22b", "v5e:4x4", "fsdp:4 ep:4", ("host:residual+qkv+out_proj",),
        sizes={
            "batch_size": 48, "context": 4096, "layers": 4, "param_dtype": "bfloat16", "dispatch": "capacity",
            "capacity_factor": 1.25,
        },
    ),
    "kept": Case(
        "moe-2.4b", "v5e:4x4", "dp:4 ep:4 state", ("keep:context+out_proj+mlp_in+mlp_out",), sizes={"batch_size": 128}
    ),
}  # fmt: skip
SIDES = {"outputs": False, "hidden": True}  # side -> whether the gradient is a sum over hidden units


def compile_rows(store: Store) -> None:
    """Compile and store a case in both ways."""
    case = CASES[store.case]
    store.begin()
    for side, from_hidden in SIDES.items():
        with patch.object(moe, "recomputes", lambda remat, name, from_hidden=from_hidden: from_hidden):
            compile_row(case, case.remats[0], side, store)


def show(stores: Sequence[Store]) -> int:
    """Print the rows."""
    table = Table("case", "side", "predicted s", "joined s", "predicted GiB", "GiB", "result")
    for store in stores:
        for row in store.rows:
            joined = f"{row.step['joined']:.3f}" if row.step else ""
            peak = f"{row.peak_bytes / 2**30:.2f}" if row.peak_bytes else ""
            planned = f"{row.predicted['step']:.3f}", f"{row.predicted['memory_bytes'] / 2**30:.2f}"
            table.add_row(store.case, row.side, planned[0], joined, planned[1], peak, row.kind)
    Console(width=120).print(table)
    return 0


def main(arguments: Sequence[str]) -> int:
    """Compile and print the cases."""
    targets = {name: case.target for name, case in CASES.items()}
    return run_cases(arguments, __doc__, targets, FOLDER, compile_rows, show)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
