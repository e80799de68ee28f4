"""Compare the estimated time of Fourier transforms with that of the compiled programs.

    python benchmarks/transforms.py [--target v5e:2x2]

Each transform is compiled for one machine, with 8 million elements on each device. A row shows, in milliseconds, the
planner's estimate and the joined estimate of the compiled program (`estimate.py`), and the operations that the compiler
counts for each element. Nothing runs. Rows are stored in `results/transforms.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import common  # sets up the path and the devices first
import jax
import jax.numpy as jnp
from judged_steps import estimated, exported
from rich.console import Console
from rich.table import Table

from autoshard import plan
from autoshard.sharding.audit import compile_job
from autoshard.sharding.audit.compiler_process import versions
from autoshard.sharding.machines.targets import find_target

PATH = common.RESULTS / "transforms.json"
TIMEOUT_S = 900.0  # chosen: seconds after which a compiler is stopped
ELEMENTS = 2**23  # on each device

Transform = Callable[[jax.Array], jax.Array]


def _complex(x: jax.Array) -> jax.Array:
    return jax.lax.complex(x, 2 * x)


KINDS: dict[str, Transform] = {
    "rfft": lambda x: jnp.abs(jnp.fft.rfft(x)).sum(-1),
    "fft": lambda x: jnp.abs(jnp.fft.fft(_complex(x))).sum(-1),
    "irfft": lambda x: jnp.fft.irfft(_complex(x)).sum(-1),
    "fft2": lambda x: jnp.abs(jnp.fft.fft2(_complex(x))).sum(-1),
}
CASES = (
    *(("rfft", n) for n in (100, 256, 512, 768, 1000, 1024, 2048, 3000, 4096, 16384, 65536)),
    *(("fft", n) for n in (128, 256, 1024, 4096)),
    *(("irfft", n) for n in (256, 1000, 1024, 16384)),
    ("fft2", 256),
)


def compiled(kind: str, length: int, target: str) -> dict[str, float | str]:
    """Plan and compile the transforms along `length` elements, and return their times in milliseconds."""
    machine = find_target(target)
    rows = machine.devices * ELEMENTS // length
    shape = (rows // length, length, length) if kind == "fft2" else (rows, length)
    if kind == "irfft":
        shape = rows, length // 2 + 1
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    made = plan(KINDS[kind], x, target=target, plan=f"dp:{machine.devices}")
    result = compile_job(exported(made, target), TIMEOUT_S)
    row: dict[str, float | str] = {"kind": result.kind, "estimate_ms": made.estimate.compute_us / 1e3}
    if result.kind == "ok":
        judged = estimated(result, target)
        row["compiled_ms"] = judged.step["joined"] * 1e3
        row["operations"] = sum(each.flops for each in judged.rows) / ELEMENTS
    return row


def main(arguments: Sequence[str]) -> None:
    """Compile the transforms, print the table and store it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="v5e:2x2", help="a TPU machine; default: v5e:2x2")
    given = parser.parse_args(arguments)
    rows = [{"transform": kind, "length": n} | compiled(kind, n, given.target) for kind, n in CASES]
    table = Table("transform", "estimate ms", "compiled ms", "ratio", "operations an element")
    for row in rows:
        name = f"{row['transform']} {row['length']}"
        if row["kind"] != "ok":
            table.add_row(name, str(row["kind"]))
            continue
        made, found, operations = (float(row[key]) for key in ("estimate_ms", "compiled_ms", "operations"))
        table.add_row(name, f"{made:.3f}", f"{found:.3f}", f"{made / found:.2f}", f"{operations:.0f}")
    Console(width=100).print(table)
    body = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "target": given.target, "versions": versions()}
    PATH.write_text(json.dumps(body | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
