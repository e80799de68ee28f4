"""How much faster a step is if the program, and not XLA, says when a loop moves slices of stacks in host memory.

    python benchmarks/host_stacks.py [--target v5e:2x4]      compile each case both ways
    python benchmarks/host_stacks.py --show                  the stored rows, without compiling

Eight layers of six matrices are planned under `fsdp:8`. Each layer has its input and one activation, `context`, of
64 MiB on each device. The cases are:

    one      a scan over layers; both values of each layer wait in host memory
    two      a scan over pairs of layers; the first layer of a pair keeps its input on the device
    context  a scan over layers; `context` waits in host memory, and the input of each layer on the device

Each is compiled as `lower/tpu/host_stacks.py` writes it (`program`), and with a plain scan, so that XLA chooses when a
slice moves (`xla`). Nothing runs. Rows are stored in `results/host_stacks.json`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import common  # sets up the path and the devices first
import jax
import jax.numpy as jnp
from estimate_result import MEASURES
from jax.ad_checkpoint import checkpoint_name
from plan_rows import Planned, Store, prediction, run_on_chips
from plan_sides import moved_by_compiler
from rich.console import Console
from rich.table import Table

from autoshard import plan
from autoshard.sharding.audit.export import export_plan
from autoshard.sharding.planner.bound_plan import bound_or_error

STRATEGY, DEVICES = "fsdp:8", 8
LAYERS, WIDTH, HIDDEN, ROWS = 8, 2048, 7168, 131072
# Case -> for each layer of an iteration, the names that wait in host memory and those that wait on the device.
CASES = {
    "one": [(("input", "context"), ())],
    "two": [(("context",), ("input",)), (("input", "context"), ())],
    "context": [(("context",), ("input",))],
}
SHAPES = {
    "query": (WIDTH, WIDTH), "key": (WIDTH, WIDTH), "out": (WIDTH, WIDTH),
    "gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH),
}  # fmt: skip
SIDES = {"xla": True, "program": False}  # side -> whether XLA chooses when slices move
STORED = common.RESULTS / "host_stacks.json"


def layer(h: jax.Array, w: dict[str, jax.Array]) -> jax.Array:
    """Return the result of a layer of six matrices for a batch of rows."""
    h = checkpoint_name(h, "input")
    h = h + checkpoint_name(jnp.tanh(h @ w["query"]) @ w["key"], "context") @ w["out"]
    return h + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def train_step(case: str) -> Callable[..., Any]:
    """Return a step of gradient descent on a scan over layers."""
    kinds = [
        jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=kept,
            names_which_can_be_offloaded=host,
            offload_src="device",
            offload_dst="pinned_host",
        )
        for host, kept in CASES[case]
    ]

    def block(h: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        for k, policy in enumerate(kinds):
            own = {name: w[k] for name, w in weights.items()}
            h = jax.checkpoint(layer, policy=policy)(h, own)
        return h, None

    def step(weights: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        def loss(weights: dict[str, jax.Array]) -> jax.Array:
            return (jax.lax.scan(block, x, weights)[0].astype(jnp.float32) ** 2).mean()

        return jax.tree.map(lambda w, g: w - g.astype(w.dtype), weights, jax.grad(loss)(weights))

    return step


def case_step(case: str) -> tuple[Any, ...]:
    """Return the step of a case, and the shapes of its arguments: stacks of weights, and the batch."""
    groups = (LAYERS // len(CASES[case]), len(CASES[case]))
    weights = {name: jax.ShapeDtypeStruct((*groups, *shape), jnp.bfloat16) for name, shape in SHAPES.items()}
    return train_step(case), weights, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)


def compiled(store: Store) -> None:
    """Plan, compile and store each case both ways."""
    store.begin()
    for case in CASES:
        made = plan(*case_step(case), target=store.target, plan=STRATEGY, donate_argnums=0)
        options = made.compiler_options.get("tpu", {})
        for side, by_xla in SIDES.items():
            row = Planned(f"{case} {side}", STRATEGY, made.chosen, case, 1, None, prediction(made))
            with moved_by_compiler() if by_xla else nullcontext():
                exported = export_plan(bound_or_error(made.bound).executable, options)
            store.finish(row, options, exported)


def show(store: Store) -> None:
    """Print the stored rows."""
    table = Table(
        "case", "predicted ms", *(f"{measure} ms" for measure in MEASURES), "exposed ms", "GiB", "predicted", "result"
    )
    for row in store.rows:
        steps = [f"{row.step[measure] * 1e3:.1f}" if row.step else "" for measure in MEASURES]
        exposed = f"{row.exposed['joined'] * 1e3:.1f}" if row.exposed else ""
        peak = f"{row.peak_bytes / 2**30:.2f}" if row.peak_bytes else ""
        planned = f"{row.predicted['memory_bytes'] / 2**30:.2f}"
        table.add_row(row.side, f"{row.predicted['step'] * 1e3:.1f}", *steps, exposed, peak, planned, row.kind)
    Console(width=120).print(table)


if __name__ == "__main__":
    run_on_chips(sys.argv[1:], __doc__, STORED, DEVICES, compiled, show)
