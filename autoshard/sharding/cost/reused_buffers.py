"""Which results XLA stores in the buffer of another value.

    zeros.at[i].add(u) + x        becomes x.at[i].add(u), in the buffer of x
    y = f(x), elementwise         is written over x, if x has the same shape and type size and nothing takes it later
    ys of a scan                  elementwise results are written straight into the stack of all iterations
    xs of a scan                  slices are read from the stack, except by operators that read whole arrays from memory
    casts of slices               on TPU the stack of parameters is cast once, before the loop
    dimensions of size 1 on a device  are added, removed and moved without a copy
    stacks of layers              are split into groups, and joined again, without a copy

The gradient of a loss that picks the target's logit with a gather is such a sum: its scatter is as large as the
logits. Compiled for v5e (jaxlib 0.10.2, libtpu 0.0.42) and for h100, the step of a language model has one such array,
not two; the gradient of its logits is in the place of the logits; and stacks of residuals have no copies of one layer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Set

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.cost.fusion import Fusion
from autoshard.sharding.cost.kernels.kernel_kinds import is_kernel, reads_memory
from autoshard.sharding.program.array_sizes import itemsize
from autoshard.sharding.program.operator_kinds import CONTRACTIONS
from autoshard.spmdrules.ir.program import Op, Program, inlined, walk

_RESHAPES = ("squeeze", "reshape", "expand_dims")
_REORDERS = ("transpose", "rev", "concatenate", "pad")
_STACK_DIMS = 3  # number of dimensions of a stack of matrices


def scattered_into_sums(program: Program, written: Set[int]) -> frozenset[int]:
    """Return results of scatters into zeros that are only added to another array: they have no buffer of their own.

    Args:
        program: the program.
        written: the values that have a buffer. If the other array is a product without one, such as the other gradient
            of a tied embedding, which is computed inside of the update, the scatter keeps its own.
    """
    ops, kept = [], set(program.outputs)
    blocks = [program.block]
    while blocks:
        for op in inlined(blocks.pop()):
            ops.append(op)
            blocks += op.blocks
            kept.update(v for block in op.blocks for v in block.outputs)
    scatters = [op for op in ops if op.name == "scatter-add" and op.results[0] not in kept]
    users: dict[int, list[Op]] = {op.results[0]: [] for op in scatters}
    for op in ops if scatters else ():
        for v in users.keys() & op.operands:
            users[v].append(op)
    needed = {v for scatter in scatters for op in (scatter, *users[scatter.results[0]]) for v in op.operands}
    maker = {v: op for op in ops if needed for v in op.results if v in needed}
    return frozenset(
        op.results[0]
        for op in scatters
        if _is_constant(maker.get(op.operands[0]))
        and _is_one_sum(users[op.results[0]])
        and all(v in written or not _is_product(maker.get(v)) for v in users[op.results[0]][0].operands)
    )


def parts_of_stacks(program: Program, fuses_operands: bool) -> frozenset[int]:
    """Return the values of loops that are a part of a stack around the loop, and have no buffer of their own.

    Args:
        program: the program.
        fuses_operands: whether products read slices of a stack (TPU).
    """
    found: set[int] = set()
    for op in program.ops():
        if op.name != "scan":
            continue
        (body,) = op.blocks
        ops = list(inlined(body))
        maker = {v: one for one in ops for v in one.results}
        taken = {v for one in ops for v in one.operands if reads_memory(one) or _is_read_whole(one, fuses_operands)}
        stacked = {tie.inner for tie in op.edges if tie.stacked}
        found |= {v for v in stacked & {*body.inputs} if v not in taken}
        found |= {v for v in stacked & {*body.outputs} if v in maker and _is_elementwise(maker[v])}
    return frozenset(found)


def _is_read_whole(op: Op, fuses_operands: bool) -> bool:
    return op.name in CONTRACTIONS and not fuses_operands


def _is_elementwise(op: Op) -> bool:
    return op.rule is not None and not op.blocks and not is_kernel(op)


def overwritten(
    program: Program,
    fusion: Fusion,
    is_last: Callable[[int, Op], bool],
    is_alike: Callable[[int, int], bool],
    *,
    on_gpu: bool,
    on_tpu: bool = False,
) -> tuple[dict[int, tuple[Op, int]], dict[int, Op]]:
    """Find the kernels that write a result over one of their operands.

    Args:
        program: the program.
        fusion: its kernels.
        is_last: whether an operator is the last one that needs a value.
        is_alike: whether two values have the same bytes and are sharded alike.
        on_gpu: whether the program is compiled for GPUs. There, a kernel also computes a reduction that only it takes,
            such as that of a softmax. It reads whole rows, so it overwrites nothing. On other platforms, a kernel with
            several results runs at its first operator.
        on_tpu: whether the program is compiled for TPUs. There, nothing is written over a result of a kernel with
            several results (`_several_results`).

    Returns:
        Two mappings. The first is from each overwritten operand to the operator at which its kernel runs, and the
        result. The second is from each result that is written before its own operator to the operator at which its
        kernel runs.
    """
    found: dict[int, tuple[Op, int]] = {}
    early: dict[int, Op] = {}
    own = _reduced_for_one(fusion) if on_gpu else frozenset()
    ops = list(program.ops())
    maker = {v: op for op in ops for v in op.results if not op.blocks}
    kept = _several_results(program, fusion, maker) if on_tpu else frozenset()
    place = {id(op): n for n, op in enumerate(ops)}
    readers = defaultdict[int, list[int]](list)
    not_only_products: set[int] = set()
    for number, kernel in fusion.kernels.items():
        for v in kernel.reads:
            readers[v].append(place[number])
        not_only_products.update(kernel.reads if kernel.op.name not in CONTRACTIONS else ())
    for op in ops:
        kernel = fusion.kernels.get(id(op))
        if kernel is None or own & {*kernel.reads}:
            continue
        if op.name in CONTRACTIONS and {*kernel.writes}.isdisjoint(op.results):
            at = last = maker[kernel.writes[0]]  # the end of the chain of elementwise operators that it computes
        elif _is_elementwise(op):
            at = last = op
            known = all(v not in maker or place[id(maker[v])] < place[id(op)] for v in kernel.reads)
            if not on_gpu and len(kernel.writes) > 1 and known:  # it can run at its first operator
                last = max((maker[v] for v in kernel.writes), key=lambda one: place[id(one)])
        else:
            continue
        # Elementwise results that only products take, such as the gradient of logits, are computed in these products.
        stays = kept if op.name in CONTRACTIONS or not not_only_products.isdisjoint(kernel.writes) else frozenset()
        free = [
            v for v in kernel.reads if v not in found and v not in stays
            and is_last(v, last) and (at is last or max(readers[v]) <= place[id(at)])
        ]  # fmt: skip
        for result in kernel.writes:
            alike = (v for v in free if is_alike(v, result) and _reaches_in_place(v, maker[result], maker, fusion))
            if (v := next(alike, None)) is not None:
                found[v] = at, result
                free.remove(v)
                early.update((each, at) for each in kernel.writes if at is not last)
    return found, early


def _several_results(program: Program, fusion: Fusion, maker: Mapping[int, Op]) -> frozenset[int]:
    """Return the results of kernels with several results, if products or opaque operators are among these.

    A product's kernel also computes stored elementwise results that read no other array of their size. An example is
    the `erfc` of a gelu. Compiled for v5e, v5p and v6e (libtpu 0.0.42.1), 31 training steps write 100 results over the
    single result of a kernel, and none over one of several.
    """
    found: set[int] = set()
    products = {v for k in fusion.kernels.values() if k.op.name in CONTRACTIONS for v in k.writes}
    for kernel in fusion.kernels.values():
        if not _is_elementwise(kernel.op):
            found.update(kernel.writes if len(kernel.writes) > 1 else ())
        elif {*kernel.writes} == {*kernel.op.results}:
            large = [v for v in kernel.reads if program.avals[v].size >= kernel.op.eqn.outvars[0].aval.size]
            if len(large) == 1 and large[0] in products:
                found.update((*large, *kernel.writes))
    return frozenset(found)


def _reaches_in_place(value: int, op: Op, maker: Mapping[int, Op], fusion: Fusion) -> bool:
    """Whether each element of an operator's result depends on the same element of a value alone.

    A rotary embedding does not: it reads the other half of a head, too.
    """
    todo, seen, size = [op], {id(op)}, op.eqn.outvars[0].aval.size
    while todo:
        one = todo.pop()
        if one.name in _REORDERS or one.name in CONTRACTIONS or one.eqn.outvars[0].aval.size != size:
            if _depends_on(value, one, maker, fusion):
                return False
            continue
        for v in one.operands:
            if v >= 0 and v not in fusion.written and v in maker and id(maker[v]) not in seen:
                seen.add(id(maker[v]))
                todo.append(maker[v])
    return True


def _depends_on(value: int, op: Op, maker: Mapping[int, Op], fusion: Fusion) -> bool:
    todo, seen = [op], {id(op)}
    while todo:
        for v in todo.pop().operands:
            if v == value:
                return True
            if v >= 0 and v not in fusion.written and v in maker and id(maker[v]) not in seen:
                seen.add(id(maker[v]))
                todo.append(maker[v])
    return False


def _reduced_for_one(fusion: Fusion) -> frozenset[int]:
    """Return the results of reductions that a single kernel reads."""
    reads = Counter(v for kernel in fusion.kernels.values() for v in kernel.reads)
    reductions = (kernel for kernel in fusion.kernels.values() if kernel.op.name.startswith("reduce_"))
    return frozenset(v for kernel in reductions for v in kernel.writes if reads[v] == 1)


def _is_constant(op: Op | None) -> bool:
    """Whether an operator repeats one number."""
    return op is not None and op.name == "broadcast_in_dim" and not op.eqn.invars[0].aval.shape


def _is_product(op: Op | None) -> bool:
    return op is not None and op.name in CONTRACTIONS


def _is_one_sum(users: list[Op]) -> bool:
    """Whether the only user adds two different arrays."""
    return len(users) == 1 and users[0].name in ("add", "add_any") and len(set(users[0].operands)) == 2


def cast_stacks(program: Program, parameters: Mapping[int, int]) -> dict[int, tuple[float, Op, Op]]:
    """Return stacked parameters of which XLA:TPU makes a copy in a narrower type before the loops that take slices.

    A loop casts each slice. The cast does not depend on the iteration, so the compiler casts the whole stack once.
    Compiled for v5e (libtpu 0.0.42), the steps of GPT 1.3B hold all of their matrices in bfloat16 at their peak.

    Args:
        program: the program.
        parameters: value -> the parameter that it equals, up to slices and casts.

    Returns:
        Parameter -> the bytes of the copy as a fraction of its own, and the first and last of the program's outermost
        operators that use it.
    """
    found: dict[int, tuple[float, Op, Op]] = {}
    for outer in program.block.ops:
        for op in (each for block in outer.blocks for each in walk(block)):
            if op.name != "convert_element_type" or op.operands[0] not in parameters:
                continue
            source, before, after = parameters[op.operands[0]], program.avals[op.operands[0]], op.eqn.outvars[0].aval
            stack = program.avals[source]
            if stack.ndim > before.ndim and before.dtype == stack.dtype and itemsize(after) < itemsize(before):
                first = found[source][1] if source in found else outer
                found[source] = itemsize(after) / itemsize(before), first, outer
    return found


def views(axes: LogicalAxes) -> frozenset[int]:
    """Return the values that are another value under another shape on each device: XLA computes and stores nothing.

    That holds for dimensions of size 1 that are added or removed. It also holds if the layers of a stack are split into
    groups or stages, or if a pipeline's dimension of stages moves: a device has one stage, so the dimension has size 1
    there.
    """
    return frozenset(
        op.results[0]
        for op in axes.program.ops()
        if len(op.operands) == 1
        and op.operands[0] >= 0
        and (_keeps_shape(op) or _groups_layers(op) or _moves_stages(axes, op))
    )


def _keeps_shape(op: Op) -> bool:
    if op.name not in _RESHAPES:
        return False
    before, after = op.eqn.invars[0].aval.shape, op.eqn.outvars[0].aval.shape
    return [n for n in before if n != 1] == [n for n in after if n != 1]


def _groups_layers(op: Op) -> bool:
    """Whether an operator splits the first dimension of a stack of matrices in two, or joins its first two dimensions.

    Tiles in memory span the last two dimensions, so the elements stay where they are. Compiled for v6e (libtpu 0.0.42),
    a scan over groups of four layers reads the parameters from the stack of all layers.
    """
    if op.name != "reshape":
        return False
    one, other = sorted((op.eqn.invars[0].aval.shape, op.eqn.outvars[0].aval.shape), key=len)
    return len(one) >= _STACK_DIMS and one[1:] == other[2:]


def _moves_stages(axes: LogicalAxes, op: Op) -> bool:
    if axes.stages is None or op.name not in ("transpose", "reshape"):
        return False
    dims, after = (axes.of_value[v] for v in (op.operands[0], op.results[0]))
    if op.name == "reshape":  # of the stages and their layers, which are in the first dimensions
        parts, split = ([c for dim in own for c in dim] for own in (dims, after))
        return parts == split and any(axes.stages in dim for dim in (*dims[:1], *after[:1]))
    others = [d for d in op.eqn.params["permutation"] if dims[d] != (axes.stages,)]
    return others == sorted(others) and len(others) < len(dims)
