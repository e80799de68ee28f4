"""Store a table that is only looked up along its rows or along its features: what the compiler makes of both.

    python benchmarks/lookup_tables.py [v6e:4x4] [--rows 128256] [--features 4096] [--batch 48] [--length 8192]

A step looks up rows of a float32 table for the tokens of a batch, takes gradients, and updates the table by Adam. Under
`fsdp` over all devices, it is planned with each way of storing the table, and compiled for the machine. Nothing runs.
The default shapes are those of Llama-3.1 8B in a published run on v6e:4x4.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from autoshard import plan
from autoshard.sharding.audit import missing_compiler
from autoshard.sharding.machines.targets import find_target

STORED = {"rows": PartitionSpec("fsdp"), "features": PartitionSpec(None, "fsdp")}


def step(state: dict[str, jax.Array], batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Look up rows, and update the table by the gradients of a loss of them."""

    def loss(table: jax.Array) -> jax.Array:
        rows = table.at[batch["tokens"]].get(mode="fill", wrap_negative_indices=False).astype(jnp.bfloat16)
        return jnp.sum(jnp.tanh(rows.astype(jnp.float32) * batch["weights"].astype(jnp.float32)) ** 2)

    gradient = jax.grad(loss)(state["table"])
    first = 0.9 * state["first"] + 0.1 * gradient
    second = 0.99 * state["second"] + 0.01 * gradient**2
    return {"table": state["table"] - 1e-3 * first / (jnp.sqrt(second) + 1e-8), "first": first, "second": second}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile both programs and print a line for each."""
    given = _parser().parse_args(arguments)
    target = find_target(given.target)
    if missing := missing_compiler(target.platform):
        print(missing, file=sys.stderr)
        return 1
    state = dict.fromkeys(
        ("table", "first", "second"), jax.ShapeDtypeStruct((given.rows, given.features), "float32")
    )  # fmt: skip
    tokens = given.batch, given.length
    batch = {
        "tokens": jax.ShapeDtypeStruct(tokens, "int32"),
        "weights": jax.ShapeDtypeStruct((*tokens, given.features), "bfloat16"),
    }
    for name, spec in STORED.items():
        options: dict[str, Any] = {"target": given.target, "plan": f"fsdp:{target.devices}", "donate_argnums": 0}
        made = plan(step, state, batch, **options, fixed={f"state/{leaf}": spec for leaf in state})
        audit = made.verify()
        if audit.step_time_us is None or audit.peak_bytes is None:
            print(f"{name}: {audit.kind}, {audit.message}")
            continue
        print(
            f"{name}: {audit.step_time_us / 1e3:.1f} ms and {audit.peak_bytes / 2**30:.2f} GiB compiled, "
            f"{made.estimate.step_time_us / 1e3:.1f} ms and "
            f"{made.estimate.peak_memory_bytes / 2**30:.2f} GiB predicted",
            flush=True,
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", nargs="?", default="v6e:4x4", help="the machine")
    parser.add_argument("--rows", type=int, default=128_256)
    parser.add_argument("--features", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--length", type=int, default=8192, help="tokens in a row of the batch")
    return parser


if __name__ == "__main__":
    sys.exit(main())
