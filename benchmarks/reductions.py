"""The collectives that sum gradients, as compiled: reduce-scatters and all-reduces, and over how many devices.

    python benchmarks/reductions.py                     # all rows; they are stored
    python benchmarks/reductions.py tpu7x:2x2x1         # the rows of a target
    python benchmarks/reductions.py --show              # the stored rows, without compiling

The program is a step of gradient descent of four scanned layers of two products. A gradient is summed over the mesh
axes that shard the batch, and each device keeps the shard that it stores. `parts` counts the reductions that move more
than `LEAST_BYTES`, by kind, megabytes before the reduction, and number of devices of a group. A row under `own` has the
chip's default options; one under `sparse cores` leaves reductions on the SparseCores, where the compiler for tpu7x runs
them by default.

Nothing runs. Rows are stored in `results/reductions.json`. For GPUs, `PYTHONPATH` must contain the folder of the CUDA
plugin.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from common import RESULTS
from estimate_result import Traffic
from judged_steps import estimated
from stored_rows import Case, run_cases

from autoshard import plan
from autoshard.errors import AutoshardWarning
from autoshard.sharding.audit import compile_job
from autoshard.sharding.audit.export import export_plan
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.planner.bound_plan import bound_or_error

PATH = RESULTS / "reductions.json"
LAYERS, ROWS = 4, 32768
SIZES = 2048, 8192  # input and output features of the first product of a layer
LEAST_BYTES = 1e6  # chosen: less than a weight, more than a norm
KINDS = ("all-reduce", "reduce-scatter")
OWN, SPARSE = "own", "sparse cores"
# Each case is (target, plan, options). The sizes follow if they differ from `SIZES`.
CASES: Sequence[tuple[str, str, str, *tuple[int, ...]]] = (
    ("v6e:4x4", "dp:2 fsdp:8", OWN),
    ("v6e:4x4", "fsdp:16", OWN),
    ("v6e:4x8", "fsdp:32", OWN),
    ("v6e:8x8", "fsdp:64", OWN),
    ("v5e:4x4", "dp:2 fsdp:8", OWN),
    ("v5e:8x16", "fsdp:128", OWN),
    ("v5e:16x16", "fsdp:256", OWN),
    ("v5e:16x16", "dp:2 fsdp:128", OWN),
    ("v5e:4x4*2", "dp:2 fsdp:16", OWN),
    ("v6e:16x16", "fsdp:256", OWN),
    ("v4:4x4x4", "fsdp:64", OWN),
    ("v5p:4x4x2", "dp:2 fsdp:16", OWN),
    ("v5p:4x4x2", "fsdp:32", OWN),
    ("v5p:4x4x4", "dp:4 fsdp:16", OWN),
    ("v5p:4x8x8", "dp:2 fsdp:128", OWN),
    ("v5p:2x2x4", "dp:2 fsdp:8", OWN),
    ("tpu7x:2x2x1", "fsdp:8", OWN),
    ("tpu7x:2x2x1", "fsdp:8", SPARSE),
    ("tpu7x:2x2x1", "dp:2 fsdp:4", OWN),
    # Shards of 128 input features; the gradient is computed as `[outputs, inputs]`.
    ("v5e:2x4", "fsdp:8", OWN, 1024, 1024),
    ("v5p:4x4x2", "dp:2 fsdp:16", OWN, 2048, 2048),
    ("h100:2x8", "dp:2 fsdp:8", OWN),
    ("h100:1x8", "dp:2 fsdp:2 tp:2", OWN),
)
_REDUCTIONS = [f"xla_tpu_enable_sparse_core_collective_offload_{k}" for k in ("reduce_scatter", "nd_reduce_scatter")]


@dataclass(frozen=True)
class Row:
    """A compiled program.

    Attributes:
        target: the machine.
        words: the plan.
        options: `own` or `sparse cores`.
        kind: the compiler's result: `ok`, `error`, ...
        parts: `reduce-scatter of 33.6 MB over 8` -> number of such collectives in the program.
        exposed: the exposed milliseconds of these collectives, by the compiler's cycles or, on a GPU, the roofline.
        sizes: input and output features of the first product of a layer.
    """

    target: str
    words: str
    options: str
    kind: str
    parts: Mapping[str, int]
    exposed: float
    sizes: Sequence[int] = SIZES

    def __str__(self) -> str:
        parts = ", ".join(f"{count} x {part}" for part, count in self.parts.items())
        sizes = "" if tuple(self.sizes) == SIZES else f" {' x '.join(map(str, self.sizes))}"
        return f"{self.target} {self.words}{sizes}, {self.options}: {parts or self.kind}; {self.exposed:.2f} ms exposed"


def gradient_descent(width: int, hidden: int) -> tuple[Any, ...]:
    """Return the step, and the shapes of its weights and its rows."""

    def step(weights: Any, x: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
                inner = jnp.tanh(x @ w["up"].astype(x.dtype))
                return x + inner @ w["down"].astype(x.dtype), None

            return jnp.sum(jax.lax.scan(layer, x, weights)[0].astype("float32") ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    sizes = {"up": (LAYERS, width, hidden), "down": (LAYERS, hidden, width)}
    weights = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in sizes.items()}
    return step, weights, jax.ShapeDtypeStruct((ROWS, width), "bfloat16")


def parts_of(traffic: Sequence[Traffic]) -> dict[str, int]:
    """Count the reductions that move more than `LEAST_BYTES`, by kind, megabytes and size of the group."""
    large = [each.collective for each in traffic if each.collective.payload_bytes > LEAST_BYTES]
    found = [f"{c.kind} of {c.payload_bytes / 1e6:.1f} MB over {c.size}" for c in large if c.kind in KINDS]
    return dict(sorted(Counter(found).items()))


def compiled(target: str, words: str, options: str, *sizes: int) -> Row:
    """Compile the step for a target, and return its row."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoshardWarning)
        made = plan(*gradient_descent(*(sizes or SIZES)), target=target, plan=words, donate_argnums=0)
    given = dict(made.compiler_options.get(find_target(target).platform, {}))
    if options == SPARSE:
        given = {name: value for name, value in given.items() if name not in _REDUCTIONS}
    result = compile_job(export_plan(bound_or_error(made.bound).executable, given))
    if result.kind != "ok":
        return Row(target, words, options, f"{result.kind} {result.message[:80]}", {}, 0.0, sizes or SIZES)
    found = estimated(result, target).traffic
    reductions = [each for each in found if each.collective.kind in KINDS]
    exposed = sum(each.exposed.get("cycles", each.exposed["roofline"]) for each in reductions)
    return Row(target, words, options, "ok", parts_of(found), round(exposed * 1e3, 2), sizes or SIZES)


def case_of(row: Row) -> Case:
    """Return the target, plan, options and sizes of a row."""
    return row.target, row.words, row.options, *row.sizes


def main(arguments: Sequence[str]) -> None:
    """Compile the requested rows, store them and print them."""
    run_cases(__doc__, arguments, PATH, Row, CASES, compiled, case_of)


if __name__ == "__main__":
    main(sys.argv[1:])
