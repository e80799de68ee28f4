"""The roofline time of one instruction of a compiled program, and the compiler's own cycles.

    time = max(FLOPs / (efficiency x peak), bytes / (BANDWIDTH_REACHED x memory bandwidth))

FLOPs are those of the matrix products and convolutions in an instruction and in everything that it calls; a
multiply-add counts 2. A convolution counts the pairs of an output and a window tap that fall on an input, not those on
padding or dilation holes: XLA:TPU expresses batched products as such convolutions.

A custom call that states its cost (`cost_estimate`, as Pallas kernels do) is priced by that: FLOPs, bytes, and vector
operations, `VECTOR_OPS` for each transcendental one. The stated bytes include those of operands and results that the
compiler keeps on the chip. These count once less: what moves them between the chip and main memory is another
instruction. The compiler gives such calls 0 cycles. cuDNN's attention states none; its cost follows from its shapes
(`attention_calls`). Our Triton kernels state theirs in their metadata (`triton_calls`).

Bytes are those of operands and results in the device's main memory. Of an operand that is sliced or gathered, only the
bytes that are read count. Of an operand that is updated in place, only those of the update. This holds in fusions too.
Bitcasts and tuples are free.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from autoshard.kernels.constants import VECTOR_OPS
from autoshard.sharding.hlo.attention_calls import attention_cost
from autoshard.sharding.hlo.collectives import KINDS, SENDS
from autoshard.sharding.hlo.parser import HOST_MEMORY, MAIN_MEMORY, Array, Computation, Instruction, Program, bits
from autoshard.sharding.hlo.triton_calls import triton_cost
from autoshard.sharding.machines.chips import Chip
from autoshard.sharding.machines.constants import BANDWIDTH_REACHED, PRECISION_PASSES
from autoshard.sharding.machines.kernel_time import declared_us
from autoshard.spmdrules.custom_ops.kernel_cost import KernelCost

FREE = (
    "add-dependency", "after-all", "bitcast", "conditional", "constant", "domain", "get-tuple-element", "opt-barrier",
    "optimization-barrier", "parameter", "partition-id", "replica-id", "tuple", "while",
)  # fmt: skip
FREE_CALLS = ("AllocateBuffer", "AssumeGather", "AsyncCollective", "ConcatBitcast", "Sharding")
SLICES = ("dynamic-slice", "gather", "slice")
UPDATES = ("dynamic-update-slice", "scatter")
RESHAPES = ("bitcast", "reshape")
MOVES = ("convert", "copy", "transpose")  # each element of the result is one of the operand
_STATED = re.compile(r'"cost_estimate":\{([^}]*)\}')
UNKNOWN_CYCLES = 2**63 - 1  # what the compiler prints if it has no estimate


class Kernels:
    """Prices the instructions of a program on a chip."""

    def __init__(self, program: Program, chip: Chip):
        self.program, self.chip = program, chip

    @property
    def _bandwidth(self) -> float:
        return self.chip.memory_bandwidth * BANDWIDTH_REACHED

    def times_us(self, computation: Computation, i: Instruction) -> tuple[float, float]:
        """Microseconds of an instruction, and of its reads and writes alone."""
        if stated := kernel_cost(computation, i):
            return declared_us(stated, self.chip), stated.moved_bytes / self._bandwidth * 1e6
        memory = self.moved_bytes(computation, i) / self._bandwidth * 1e6
        inner = ((computation, i), *self.program.inside(i))
        return max(sum(self.product_us(at, instruction) for at, instruction in inner), memory), memory

    def product_us(self, computation: Computation, i: Instruction) -> float:
        """Microseconds of a product or convolution by its FLOPs; 0 for other instructions."""
        flops = flops_of(computation, i)
        if not flops:
            return 0.0
        dtypes = [a.dtype for v in computation.operands_of(i)[:2] for a in v.arrays]
        narrow, wide = min(map(bits, dtypes), default=32), max(map(bits, dtypes), default=32)
        size = max(narrow if narrow > 8 else wide, 8) // 8  # both operands of an 8-bit product have 8 bits
        integer = all(dtype.startswith(("s", "u")) for dtype in dtypes)
        passes = max(PRECISION_PASSES.get(name.strip(), 1) for name in i.attribute("operand_precision").split(","))
        return passes * flops / self.chip.reached(size, integer=integer) * 1e6

    def moved_bytes(self, computation: Computation, i: Instruction) -> float:
        """Bytes that an instruction reads from main memory and writes to it."""
        if is_free(i) or i.base in (*KINDS, *SENDS) or i.opcode.endswith(("-done", "-update")):
            return 0.0
        operands = computation.operands_of(i)
        if i.base in ("copy", "slice", "dynamic-slice") and i.opcode.endswith("-start"):
            return _copied_bytes(i)
        if i.called and i.opcode != "custom-call" and i.called[0] in self.program.computations:
            inner = self.program.computations[i.called[0]]
            return self._read(inner, operands) + self._written(inner, i)
        # The further results of a call into cuBLAS or cuDNN are scratch space.
        results = _main_memory_bytes(i.arrays[:1] if "__cu" in i.target else i.arrays)
        if i.opcode in SLICES:
            read = results if operands and _main_memory_bytes(operands[0].arrays) else 0.0
            return results + sum(map(_result_bytes, operands[1:])) + read
        if i.opcode in UPDATES and len(operands) > 1:
            return _result_bytes(_update(operands, i)) * (3 if i.opcode == "scatter" else 2) * bool(results)
        return results + sum(map(_result_bytes, operands))

    def _read(self, inner: Computation, operands: Sequence[Instruction]) -> float:
        """Bytes of the operands that a fused computation reads."""
        pairs = ((inner.parameters[n], v) for n, v in enumerate(operands) if n in inner.parameters)
        return sum(min(self._read_of(inner, p), _result_bytes(v)) for p, v in pairs if _result_bytes(v))

    def _read_of(self, inner: Computation, value: Instruction) -> float:
        """Bytes of one value that a fused computation reads; infinite if it reads all of them."""
        total = 0.0
        for user in inner.users.get(value.name, ()):
            first = user.operands[0] == value.name
            if user.opcode in RESHAPES or user.opcode == "get-tuple-element":
                total += self._read_of(inner, user)
            elif user.opcode in SLICES and first:
                total += sum(a.elements for a in user.arrays) * bits(value.arrays[0].dtype) / 8
            elif user.opcode in UPDATES and first:
                continue  # in place
            elif user is not inner.root and self._only_moves(user):  # a slice of the result takes a slice of the value
                total += self._read_of(inner, user) * value.arrays[0].nbytes / user.arrays[0].nbytes
            elif user.called and user.opcode != "custom-call":
                deeper = self.program.computations[user.called[0]]
                places = [n for n, name in enumerate(user.operands) if name == value.name]
                total += sum(self._read_of(deeper, deeper.parameters[n]) for n in places if n in deeper.parameters)
            elif not is_free(user) and user.base not in KINDS:
                return math.inf
        return total

    def _only_moves(self, i: Instruction) -> bool:
        """Whether an instruction of a fused computation only changes the order, tiles or dtype of its one operand."""
        if i.opcode != "fusion":
            return i.opcode in MOVES
        deeper = self.program.computations[i.called[0]].instructions
        return len(i.operands) == 1 and all(one.opcode in (*MOVES, *RESHAPES, "parameter") for one in deeper)

    def _written(self, inner: Computation, i: Instruction) -> float:
        """Bytes of an instruction's results that its fused computation writes."""
        roots = inner.operands_of(inner.root) if inner.root.opcode == "tuple" else [inner.root]
        arrays = i.arrays if i.base == i.opcode else inner.root.arrays
        if len(roots) != len(arrays):
            return 0.0 if is_free(inner.root) else _main_memory_bytes(arrays)
        return sum(
            self._written_to(inner, root, a.nbytes)
            for root, a in zip(roots, arrays, strict=True)
            if _main_memory_bytes([a])
        )

    def _written_to(self, inner: Computation, root: Instruction, whole: float) -> float:
        """Bytes of one result, `whole` bytes in size, that a fused computation writes."""
        root = _unreshaped(inner, root)
        if is_free(root) or root.base in KINDS:
            return 0.0
        if root.opcode == "fusion" and len(root.arrays) == 1:
            deeper = self.program.computations[root.called[0]]
            return self._written_to(deeper, deeper.root, whole) if deeper.root.opcode != "tuple" else whole
        if root.opcode in UPDATES and _unreshaped(inner, inner.operands_of(root)[0]).opcode == "parameter":
            return sum(a.nbytes for a in _update(inner.operands_of(root), root).arrays) * (
                1 + (root.opcode == "scatter")
            )
        return whole


