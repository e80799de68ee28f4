"""What some options do to products and gathers on TPUs, as compiled: vector memory, and gathers in 2D and 3D.

    python benchmarks/option_limits.py products v6e                    # all sizes and limits of a chip
    python benchmarks/option_limits.py products v6e --sizes 2048x8192  # one size
    python benchmarks/option_limits.py gathers                         # all machines
    python benchmarks/option_limits.py gathers v5p:2x2x2
    python benchmarks/option_limits.py kept                            # gathers over several dimensions, kept or not
    python benchmarks/option_limits.py stacks                          # loops over stacks in host memory
    python benchmarks/option_limits.py --show                          # the stored rows, without compiling

`products` compiles an MLP and its gradients on one device (16384 rows in bfloat16; with a gate, and at a width of 2048
with gelu) under limits of the vector memory that an operator may use. Ratios are to the compiler's own limit.

`gathers` compiles a step of gradient descent of four scanned layers of two products (2048 x 8192 in bfloat16) under
the chip's default options, with SparseCore gathers over one, two and three torus dimensions. Ratios are to one
dimension alone. `exposed` is the exposed part of the gathers' time. `kept` compiles such a step under the default
options, which keep a gather over several dimensions as it is, and without that option. It has fewer gathers then. On
v5e and v6e the width is 1024.

`stacks` compiles eight layers, each with two values in host memory (`host_stacks.py`, case `one`). It compares the
default options with the same options without `TILES`, which limits 16-bit arrays to tiles of 8 rows.

Times are those of the audit. Nothing runs. Each row is stored in `results/option_limits.json`. The tables in
`autoshard.sharding.machines.options.option_sets` are these rows.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import host_stacks
import jax
import jax.numpy as jnp
from common import RESULTS
from option_sets import stack_step

from autoshard import plan
from autoshard.errors import AutoshardWarning
from autoshard.sharding.audit import Audit, missing_compiler, verify_under
from autoshard.sharding.machines.kernel_rules import VMEM_OPTION
from autoshard.sharding.machines.options import Options, default_options
from autoshard.sharding.machines.options.option_table import KEEP_GATHERS, TILES
from autoshard.sharding.machines.targets import find_target
from autoshard.sharding.planner.bound_plan import bound_or_error

PATH = RESULTS / "option_limits.json"
ROWS = 16384  # of the MLP on one device
# Width and hidden size -> whether the MLP has a gate.
SIZES: Mapping[tuple[int, int], bool] = {(4096, 14336): True, (8192, 28672): True, (2048, 8192): False}
# Chip -> its smallest machine, and the limits in KiB.
LIMITS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "v5e": ("v5e:1x1", (32768, 98304)),
    "v5p": ("v5p:1x1x1", (32768, 65472)),
    "v6e": ("v6e:1x1", (65536, 98304)),
    "tpu7x": ("tpu7x:1x1x1", (49152, 65536)),
}
# Machine -> the plan, and the rows of a device.
GATHERS: Mapping[str, tuple[str, int]] = {
    "v6e:4x8": ("fsdp:32", 4096),
    "v5p:4x4x4": ("dp:4 fsdp:16", 4096),
    "v5p:2x2x4": ("fsdp:16", 1024),
    "v5p:2x2x2": ("fsdp:8", 1024),
}
LAYERS, WIDTH, HIDDEN = 4, 2048, 8192
# Machine -> the plan, the rows of a device, and the width. On v5e and v6e only small shards are not gathered.
KEPT: Mapping[str, tuple[str, int, int]] = {
    "v5p:4x4x4": ("fsdp:64", 4096, WIDTH),
    "tpu7x:4x4x4": ("fsdp:128", 4096, WIDTH),
    "v5e:16x16": ("fsdp:256", 4096, 1024),
    "v6e:16x16": ("fsdp:256", 4096, 1024),
}
# Machine -> the plan.
STACKS: Mapping[str, str] = {"tpu7x:2x2x1": host_stacks.STRATEGY}
_GATHER = "xla_tpu_enable_sparse_core_collective_offload_{}all_gather"
DIMENSIONS = ("2d_", "3d_")


@dataclass(frozen=True)
class Row:
    """A program compiled under one option.

    Attributes:
        target: the machine.
        program: the program, with its sizes.
        option: the limit in KiB, or the dimensions of the gathers on the SparseCores.
        kind: the compiler's result: `ok`, `error`, ...
        us: the step time in microseconds, by the audit.
        base_us: the same without the option.
        exposed: the exposed part of the time of all-gathers; None where there are none.
        base_exposed: the same without the option.
        seconds: the compile time; 0 if the program came from the cache.
        message: the compiler's message if it failed.
        versions: the compiler's versions.
    """

    target: str
    program: str
    option: str
    kind: str
    us: float | None
    base_us: float | None
    exposed: float | None
    base_exposed: float | None
    seconds: float
    message: str
    versions: Mapping[str, str]

    def __str__(self) -> str:
        if not self.us or not self.base_us:
            return f"{self.target} {self.program} {self.option}: {self.kind} {self.message[:80]}"
        parts = [f"{self.target} {self.program} {self.option}: {self.us / self.base_us:.3f}"]
        if self.exposed is not None and self.base_exposed is not None:
            parts.append(f"exposed {self.base_exposed:.2f} -> {self.exposed:.2f}")
        return ", ".join([*parts, f"compiled in {self.seconds:.0f} s"])


def mlp_step(width: int, hidden: int, rows: int) -> tuple[Any, ...]:
    """The gradients of an MLP in bfloat16, and the shapes of its weights, its input, and the cotangent."""

    def run(weights: Mapping[str, jax.Array], x: jax.Array, cotangent: jax.Array) -> Any:
        def mlp(weights: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
            inner = jax.nn.silu(x @ weights["gate"]) * (x @ weights["up"]) if gated else jax.nn.gelu(x @ weights["up"])
            return inner @ weights["down"]

        out, pullback = jax.vjp(mlp, weights, x)
        return out, pullback(cotangent)

    gated = SIZES[width, hidden]
    shapes = {"up": (width, hidden), "down": (hidden, width)} | ({"gate": (width, hidden)} if gated else {})
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    return run, weights, x, x


def products(chip: str, sizes: Sequence[tuple[int, int]]) -> Iterator[Row]:
    """Compile the MLPs under each limit."""
    target, limits = LIMITS[chip]
    devices = find_target(target).devices  # a chip of tpu7x is two
    others = {name: value for name, value in default_options(chip).items() if name != VMEM_OPTION}
    for width, hidden in sizes:
        compiled = _compiled(mlp_step(width, hidden, ROWS * devices), target, f"dp:{devices}")
        base = compiled(others)
        for limit in limits:
            audit = compiled({**others, VMEM_OPTION: str(limit)})
            yield _row(target, f"MLP {width}x{hidden}", f"{limit} KiB", audit, base)


def gathers(target: str) -> Iterator[Row]:
    """Compile the layers with SparseCore gathers over more and more dimensions."""
    words, rows = GATHERS[target]
    compiled = _layers(target, words, rows)
    options = {**default_options(target.partition(":")[0]), _GATHER.format(""): "true"}
    for each in DIMENSIONS:
        options[_GATHER.format(each)] = "false"
    base = compiled(options)
    for number, each in enumerate(DIMENSIONS, 1):
        options[_GATHER.format(each)] = "true"
        yield _row(target, f"layers, {words}", ", ".join(DIMENSIONS[:number]), compiled(dict(options)), base)


def kept(target: str) -> Iterator[Row]:
    """Compile the layers under the default options, and without the one that keeps gathers."""
    words, rows, width = KEPT[target]
    compiled = _layers(target, words, rows, width)
    options = default_options(target.partition(":")[0])
    base = compiled({name: value for name, value in options.items() if name != KEEP_GATHERS})
    yield _row(target, f"layers, {words}", "kept", compiled(options), base)


def stacks(target: str) -> Iterator[Row]:
    """Compile layers with values in host memory under the default options, and under the same without `TILES`."""
    compiled = _compiled(host_stacks.case_step("one"), target, STACKS[target])
    options = default_options(target.partition(":")[0])
    base = compiled({name: value for name, value in options.items() if name != TILES})
    yield _row(target, f"stacks in host memory, {STACKS[target]}", "tiles of 8 rows", compiled(options), base)


def _layers(target: str, words: str, rows: int, width: int = WIDTH) -> Any:
    sizes = {"layers": LAYERS, "width": width, "hidden": HIDDEN, "rows": rows * find_target(target).devices}
    return _compiled(stack_step(sizes, False), target, words)


def _compiled(step: tuple[Any, ...], target: str, words: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoshardWarning)
        executable = bound_or_error(plan(*step, target=target, plan=words).bound).executable

    def under(options: Options) -> Audit:
        return verify_under(executable, options)

    return under


def _row(target: str, program: str, option: str, audit: Audit, base: Audit) -> Row:
    return Row(
        target, program, option, audit.kind, audit.step_time_us, base.step_time_us, _exposed(audit), _exposed(base),
        0.0 if audit.cached else audit.seconds or 0.0, audit.message or base.message, dict(audit.versions),
    )  # fmt: skip


def _exposed(audit: Audit) -> float | None:
    gathers = [each for each in audit.collectives if each.kind == "all-gather"]
    time_us = sum(each.wire_us for each in gathers)
    return sum(each.exposed_us for each in gathers) / time_us if time_us else None


def stored() -> list[Row]:
    """Read the stored rows."""
    return [Row(**row) for row in json.loads(PATH.read_text())] if PATH.exists() else []


def save(new: Row) -> None:
    """Write a row, in the place of an older one of the same program and option."""
    rows = [r for r in stored() if (r.target, r.program, r.option) != (new.target, new.program, new.option)]
    PATH.write_text(json.dumps([asdict(row) for row in [*rows, new]], indent=1) + "\n")


def _size(text: str) -> tuple[int, int]:
    width, hidden = map(int, text.split("x"))
    return width, hidden


PARTS: Mapping[str, Mapping[str, Any]] = {"products": LIMITS, "gathers": GATHERS, "kept": KEPT, "stacks": STACKS}


def _rows(what: str, name: str, sizes: Sequence[tuple[int, int]]) -> Iterator[Row]:
    if what == "products":
        return products(name, sizes)
    return {"gathers": gathers, "kept": kept, "stacks": stacks}[what](name)


def main(arguments: Sequence[str]) -> None:
    """Compile, store and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=PARTS)
    parser.add_argument("names", nargs="*", help="chips for products, machines for gathers; default: all")
    parser.add_argument("--sizes", nargs="+", type=_size, default=[*SIZES], help="width x hidden size of the MLPs")
    parser.add_argument("--show", action="store_true", help="print the stored rows and compile nothing")
    given = parser.parse_args(arguments)
    if given.show or given.what is None:
        print(*stored(), sep="\n")
        return
    known = PARTS[given.what]
    if unknown := [name for name in given.names if name not in known]:
        parser.error(f"{given.what} has no {', '.join(unknown)}; choose from {', '.join(known)}")
    if missing := missing_compiler("tpu"):
        sys.exit(missing)
    for name in given.names or known:
        for row in _rows(given.what, name, given.sizes):
            save(row)
            print(row, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
