"""The cost of one scheduled HLO instruction: operations of its products, bytes of memory.

Operations: 2 for each multiply-add of the matrix products and convolutions in an instruction and in the computations
that it calls.
    dot           2 x elements of the result x product of the contracted dimensions
    convolution   2 x batch x features of the result x input features of the kernel x, for each spatial dimension, the
                  pairs (output position, kernel position) that meet a real input, neither padding nor the holes of a
                  dilation (XLA:TPU writes batched products as such convolutions)
    custom calls  cuBLAS and cuDNN calls count in the same way. Any other call counts by its `cost_estimate`, or by the
                  `serialized_metadata` of a Triton kernel, if it has one. That also gives bytes and transcendental
                  operations, each of `VECTOR_OPS` vector operations. The stated bytes include operands and results in
                  the chip's own memory. They are subtracted once: the instructions that move them to the chip and back
                  count by themselves
Products at a higher precision take several passes of a TPU's matrix unit (3 for `high`, 6 for `highest`); 32-bit ones
run at half speed on a GPU (TF32). `work` includes that, `flops` does not. Elementwise arithmetic is not counted.

Bytes: operands plus results, of buffers in main memory only (for buffers on the chip, the copies there and back count).
Also inside a fusion,
    dynamic-slice, slice, gather         read only the slices of the operand
    dynamic-update-slice, scatter        write only the update into a buffer in place (scatter: read and write), even
                                         if the fusion first changes the tiling of the buffer
    bitcasts, tuples, forwarded values   move nothing
Bytes of the host's memory are counted separately.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from hlo import HBM, HOST, Array, Computation, Instruction, Module, bits_of

FREE = {
    "after-all", "bitcast", "conditional", "constant", "get-tuple-element", "opt-barrier", "optimization-barrier",
    "parameter", "partition-id", "replica-id", "tuple", "while", "call", "domain", "add-dependency",
}  # fmt: skip
FREE_CALLS = {
    "AllocateBuffer", "AssumeGatherIndicesInBound", "AsyncCollectiveDone", "AsyncCollectiveStart", "ConcatBitcast",
    "PrepareAsyncCallDone", "PrepareAsyncCallStart", "Sharding", "LayoutConstraint",
}  # fmt: skip
COLLECTIVES = {
    "all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "ragged-all-to-all",
    "reduce-scatter", "recv", "send",
}  # fmt: skip
SLICES = ("dynamic-slice", "slice", "gather")
UPDATES = ("dynamic-update-slice", "scatter")
MOVES = ("copy", "convert", "transpose")  # each element of the result is one of the operand
PASSES = {"high": 3, "highest": 6}
QUOTE = r"\22"  # how the text of a program writes a quotation mark in a string
# Operations on vectors for each exponential of an attention kernel: those on the mask, the maximum, the sum, and casts.
VECTOR_OPS = 9


@dataclass(frozen=True)
class Cost:
    """Operations of products (`flops`), in units of 16-bit operations (`work`), of vectors; bytes of each memory."""

    flops: float = 0.0
    work: float = 0.0
    hbm_bytes: float = 0.0
    host_bytes: float = 0.0
    vector: float = 0.0


def cost(module: Module, where: Computation, instruction: Instruction, gpu: bool = False) -> Cost:
    """Return the cost of an instruction, without the traffic of an asynchronous collective in it."""
    inner = [(where, instruction), *module.within(instruction)]
    products = [(flops(*pair), _slowdown(*pair, gpu)) for pair in inner]
    total, work = sum(n for n, _ in products), sum(n * slow for n, slow in products)
    moved = {space: sum(size for at, size in traffic(module, where, instruction) if at == space) for space in (0, 5)}
    if stated := stated_cost(instruction):
        on_chip = sum(
            leaf.bytes
            for one in (*where.inputs(instruction), instruction)
            for leaf in one.leaves
            if leaf.space not in (HBM, HOST)
        )
        return replace(stated, hbm_bytes=max(stated.hbm_bytes - on_chip, 0.0), host_bytes=moved[HOST])
    return Cost(total, work, moved[HBM], moved[HOST])


def stated_cost(instruction: Instruction) -> Cost | None:
    """Return the cost that a kernel states to the compiler; None for other instructions."""
    if instruction.opcode != "custom-call":
        return None
    text = instruction.attributes.replace(QUOTE, '"')
    found = re.search(r'"cost_estimate":\{([^}]*)\}', text) or re.search(r'serialized_metadata = "\{([^}]*)\}"', text)
    stated = {name: float(count) for name, count in re.findall(r'"(\w+)":\s*"?(\d+)', found[1] if found else "")}
    moved = stated.get("bytes_accessed", stated.get("moved_bytes", 0.0))
    operations, vector = stated.get("flops", 0.0), VECTOR_OPS * stated.get("transcendentals", 0.0)
    return Cost(operations, operations, moved, vector=vector) if stated else None


def is_free(instruction: Instruction) -> bool:
    """Whether an instruction itself takes no time."""
    if instruction.opcode == "custom-call":
        return instruction.attribute("custom_call_target") in {f'"{name}"' for name in FREE_CALLS}
    return instruction.opcode in FREE


def has_unknown_cost(instruction: Instruction) -> bool:
    """Whether an instruction is a kernel of unknown cost, apart from its operands and results."""
    target = instruction.attribute("custom_call_target") or ""
    known = is_free(instruction) or "__cu" in target or stated_cost(instruction) is not None
    return instruction.opcode == "custom-call" and not known


def flops(where: Computation, instruction: Instruction) -> float:
    """Return the operations of one product, and 0 for any other instruction."""
    if instruction.opcode == "custom-call":
        return _library_call_flops(where, instruction)
    operands = [operand.leaves[0] for operand in where.inputs(instruction) if operand.leaves]
    if instruction.opcode == "dot":
        contracted = _numbers(instruction.attribute("lhs_contracting_dims"))
        return 2.0 * instruction.leaves[0].elements * prod(operands[0].dims[dim] for dim in contracted)
    if instruction.opcode == "convolution":
        return _convolution(operands[0], operands[1], instruction.leaves[0], instruction)
    return 0.0


def traffic(module: Module, where: Computation, instruction: Instruction) -> list[tuple[int, float]]:
    """Return the bytes that an instruction reads and writes, with the memory of each buffer."""
    if is_free(instruction) or instruction.opcode in COLLECTIVES:
        return []
    inputs = where.inputs(instruction)
    if instruction.opcode == "fusion" or instruction.called:
        inside = module.computations[instruction.called[0]]
        read = [
            (leaf.space, _read_bytes(module, inside, inside.parameters[number], leaf.bytes))
            for number, operand in enumerate(inputs)
            for leaf in operand.leaves
            if number in inside.parameters
        ]
        written = _written(module, inside, instruction.leaves)
        return [*read, *written]
    opcode, result = instruction.opcode, instruction.leaves[0] if instruction.leaves else Array("token", ())
    buffer = inputs[0].leaves[0] if inputs and inputs[0].leaves else result
    if opcode in SLICES:
        rest = [(leaf.space, leaf.bytes) for operand in inputs[1:] for leaf in operand.leaves]
        return [(buffer.space, result.bytes), (result.space, result.bytes), *rest]
    if opcode in UPDATES:
        update = _update(where, instruction)
        again = 2 if opcode == "scatter" else 1
        return [(result.space, again * update.bytes), (update.space, update.bytes)]
    return [(leaf.space, leaf.bytes) for one in (*inputs, instruction) for leaf in one.leaves]


def async_copy_cost(module: Module, where: Computation, start: Instruction) -> Cost:
    """Return the cost of an asynchronous copy, slice or fusion, from its `-start`."""
    base = start.opcode.removesuffix("-start")
    if isinstance(start.shape, tuple) and base == "copy":  # (destination, source, context)
        result, whole = start.leaves[0], start.leaves[1]
    else:  # ((operands), result, context)
        result = start.shape[1] if isinstance(start.shape, tuple) and len(start.shape) > 1 else start.shape
        whole = start.leaves[0]
    if start.called:
        kind = "fusion" if start.attribute("calls") else "async-start"  # a call's computation is its `to_apply`
        plain = Instruction(start.name, result, kind, start.arguments, start.attributes)
        return cost(module, where, plain)
    size = result.bytes if isinstance(result, Array) else sum(leaf.bytes for leaf in start.leaves)
    ends = [whole.space, result.space if isinstance(result, Array) else HBM]
    if base == "dynamic-update-slice":  # of a buffer that stays where it is
        update = _update(where, start)
        size, ends[0] = update.bytes, update.space
    return Cost(hbm_bytes=size * ends.count(HBM), host_bytes=size * ends.count(HOST))


def _read_bytes(module: Module, where: Computation, value: Instruction, whole: float) -> float:
    """Return how many bytes of a parameter a fused computation reads."""
    total = 0.0
    for user in where.users.get(value.name, ()):
        first = user.operands[0] == value.name
        if user.opcode in ("bitcast", "get-tuple-element", "reshape"):
            total += _read_bytes(module, where, user, whole)
        elif user.opcode in SLICES and first:
            total += user.leaves[0].elements * bits_of(value.leaves[0].dtype) / 8
        elif user.opcode in UPDATES and first and user.operands.count(value.name) == 1:
            continue  # written in place: `_written` counts it
        elif _moves(module, user) and user is not where.root:  # relayouted before it is sliced
            total += _read_bytes(module, where, user, user.leaves[0].bytes) / user.leaves[0].bytes * whole
        elif user.called and user.opcode != "custom-call":
            inside = module.computations[user.called[0]]
            places = [number for number, name in enumerate(user.operands) if name == value.name]
            total += sum(_read_bytes(module, inside, inside.parameters[place], whole) for place in places)
        elif not (is_free(user) or user.opcode in COLLECTIVES):
            return whole
    return min(total, whole)


def _moves(module: Module, one: Instruction) -> bool:
    """Whether an instruction in a fusion only changes the order or the type of its one operand's elements."""
    if one.opcode != "fusion":
        return one.opcode in MOVES
    inside = module.computations[one.called[0]]
    rest = [each for each in inside.instructions if each.opcode not in ("parameter", "bitcast", "reshape")]
    return len(one.operands) == 1 and all(each.opcode in MOVES for each in rest)


