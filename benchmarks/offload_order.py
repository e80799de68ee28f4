"""Which layers of a mix should send values to the host: the first ones or the last ones of each group.

    python benchmarks/offload_order.py [--timeout 3000]        compile both orders
    python benchmarks/offload_order.py --schedule              without machine code, judged by the roofline only
    python benchmarks/offload_order.py --show                  the stored rows, without compiling

A step of eight layers of Llama-2 7B is planned for v6e:2x4 under `fsdp:8`, with a batch of 32 x 4096 tokens. Of every
two layers, one sends `qkv` and `mlp_in` to the host. Both orders are compiled and judged by `estimate.py`. XLA:TPU
sends the values of an iteration during the next one, and waits before that iteration computes them again. Nothing runs.
Rows are stored in `results/offload_order.json`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import common  # sets up the path and the devices first
from plan_rows import Planned, Store, add_schedule_option, prediction, requested_until
from rich.console import Console
from rich.table import Table

from autoshard import plan
from autoshard.models.workloads import workload
from autoshard.sharding.audit.export import export_plan
from autoshard.sharding.planner.bound_plan import bound_or_error
from autoshard.train.program.build import workload_step

TARGET, STRATEGY = "v6e:2x4", "fsdp:8"
HOST, KEEP = "host:qkv+mlp_in keep:context", "keep:context"
ORDERS = {"first": f"{HOST},{KEEP}", "last": f"{KEEP},{HOST}"}  # which layer of a group offloads
STORED = common.RESULTS / "offload_order.json"


def compiled(store: Store) -> None:
    """Plan, compile and store both orders."""
    store.begin()
    for side, remat in ORDERS.items():
        work = workload("llama2-7b").with_(layers=8, batch_size=32, context=4096, remat=remat)
        step, *shapes = workload_step(work, 1)
        made = plan(step, *shapes, target=TARGET, plan=STRATEGY, donate_argnums=0)
        options = made.compiler_options.get("tpu", {})
        planned = Planned(side, STRATEGY, made.chosen, remat, 1, None, prediction(made))
        store.finish(planned, options, export_plan(bound_or_error(made.bound).executable, options))


def show(store: Store) -> None:
    """Print the stored rows."""
    table = Table("offloads", "policies", "predicted ms", "cycles ms", "roofline ms", "result")
    for row in store.rows:
        steps = [f"{row.step[name] * 1e3:.0f}" if name in row.step else "" for name in ("cycles", "roofline")]
        table.add_row(row.side, row.remat, f"{row.predicted['step'] * 1e3:.0f}", *steps, row.kind)
    Console(width=140).print(table)


def main(arguments: Sequence[str]) -> None:
    """Compile and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=float, default=3000.0, help="seconds after which a compiler is stopped")
    parser.add_argument("--show", action="store_true", help="print the stored rows without compiling")
    add_schedule_option(parser)
    given = parser.parse_args(arguments)
    store = Store(STORED.stem, TARGET, STORED.parent, given.timeout, requested_until(given))
    if not given.show:
        compiled(store)
    show(store)


if __name__ == "__main__":
    main(sys.argv[1:])
