"""What is known of each primitive that JAX has: it has a rule, or it is structure, or it is listed here with a reason.

    rule         registered by one of the families
    structure    a call, a loop or a branch: what it means is in the jaxprs that it holds (see `program`)
    no rule      may stand in a program and can be anything: its operands are gathered, its results are everywhere, the
                 plan names it and warns
    exempt       has no place in the program of a train step; one that stands there all the same is whole and named, too

The test finds every primitive alive in a fresh process, so that a new version of JAX cannot add one unseen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from autoshard import _compat
from autoshard.spmdrules.core.registry import has_rule
from autoshard.spmdrules.ir.program import CALLS, CONTROL

StatusKind = Literal["rule", "structure", "no rule", "exempt"]

STRUCTURE = CALLS | CONTROL

_HOST = "runs Python on one device's host, which gets the whole operands and gives the whole results; call it on shards"
_WHOLE = "every device runs it on whole operands"
_KERNEL = f"a kernel that only its author knows how to cut: {_WHOLE}; put @autoshard.operator with its rule around it"
NO_RULE: Mapping[str, str] = {
    "pure_callback": _HOST + " from a function with @autoshard.operator",
    "io_callback": _HOST + " where its effect allows that, from a function with @autoshard.operator",
    "ffi_call": _KERNEL,
    "pallas_call": _KERNEL,
    "mpmd_map": _KERNEL,
    "cudnn_fusion": _KERNEL,
    "call_exported": "a program that was compiled apart, for devices of its own: it gets whole operands; call what it "
    "was made of instead",
}

# Primitives whose rules no test can run on CPU devices: their texts are compared only.
_NVIDIA = "runs on NVIDIA's GPUs only"
_COMPILED = "exists in compiled programs only"
_NO_ARRAY = "no array of such a type leaves a compiled program"
UNRUN: Mapping[str, str] = {
    **{f"dot_product_attention_{kind}{end}": _NVIDIA
       for kind in ("fwd", "bwd", "fp8_fwd", "fp8_bwd") for end in ("", "_wrapper")},
    "scaled_matmul": _NVIDIA, "scaled_matmul_wrapper": _NVIDIA,
    "with_memory_space_constraint": _COMPILED, "relayout": _COMPILED,
    "to_edtype": _NO_ARRAY, "from_edtype": _NO_ARRAY,
}  # fmt: skip

_INSIDE = "talks to other devices over a named axis, inside a shard_map, where nothing is planned"
_REFERENCE = "makes, reads or writes memory in place, as kernels do"
_PALLAS = "stands inside a Pallas kernel"
_OBJECT = "makes, reads or writes a Python object (a box, a log, a variable), which has no sharding"
_EXPORT = "computes sizes that are not known, which a plan must know"
_CHECK = "an error check that checkify turns into values before the program is staged"
_TOKEN = "orders effects; it has no elements"
_STEP = "a step of tracing or of differentiation that leaves no equation"
_SPARSE = "works on the parts of an experimental sparse array"
# A primitive's name, or the module that it is at home in, without the first words of those that JAX keeps private.
EXEMPT: Mapping[str, str] = {
    "lax.parallel": _INSIDE, "pvary": _INSIDE, "reduced_vary_cast": _INSIDE, "reduced_vary_cast_p": _INSIDE,
    "state": _REFERENCE, "new_ref": _REFERENCE, "empty_ref": _REFERENCE, "free_ref": _REFERENCE, "freeze": _REFERENCE,
    "accum_grad_in_ref": _REFERENCE,
    "pallas": _PALLAS,
    "hijax": _OBJECT, "flax.nnx.variablelib": _OBJECT,
    "export": _EXPORT,
    "checkify": _CHECK,
    "create_token": _TOKEN, "after_all": _TOKEN,
    "stage": _STEP, "zeros_like": _STEP, "custom_lin": _STEP, "custom_jvp_call_jaxpr": _STEP, "unreachable": _STEP,
    "call_hi_primitive_linearized": _STEP,
    "jax.experimental.sparse": _SPARSE,
}  # fmt: skip


@dataclass(frozen=True)
class Status:
    """Where a primitive stands.

    Attributes:
        kind: see the module's head.
        reason: why it has no rule; empty where it has one or is structure.
        row: what lists it in `NO_RULE` or `EXEMPT`.
    """

    kind: StatusKind
    reason: str = ""
    row: str = ""


def status(primitive: Any) -> Status | None:
    """Where a primitive stands, None where nobody has said anything of it.

    Example:
        >>> from jax import lax
        >>> standing(lax.dot_general_p).kind
        'rule'
    """
    return statuses([primitive])[primitive]


def statuses(primitives: Iterable[Any]) -> dict[Any, Status | None]:
    """`standing` for many at once: where a primitive is at home is looked up in every module."""
    wanted = list(primitives)
    homes = _compat.homes(wanted)
    return {primitive: _status(primitive, homes[primitive]) for primitive in wanted}


def _status(primitive: Any, homes: set[str]) -> Status | None:
    name = primitive.name
    if has_rule(primitive):
        return Status("rule")
    if name in STRUCTURE:
        return Status("structure")
    if name in NO_RULE:
        return Status("no rule", NO_RULE[name], name)
    if name in EXEMPT:
        return Status("exempt", EXEMPT[name], name)
    rows = (row for row in EXEMPT if any(f"{home}.".startswith(f"{row}.") for home in homes))
    row = next(rows, None)
    return None if row is None else Status("exempt", EXEMPT[row], row)