def _written(module: Module, inside: Computation, leaves: Sequence[Array]) -> list[tuple[int, float]]:
    """Return the bytes that a fused computation writes to each of its results, with the memory of each."""
    roots = inside.inputs(inside.root) if inside.root.opcode == "tuple" else [inside.root]
    if len(roots) != len(leaves):
        return [] if is_free(inside.root) else [(leaf.space, leaf.bytes) for leaf in leaves]
    return [
        (leaf.space, _stored_bytes(module, inside, root, leaf.bytes)) for root, leaf in zip(roots, leaves, strict=True)
    ]


def _stored_bytes(module: Module, inside: Computation, root: Instruction, whole: float) -> float:
    root = _without_bitcasts(inside, root)
    if root.opcode == "parameter" or root.opcode in COLLECTIVES or is_free(root):
        return 0.0
    if root.opcode == "fusion":
        deeper = module.computations[root.called[0]]
        return sum(size for _, size in _written(module, deeper, root.leaves)) if len(root.leaves) == 1 else whole
    if root.opcode in UPDATES and _is_in_place(module, inside, inside.inputs(root)[0]):
        return _update(inside, root).bytes * (2 if root.opcode == "scatter" else 1)
    return whole


def _is_in_place(module: Module, inside: Computation, buffer: Instruction) -> bool:
    """Return whether an update of `buffer` inside a fusion writes in place into an operand of the fusion.

    XLA:TPU may first change the tiling of the operand, by an inner fusion whose result aliases it. The kernel then
    writes the update in the operand's own tiling; it does not copy the operand.
    """
    buffer = _without_bitcasts(inside, buffer)
    if "output_to_operand_aliasing" in buffer.attributes and _moves(module, buffer):
        buffer = _without_bitcasts(inside, inside.inputs(buffer)[0])
    return buffer.opcode == "parameter"


