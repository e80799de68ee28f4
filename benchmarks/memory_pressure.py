"""How a compiled step slows down when its memory comes close to the limit.

    python benchmarks/memory_pressure.py [--target v5e:2x4]      compile the step at each share of the memory
    python benchmarks/memory_pressure.py --show                  the stored rows, without compiling

A scan over 16 layers of two matrices is planned under `fsdp:8`. Its state has an array that nothing reads, whose size
brings the planned peak to a share of the limit. Only that size differs between the rows of a variant. So a row that
takes longer than the first one shows what XLA gives up for memory: overlap, or values that it computes again. The
variants are:

    host         the input of each layer waits in host memory
    kept         the input and the hidden activation of each layer are kept on the device
    full-memory  like kept, with the option set of this name

Nothing runs. Rows are stored in `results/memory_pressure.json`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import common  # sets up the path and the devices first
import jax
import jax.numpy as jnp
from estimate_result import MEASURES
from jax.ad_checkpoint import checkpoint_name
from plan_rows import Planned, Store, prediction, run_on_chips
from rich.console import Console
from rich.table import Table

from autoshard import Plan, plan
from autoshard.sharding.audit.export import export_plan
from autoshard.sharding.machines.options import SETS, with_set
from autoshard.sharding.plan.program_facts import program_facts
from autoshard.sharding.planner.bound_plan import bound_or_error

STRATEGY, DEVICES = "fsdp:8", 8
LAYERS, WIDTH, HIDDEN, ROWS = 16, 4096, 14336, 131072
# Variant, and planned peak over the limit. The kept activations alone take 0.68 of the memory.
CASES = (
    *(("host", share) for share in (0.5, 0.8, 0.85, 0.9, 0.93, 0.95, 0.96, 0.97)),
    *(("kept", share) for share in (0.7, 0.85, 0.87, 0.89, 0.91, 0.93, 0.95, 0.97)),
    *(("full-memory", share) for share in (0.85, 0.93, 0.95, 0.97)),
)
COLUMNS = 1024  # of the array that fills the memory
STORED = common.RESULTS / "memory_pressure.json"

_HOST = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=["layer"], offload_src="device", offload_dst="pinned_host"
)
_KEPT = jax.checkpoint_policies.save_only_these_names("layer", "hidden")


def train_step(keeps: bool) -> Callable[..., tuple[Any, Any]]:
    """Return a step of gradient descent on residual layers of two matrices.

    Args:
        keeps: whether activations are kept on the device, instead of the layers' inputs in host memory.
    """

    def layer(h: jax.Array, w: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        h = checkpoint_name(h, "layer")
        hidden = checkpoint_name(h @ w[0], "hidden") if keeps else h @ w[0]
        return h + jnp.tanh(hidden) @ w[1], None

    def step(state: tuple[Any, Any], x: jax.Array) -> tuple[Any, Any]:
        weights, unread = state

        def loss(weights: Any) -> jax.Array:
            h, _ = jax.lax.scan(jax.checkpoint(layer, policy=_KEPT if keeps else _HOST), x, weights)
            return (h.astype(jnp.float32) ** 2).mean()

        gradients = jax.grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - g.astype(w.dtype), weights, gradients), unread

    return step


def made(target: str, keeps: bool, unread_rows: int) -> Plan:
    """Plan the step with an array of this many float32 rows on each device."""
    shapes = (LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH)
    weights = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    unread = jax.ShapeDtypeStruct((DEVICES * unread_rows, COLUMNS), jnp.float32)
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
    return plan(train_step(keeps), (weights, unread), x, target=target, plan=STRATEGY, donate_argnums=0)


def compiled(store: Store) -> None:
    """Plan, compile and store each variant at each share."""
    store.begin()
    for variant, share in CASES:
        keeps = variant != "host"
        least = made(store.target, keeps, 1)
        room = share * least.limit_bytes - least.estimate.peak_memory_bytes
        planned = made(store.target, keeps, 1 + int(room / (COLUMNS * 4)))
        options = planned.compiler_options.get("tpu", {})
        if variant in SETS:
            facts = program_facts(planned)
            assert facts is not None, store.target
            options = with_set(options, SETS[variant], facts)
        remat = "layer, hidden" if keeps else "host:layer"
        row = Planned(f"{variant} {share:.2f}", STRATEGY, planned.chosen, remat, 1, None, prediction(planned))
        store.finish(row, options, export_plan(bound_or_error(planned.bound).executable, options))


def show(store: Store) -> None:
    """Print the stored rows. `allocated` and `peak` are the compiler's, as shares of the memory.

    `allocated` counts all arguments and temporaries. They are not all in use at the same time.
    """
    steps = [f"{measure} ms" for measure in MEASURES]
    table = Table("variant, planned share", "allocated", "peak", *steps, "exposed ms", "result")
    for row in store.rows:
        steps = [f"{row.step[measure] * 1e3:.0f}" if row.step else "" for measure in MEASURES]
        sizes = row.memory_bytes, row.peak_bytes
        shares = [f"{size / row.limit_bytes:.3f}" if size and row.limit_bytes else "" for size in sizes]
        exposed = f"{row.exposed['joined'] * 1e3:.0f}" if row.exposed else ""
        table.add_row(row.side, *shares, *steps, exposed, row.kind)
    Console(width=120).print(table)


if __name__ == "__main__":
    run_on_chips(sys.argv[1:], __doc__, STORED, DEVICES, compiled, show)
