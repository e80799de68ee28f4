"""How long the compilers wait before they compute or scatter gradients.

XLA:GPU's latency-hiding scheduler orders a block from the end. Only a reduction and the update follow a product that
sums over the batch. In the body of a loop it runs right before its first user, or at the end if a stack takes it. In
straight code it runs after the loop that comes before its first user. If there is none, it runs before the next such
product of equal shapes, so about one layer late. Until then its operands stay in memory.

Compiled for h100 (jaxlib 0.10.2), the step of a scanned Llama computes the gradient of its head after the loop of the
backward pass, and those of a layer's MLP after the layer's attention.

In the body of a loop, all other products also run right before their first user, because XLA:GPU orders the body from
its result: an operator comes when something needs it. Compiled for h100 with plain attention, the gradient of the
values is computed after that of the scores, although the program has it first. Until then, the attention weights stay
in memory: 0.5 GiB of the 6.4 GiB of a step of Llama with full rematerialization.

XLA:TPU runs the products where the program has them. Where a reduce-scatter becomes an all-reduce and a slice
(`Topology.compiled`), it fuses the slice into the operators that take the shard. So the whole sum of the gradient of a
head is held over the loop of the backward pass. Compiled for v6e:16x16 (libtpu 0.0.42), `fsdp:256`, GPT-3 with 24
layers and full rematerialization holds 1.15 GiB for it, of 13.1. An asynchronous reduce-scatter can end after a loop
that follows it, so the same holds where reduce-scatters are asynchronous. Compiled for v5p:4x8x8, gpt-oss-20b computes
the gradient of its head before the loop of the backward pass and scatters it after the loop. It takes 1.1 GiB.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autoshard.sharding.program.operator_kinds import CONTRACTIONS
from autoshard.spmdrules.ir.program import Block, Op, Program, inlined, users_of

_MOVES = ("transpose", "convert_element_type", "reshape", "squeeze", "broadcast_in_dim")


def points(program: Program, is_delayed: Callable[[Op], bool] | None) -> np.ndarray:
    """Return when each operator runs: by its number, counted as in `Program.ops`, its place in the order.

    Args:
        program: the program.
        is_delayed: whether an operator of straight code runs as late as it can. In loops, all products do. The others
            run in the order of the program. None: so do all.
    """
    number = {id(op): n for n, op in enumerate(program.ops())}
    time = np.arange(len(number), dtype=float)
    blocks = [program.block] if is_delayed is not None else []
    while blocks and is_delayed is not None:
        block = blocks.pop()
        ops = list(inlined(block))
        blocks += [inner for op in ops for inner in op.blocks]
        if delayed := [op for op in ops if (block.loop and op.name in CONTRACTIONS) or is_delayed(op)]:
            users = users_of(ops)
            if block.loop:  # the product that computes the carry stays in its place
                delayed = [op for op in delayed if is_delayed(op) or _first_user(op.results[0], users)]
            following: dict[str, Op] = {}
            for op in reversed(delayed):
                key = str([v.aval for v in op.eqn.invars])
                time[number[id(op)]] = _latest(block, op, users, number, following.get(key))
                following[key] = op
    found = np.empty(len(time), int)
    found[np.argsort(time, kind="stable")] = np.arange(len(time))
    return found


def held_until(program: Program) -> np.ndarray:
    """Return the number of the operator until which the whole sum of each operator's result is held.

    It is the first user of the result, or the end of the last loop if there is none. In straight code, without a loop
    in between, it is the operator itself: the sums of a few layers are scattered together, and none waits long.
    """
    number = {id(op): n for n, op in enumerate(program.ops())}
    found, blocks = np.arange(len(number)), [program.block]
    while blocks:
        ops = list(inlined(blocks.pop()))
        blocks += [inner for op in ops for inner in op.blocks]
        loops = [(number[id(op)], number[id(last_operator(op))]) for op in ops if op.blocks]
        users = users_of(ops) if loops else {}
        for op in ops if loops else ():
            if len(op.results) == 1 and not op.blocks:
                user, at = _first_user(op.results[0], users), number[id(op)]
                ends = [last for first, last in loops if at < first < (number[id(user)] if user else len(number))]
                if ends:
                    found[at] = number[id(user)] if user else ends[-1]
    return found


def _first_user(value: int, users: dict[int, list[Op]]) -> Op | None:
    """Return the first operator that takes a value, after operators that only move it; None if no operator does."""
    while len(taken := users.get(value, [])) == 1 and taken[0].name in _MOVES and len(taken[0].results) == 1:
        (value,) = taken[0].results
    return taken[0] if taken else None


def _latest(block: Block, op: Op, users: dict[int, list[Op]], number: dict[int, int], following: Op | None) -> float:
    """Return the time of a delayed product; `following` is the next one of equal shapes."""
    user = _first_user(op.results[0], users)
    first = number[id(user)] if user else number[id(last_operator(block.ops[-1]))] + 1
    if block.loop:
        return max(first - 0.5, number[id(op)])
    loops = [one for one in inlined(block) if one.blocks and number[id(op)] < number[id(one)] < first]
    if loops:
        return number[id(last_operator(loops[-1]))] + 0.75  # after what is delayed in the loop
    return number[id(op)] if following is None else max(min(first, number[id(following)]) - 0.5, number[id(op)])


def last_operator(op: Op) -> Op:
    """Return the last operator that is nested in an operator; itself if none is, as in a loop that moves its carry."""
    nested = [block.ops[-1] for block in op.blocks if block.ops]
    return last_operator(nested[-1]) if nested else op