def _without_bitcasts(where: Computation, value: Instruction) -> Instruction:
    while value.opcode in ("bitcast", "reshape"):
        value = where.inputs(value)[0]
    return value


def _update(where: Computation, instruction: Instruction) -> Array:
    """Return the values that an update writes: the second operand, for a scatter the last one."""
    place = 1 if instruction.opcode.startswith("dynamic-update-slice") else -1
    return where.inputs(instruction)[place].leaves[0]


def _slowdown(where: Computation, instruction: Instruction, gpu: bool) -> float:
    """Return the time of a product relative to one of the same size at 16 bits."""
    if instruction.opcode not in ("dot", "convolution", "custom-call") or not where.inputs(instruction):
        return 1.0
    dtypes = [leaf.dtype for operand in where.inputs(instruction)[:2] for leaf in operand.leaves]
    if all(bits_of(dtype) == 8 and dtype != "pred" for dtype in dtypes):
        return 0.5
    if gpu:
        return 2.0 if any(bits_of(dtype) == 32 for dtype in dtypes) else 1.0
    precision = (instruction.attribute("operand_precision") or "").split(",")
    return float(max(PASSES.get(name.strip(), 1) for name in precision))


def _convolution(lhs: Array, kernel: Array, result: Array, instruction: Instruction) -> float:
    left, middle, right = re.split(r"_|->", instruction.attribute("dim_labels") or "")
    window = _window(instruction)
    pairs = 1
    for dim in (label for label in left if label.isdigit()):
        sizes = (lhs.dims[left.index(dim)], kernel.dims[middle.index(dim)], result.dims[right.index(dim)])
        pairs *= _multiplied_pairs(*sizes, {key: value[int(dim)] for key, value in window.items()})
    return 2.0 * pairs * result.dims[right.index("b")] * result.dims[right.index("f")] * kernel.dims[middle.index("i")]