def kernel_cost(computation: Computation, i: Instruction) -> KernelCost | None:
    """The cost that a custom call states, or that of cuDNN's attention; None for instructions without a known cost."""
    if i.opcode != "custom-call":
        return None
    if not (found := _STATED.search(i.attributes)):
        return attention_cost(computation, i) or triton_cost(i)
    stated = {name: float(n) for name, n in re.findall(r'"(\w+)":"?(\d+)', found[1])}
    operands = [a for v in computation.operands_of(i) for a in v.arrays]
    sizes = [bits(a.dtype) // 8 for a in operands if a.dtype.startswith(("f", "bf"))]
    on_chip = sum(a.nbytes for a in (*operands, *i.arrays) if a.space not in (MAIN_MEMORY, HOST_MEMORY))
    return KernelCost(
        flops=stated.get("flops", 0.0),
        itemsize=max(min(sizes, default=4), 1),
        moved_bytes=max(stated.get("bytes_accessed", 0.0) - on_chip, 0.0),
        vector_ops=stated.get("transcendentals", 0.0) * VECTOR_OPS,
    )


def cycles_of(i: Instruction) -> int | None:
    """The compiler's cycle estimate of an instruction; None if it gives none."""
    found = re.search(r'"estimated_cycles":"(\d+)"', i.attributes)
    return int(found[1]) if found and int(found[1]) < UNKNOWN_CYCLES else None


def is_free(i: Instruction) -> bool:
    """Whether an instruction takes no time."""
    return i.opcode in FREE or (i.opcode == "custom-call" and i.target.startswith(FREE_CALLS))


def reaches_host(i: Instruction) -> bool:
    """Whether an instruction moves data to or from the host's memory."""
    return any(a.space == HOST_MEMORY for a in i.arrays)


def flops_of(computation: Computation, i: Instruction) -> float:
    """FLOPs of one product or convolution, without those of called computations; 0 for other instructions."""
    if i.opcode not in ("dot", "convolution", "custom-call"):
        return 0.0
    operands = [a for v in computation.operands_of(i) for a in v.arrays[:1]]
    if i.opcode == "convolution":
        return _convolution_flops(operands[0], operands[1], i.arrays[0], i)
    summed = i.attribute("lhs_contracting_dims")
    if i.opcode == "custom-call":
        found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', i.attributes)
        if not found or "gemm" not in i.target and "matmul" not in i.target:
            return 0.0
        summed = found[1]
    sizes = [operands[0].dims[int(n)] for n in re.findall(r"\d+", summed)]
    return 2.0 * i.arrays[0].elements * math.prod(sizes)


def _convolution_flops(left: Array, kernel: Array, result: Array, i: Instruction) -> float:
    """FLOPs of a convolution, whose `dim_labels` are, for example, `b01f_01io->b01f`."""
    inputs, taps, outputs = re.split("_|->", i.attribute("dim_labels"))
    window = dict(part.split("=") for part in i.attribute("window").split())
    pairs = 1
    for number, label in enumerate(sorted(c for c in inputs if c.isdigit())):
        read = {k: [int(n) for n in v.split("x")[number].split("_")] for k, v in window.items() if "rev" not in k}
        sizes = left.dims[inputs.index(label)], kernel.dims[taps.index(label)], result.dims[outputs.index(label)]
        pairs *= _output_tap_pairs(*sizes, read)
    batch, features = result.dims[outputs.index("b")], result.dims[outputs.index("f")]
    return 2.0 * pairs * batch * features * kernel.dims[taps.index("i")]


def _output_tap_pairs(size: int, taps: int, results: int, window: dict[str, list[int]]) -> int:
    """Number of pairs of an output and a tap that fall on an input, along one dimension."""
    low, dilation = window.get("pad", [0])[0], window.get("lhs_dilate", [1])[0]
    at = np.arange(results)[:, None] * window.get("stride", [1])[0] - low
    at = at + np.arange(taps)[None, :] * window.get("rhs_dilate", [1])[0]
    return int(((at >= 0) & (at <= (size - 1) * dilation) & (at % dilation == 0)).sum())


def _unreshaped(computation: Computation, value: Instruction) -> Instruction:
    """The instruction that a value comes from, without the reshapes and bitcasts after it."""
    while value.opcode in RESHAPES:
        value = computation.operands_of(value)[0]
    return value


def _update(operands: Sequence[Instruction], i: Instruction) -> Instruction:
    """The operand of an update that holds the new values."""
    return operands[1] if i.base == "dynamic-update-slice" else operands[-1]


def _copied_bytes(i: Instruction) -> float:
    """Bytes of main memory that an asynchronous copy or slice moves; its result is (to, from, ...) or ((from), to)."""
    arrays = [a for a in i.arrays if a.dims][:3]
    moved = min((a.nbytes for a in arrays[:2]), default=0.0)
    return moved * sum(a.space == MAIN_MEMORY for a in arrays[:2])


def _result_bytes(i: Instruction) -> float:
    """Bytes of an instruction's result in main memory."""
    return _main_memory_bytes(i.arrays)


def _main_memory_bytes(arrays: Sequence[Array]) -> float:
    """Bytes of the arrays that are in main memory."""
    return sum(a.nbytes for a in arrays if a.space == MAIN_MEMORY)
