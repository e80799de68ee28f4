"""Compare the memory traffic of products and their reductions, as compiled for TPUs, with the planner's estimate.

    python benchmarks/absorbed_reductions.py                    # all rows; they are stored
    python benchmarks/absorbed_reductions.py v6e:2x2            # the rows of a target
    python benchmarks/absorbed_reductions.py --show             # the stored rows, without compiling
    python benchmarks/absorbed_reductions.py --predict          # the stored rows with new estimates

XLA:TPU computes many reductions of a product in the kernel of the product. Each case is a product of 2**28 elements,
with its rows sharded over four devices, and one or more reductions of it. A row shows how many bytes the kernels write
and read for each element of the product, compiled and (estimated). For example, 2 written and 0 read means that the
product is stored in 16 bits, and that nothing reads it. Copies of inputs and results do not count. The times are those
of the step in milliseconds: the joined estimate of the compiled program (`estimate.py`), and the (planner's).

Nothing runs. Rows are stored in `results/absorbed_reductions.json`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import common  # sets up the path and the devices first
import jax
import jax.numpy as jnp
from hlo import Computation, Instruction, Module, bits_of, read
from hlo_cost import is_free
from judged_steps import estimated, exported
from stored_rows import Case, run_cases

from autoshard import plan
from autoshard.sharding.audit import compile_job
from autoshard.sharding.planner.bound_plan import bound_or_error

PATH = common.RESULTS / "absorbed_reductions.json"
TIMEOUT_S = 600.0  # chosen: seconds after which a compiler is stopped
DEVICES = 4
ELEMENTS = 2**28  # of the product: on each device too many for the on-chip memory
HEADS = 4
INNER = 512  # elements that the product contracts
MOVES = {"bitcast", "copy", "parameter", "reshape", "transpose", "tuple", "get-tuple-element", "fusion", "constant"}

Reduce = Callable[..., Any]


def f32(x: jax.Array) -> jax.Array:
    """Return an array in float32."""
    return x.astype("float32")


def variance(y: jax.Array) -> jax.Array:
    """Return the variance of each row."""
    return jnp.var(f32(y), -1)


REDUCTIONS: dict[str, Reduce] = {
    "max": lambda y: y.max(-1),
    "sum": lambda y: f32(y).sum(-1),
    "mean square": lambda y: (f32(y) ** 2).mean(-1),
    "argmax": lambda y: y.argmax(-1),
    "argmin of a distance": lambda y: (2 - f32(y)).argmin(-1),
    "any": lambda y: (y > 0).any(-1),
    "sum of columns": lambda y: f32(y).sum(0),
    "sum of all": lambda y: f32(y).sum(),
    "max and min": lambda y: (y.max(-1), y.min(-1)),
    "max and sum": lambda y: (f32(y).max(-1), f32(y).sum(-1)),
    "argmax and min": lambda y: (y.argmax(-1), y.min(-1)),
    "argmax and argmin": lambda y: (y.argmax(-1), y.argmin(-1)),
    "sums of rows and columns": lambda y: (f32(y).sum(0), f32(y).sum(1)),
    "sum, and the result": lambda y: (y, f32(y).sum(-1)),
    "argmax, and the result": lambda y: (y, y.argmax(-1)),
    "variance": variance,
    "logsumexp": lambda y: jax.nn.logsumexp(f32(y), -1),
    "sum of groups of 128": lambda y: f32(y).reshape(len(y), -1, 128).sum(-1),
    "max of 3D rows": lambda y: y.reshape(64, -1, y.shape[-1]).max(-1),
}
WITH_ARRAY: dict[str, Reduce] = {
    "square distance from an array": lambda y, z: (f32(y - z) ** 2).sum(-1),
    "max where an array is positive": lambda y, z: jnp.where(z > 0, y, -1e30).max(-1),
    "residual and its mean square": lambda y, z: (total := y + z, (f32(total) ** 2).mean(-1)),
}
ATTENTION = ("forward", "gradient")


@dataclass(frozen=True)
class Row:
    """A case on a target.

    Attributes:
        target: the machine.
        case: the reductions; `attention ...` for attention.
        length: elements of a row of the product.
        kind: the compiler's result: `ok`, `error`, ...
        written: bytes that kernels write for each element of the product: compiled, estimated.
        read: the same for bytes that kernels read.
        milliseconds: time of the step: compiled, estimated.
    """

    target: str
    case: str
    length: int
    kind: str
    written: Sequence[float]
    read: Sequence[float]
    milliseconds: Sequence[float]

    def __str__(self) -> str:
        if self.kind != "ok":
            return f"{self.target} {self.case} {self.length}: {self.kind}"
        pairs = (f"{found:g} ({estimated:g})" for found, estimated in (self.written, self.read))
        written, reads = pairs
        found, estimated = self.milliseconds
        name = f"{self.target} {self.case}, rows of {self.length}"
        return f"{name}: {written} bytes written, {reads} read; {found:.2f} ms ({estimated:.2f})"


ROWS: Sequence[tuple[str, str, int]] = (
    *(("v5e:2x2", name, 4096) for name in (*REDUCTIONS, *WITH_ARRAY)),
    *(("v5e:2x2", name, length) for name in ("max", "sum", "argmax", "logsumexp") for length in (4032, 1000)),
    *(("v5e:2x2", f"attention {kind}", length) for kind in ATTENTION for length in (512, 1000, 4096, 8192)),
    *(
        (target, case, length)
        for target in ("v6e:2x2", "v5p:2x2x1")
        for case, length in (
            ("max", 4096), ("max and sum", 4096), ("argmax", 4096), ("argmax, and the result", 4096),
            ("sums of rows and columns", 4096), ("variance", 4096), ("sum of groups of 128", 4096),
            ("attention forward", 512), ("attention gradient", 512), ("attention gradient", 8192),
        )
    ),
)  # fmt: skip


def program(case: str, length: int) -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]:
    """Return the function of a case, and its operands."""
    if case.startswith("attention"):
        batch = DEVICES * max(ELEMENTS // HEADS // length**2 // DEVICES, 2)
        heads = jax.ShapeDtypeStruct((batch, length, HEADS, 64), "bfloat16")
        return (attention if case.endswith("forward") else attention_gradient), (heads,) * 3
    rows = ELEMENTS // length // 64 * 64
    shapes = [(rows, INNER), (INNER, length), *([(rows, length)] if case in WITH_ARRAY else [])]
    reduce = REDUCTIONS.get(case) or WITH_ARRAY[case]

    def fn(x: jax.Array, w: jax.Array, *more: jax.Array) -> Any:
        return reduce(x @ w, *more)

    return fn, tuple(jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Return attention without a kernel, `[batch, length, heads, features]` with a softmax in float32."""
    scores = f32(jnp.einsum("bqhd,bkhd->bhqk", q, k)) * 0.125
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1).astype(q.dtype), v)