def _window(instruction: Instruction) -> dict[str, list[list[int]]]:
    text = instruction.attribute("window") or ""
    fields = dict(part.split("=") for part in text.split())
    return {
        key: [[int(n) for n in each.split("_")] for each in value.split("x")]
        for key, value in fields.items()
        if key in ("stride", "pad", "lhs_dilate", "rhs_dilate")
    }


def _multiplied_pairs(size: int, kernel: int, result: int, window: dict[str, list[int]]) -> int:
    """Count the pairs of an output and a kernel position that meet an input, in one dimension."""
    stride, low = window.get("stride", [1])[0], window.get("pad", [0])[0]
    spread, gap = window.get("lhs_dilate", [1])[0], window.get("rhs_dilate", [1])[0]
    reach = (size - 1) * spread
    return sum(
        0 <= at <= reach and at % spread == 0
        for tap in range(kernel)
        for at in range(tap * gap - low, tap * gap - low + result * stride, stride)
    )


def _library_call_flops(where: Computation, instruction: Instruction) -> float:
    target, shapes = instruction.attribute("custom_call_target") or "", instruction.leaves
    operands = [leaf for operand in where.inputs(instruction) for leaf in operand.leaves]
    if "__cublas" in target and (
        found := re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes)
    ):
        contracted = _numbers(found[1].replace('"', ""))
        return 2.0 * shapes[0].elements * prod(operands[0].dims[dim] for dim in contracted)
    if "__cudnn$conv" in target:
        left, right, result = operands[0], operands[1], shapes[0]
        if "BackwardInput" in target:
            left, result = result, left
        elif "BackwardFilter" in target:
            right, result = result, right
        return _convolution(left, right, result, instruction)
    if "__cudnn$fmha" in target:
        return _attention(operands[0], operands[1], operands[2], instruction)
    return 0.0


def _attention(q: Array, k: Array, v: Array, instruction: Instruction) -> float:
    """Return the operations of cuDNN's attention: 2 products of each visible pair, and 5 for its gradients."""
    rows, columns = q.dims[1], k.dims[1]
    causal = re.search(r'"mask_type":\s*"[A-Z_]*CAUSAL', instruction.attributes) is not None
    found = re.search(r'"sliding_window_length":\s*"?(\d+)', instruction.attributes)
    window = int(found[1]) if found and int(found[1]) else max(rows, columns)
    last = [min(row, columns - 1) if causal else min(row + window, columns) - 1 for row in range(rows)]
    visible = sum(max(end - max(row - window + 1, 0) + 1, 0) for row, end in enumerate(last))
    products = 5 if "Backward" in (instruction.attribute("custom_call_target") or "") else 2
    return float(q.dims[0] * q.dims[2] * visible * products * (q.dims[3] + v.dims[3]))


def _numbers(text: str | None) -> list[int]:
    return [int(part) for part in (text or "").split(",") if part.strip()]
