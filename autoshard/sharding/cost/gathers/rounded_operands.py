"""The float32 operands of products that XLA:TPU gathers in 16 bits.

At JAX's default precision, a TPU multiplies 32-bit floats as bfloat16. The compiler rounds a weight before it gathers
it, so that fewer bytes move. It gathers 32 bits if another operator takes the gathered weight, too, or if the product
asks for a higher precision.

Compiled for v5e:2x4 with `fsdp:8` (libtpu 0.0.42.1), steps in float32 gather half of their parameters' bytes: matrices,
stacks of layers, heads, and kernels of convolutions. With `precision="highest"`, they gather all of them. Gradients are
reduced in 32 bits. With `gather="prefetch"`, a loop over layers gathers 32 bits, because its carry holds the gathered
parameters. With `gather="sequential"` a loop gathers 16 bits, and layers in a row gather some parameters in 32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.cost.constants import PRODUCT_OPERAND_BYTES
from autoshard.sharding.layout.operator_strategy import Move
from autoshard.sharding.program.array_sizes import itemsize
from autoshard.sharding.program.operator_kinds import CONTRACTIONS, is_decision_point
from autoshard.spmdrules.ir.program import Op

_GATHERS = ("all-gather", "all-to-all", "collective-permute")


def rounded_operands(axes: LogicalAxes, roles: Roles, platform: str) -> frozenset[int]:
    """Return the float32 operands that only products at default precision take.

    Elementwise operators, such as the update of a parameter, do not matter: they take shards and gather nothing.
    Weights that the program computes, rearranges or joins are left out. The lowering constrains those in their own type
    before they are gathered. On platforms other than `tpu`, the set is empty.

    Args:
        axes: the program's logical axes.
        roles: their roles.
        platform: the platform of the target.
    """
    if platform != "tpu":
        return frozenset()
    aliases, layers = axes.parameter_aliases, axes.stack_positions
    constrained = {*roles.computed_weights, *roles.rearranged_weights, *roles.joined.origin}
    operands: defaultdict[Any, set[int]] = defaultdict(set)  # what is gathered at once -> the operands of products
    whole: set[Any] = set()  # what other operators take, too
    for op in axes.program.ops():
        if not is_decision_point(op) or op.blocks:
            continue
        rounds = op.name in CONTRACTIONS and _has_default_precision(op)
        for v, atom in zip(op.operands, op.eqn.invars, strict=True):
            if v < 0:
                continue
            key = aliases.get(v, v), layers.get(v)
            if rounds and v not in constrained and atom.aval.dtype == jnp.float32:
                operands[key].add(v)
            elif itemsize(atom.aval) > PRODUCT_OPERAND_BYTES:
                whole.add(key)
    return frozenset(v for key, values in operands.items() if key not in whole for v in values)


def with_rounded_operands(moves: Sequence[Move], rounded: Iterable[int]) -> tuple[Move, ...]:
    """Return the moves of an operator, with half of the bytes where a rounded operand is gathered.

    Args:
        moves: the moves.
        rounded: the positions of the rounded operands among the operands of the operator.
    """
    share = PRODUCT_OPERAND_BYTES / jnp.dtype(jnp.float32).itemsize
    return tuple(
        move._replace(local_bytes=move.local_bytes * share, wire_bytes=move.wire_bytes * share)
        if move.array in rounded and move.kind in _GATHERS and not move.hops
        else move
        for move in moves
    )


def _has_default_precision(op: Op) -> bool:
    """Whether a product multiplies 32-bit floats as the backend does by default."""
    precision = op.eqn.params.get("precision")
    each = precision if isinstance(precision, tuple) else (precision,)
    return all(p is None or p == lax.Precision.DEFAULT for p in each)