def attention_gradient(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    """Return the gradients of `sum(attention(q, k, v)**2)` with respect to `q`, `k` and `v`."""
    return jax.grad(lambda *heads: (f32(attention(*heads)) ** 2).sum(), argnums=(0, 1, 2))(q, k, v)


def size_of(case: str, shapes: Sequence[jax.ShapeDtypeStruct]) -> int:
    """Return the elements of a case's product."""
    batch, length, heads, _ = shapes[0].shape if case.startswith("attention") else (1, 1, 1, 1)
    return batch * heads * length**2 if length > 1 else shapes[0].shape[0] * shapes[1].shape[1]


def compiled_bytes(module: Module, elements: int) -> tuple[float, float]:
    """Return how many bytes the kernels of a compiled program write and read for each element of the product.

    Instructions that only copy or rearrange arrays are not counted.

    Args:
        module: the program.
        elements: elements of the product on one device. Only arrays with this many elements are counted.
    """
    fused = {
        name
        for where in module.computations.values()
        for i in where.instructions
        if i.opcode == "fusion"
        for name in i.called
    }
    written = taken = 0.0
    for where in module.computations.values():
        for i in where.instructions if where.name not in fused else ():
            inside = {each.opcode for _, each in module.within(i)} | {i.opcode}
            if not is_free(i) and not inside <= MOVES and "copy" not in i.opcode:
                written += _bytes([i], elements)
                taken += _bytes(_operands(where, i), elements)
    return written, taken


def _operands(where: Computation, instruction: Instruction) -> list[Instruction]:
    return list({each.name: each for each in where.inputs(instruction)}.values())


def _bytes(values: Sequence[Instruction], elements: int) -> float:
    return sum(bits_of(leaf.dtype) / 8 for one in values for leaf in one.leaves if leaf.elements == elements)


def estimated_bytes(made: Any, elements: int) -> tuple[float, float]:
    """Return how many bytes the kernels write and read for each element of the product, as the planner estimates.

    Args:
        made: the plan.
        elements: elements of the whole product. Only arrays with this many elements are counted.
    """
    problem = bound_or_error(made.bound).problem
    fusion, avals = problem.cost.fusion, problem.program.avals

    def total(values: Sequence[int]) -> float:
        sizes = (avals[v].dtype.itemsize * fusion.narrow.get(v, 1.0) for v in values if avals[v].size == elements)
        return float(sum(sizes))

    kernels = fusion.kernels.values()
    return sum(total(each.writes) for each in kernels), sum(total(each.reads) for each in kernels)


def planned(target: str, case: str, length: int) -> tuple[Any, int]:
    """Return the plan of a case, and the elements of its product."""
    fn, shapes = program(case, length)
    return plan(fn, *shapes, target=target, plan=f"dp:{DEVICES}"), size_of(case, shapes)


def compiled(target: str, case: str, length: int) -> Row:
    """Plan and compile a case."""
    made, elements = planned(target, case, length)
    result = compile_job(exported(made, target), TIMEOUT_S)
    if result.kind != "ok":
        return Row(target, case, length, f"{result.kind} {result.message[:80]}", (), (), ())
    judged = estimated(result, target)
    found = compiled_bytes(read(result.text), elements // DEVICES)
    return _row(target, case, length, made, elements, found, round(judged.step["joined"] * 1e3, 3))


def _row(
    target: str, case: str, length: int, made: Any, elements: int, found: tuple[float, float], milliseconds: float
) -> Row:
    """Return the row of a case.

    Args:
        target: the machine.
        case: the name of the case.
        length: the length of its rows.
        made: its plan.
        elements: elements of the product.
        found: bytes that the compiled program writes and reads for each element of the product.
        milliseconds: the step time of the compiled program.
    """
    written, taken = zip(found, estimated_bytes(made, elements), strict=True)
    times = milliseconds, round(made.estimate.step_time_us / 1e3, 3)
    return Row(target, case, length, "ok", written, taken, times)


def predicted(row: Row) -> Row:
    """Return a stored row with a new estimate of the planner."""
    if row.kind != "ok":
        return row
    made, elements = planned(row.target, row.case, row.length)
    return _row(row.target, row.case, row.length, made, elements, (row.written[0], row.read[0]), row.milliseconds[0])


def case_of(row: Row) -> Case:
    """Return the target, case and length of a row."""
    return row.target, row.case, row.length


def main(arguments: Sequence[str]) -> None:
    """Compile the requested rows, store them and print them."""
    run_cases(__doc__, arguments, PATH, Row, ROWS, compiled, case_of, predicted)


if __name__ == "__main__":
    main(sys.argv[1:])
