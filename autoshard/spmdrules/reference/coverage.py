"""The status of each JAX primitive: it has a rule, is structure, or is listed here with the reason why it has no rule.

    rule         a family registers a rule for it
    structure    a call, a loop or a branch: its meaning is in the jaxprs that it holds (see `ir.program`)
    no rule      it may occur in a program, but nothing is known about it: its operands are gathered, its results are
                 replicated, and the plan names it in a warning
    exempt       it does not belong in the program of a train step; if it occurs anyway, it is treated like `no rule`

A test finds every primitive in a fresh process, so that a new version of JAX cannot add one unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from autoshard import _compat
from autoshard._shown import shown
from autoshard.spmdrules.core.registry import has_rule
from autoshard.spmdrules.ir.program import CALLS, CONTROL

StatusKind = Literal["rule", "structure", "no rule", "exempt"]

STRUCTURE = CALLS | CONTROL

# Measured on eight devices: Python is called once for each execution of the operator, not once on each device.
ON_HOST = "runs Python on the host of one device, once, with gathered operands and replicated results"
_HOST = f"{ON_HOST}; to run it on shards, "
_KERNEL = (
    "an opaque kernel: every device runs it on gathered operands; to shard it, wrap it in a function with "
    "@autoshard.operator and its rule"
)
NO_RULE: Mapping[str, str] = {
    "pure_callback": _HOST + "call it from a function with @autoshard.operator",
    "io_callback": _HOST + "if its effect allows that, call it from a function with @autoshard.operator",
    "ffi_call": _KERNEL,
    "pallas_call": _KERNEL,
    "mpmd_map": _KERNEL,
    "cudnn_fusion": _KERNEL,
    "call_exported": "a program that was compiled separately, for its own devices: it gets gathered operands; to shard "
    "it, call the function that it was exported from",
}


def runs_on_host(primitive: str) -> bool:
    """Whether a primitive without a rule runs Python on the host, once, and is not repeated on every device."""
    return NO_RULE.get(primitive, "").startswith(ON_HOST)


# Primitives whose rules the oracle does not run on CPU devices, with the reason; tests compare their texts.
_NVIDIA = "runs on NVIDIA GPUs only"
_COMPILED = "exists in compiled programs only"
_NO_ARRAY = "no array of this type can leave a compiled program"
UNRUN: Mapping[str, str] = {
    **{f"dot_product_attention_{kind}{end}": _NVIDIA
       for kind in ("fwd", "bwd", "fp8_fwd", "fp8_bwd") for end in ("", "_wrapper")},
    "scaled_matmul": _NVIDIA, "scaled_matmul_wrapper": _NVIDIA,
    "with_memory_space_constraint": _COMPILED, "relayout": _COMPILED,
    "to_edtype": _NO_ARRAY, "from_edtype": _NO_ARRAY,
    "gather_rows": "its operand is gathered, so no sharding of the operand is a strategy for the result",
}  # fmt: skip

_INSIDE = "communicates over a named axis inside a shard_map, where nothing is planned"
_REFERENCE = "creates, reads or writes memory in place, as kernels do"
_PALLAS = "occurs only inside a Pallas kernel"
_OBJECT = "creates, reads or writes a Python object (a box, a log, a variable), which has no sharding"
_EXPORT = "computes symbolic sizes, but a plan needs known sizes"
_CHECK = "an error check, which checkify turns into values before the program is staged"
_TOKEN = "a token that orders effects; it has no elements"
_STEP = "a step of tracing or differentiation that leaves no equation"
_SPARSE = "operates on the components of an experimental sparse array"
# By primitive name, or by the module that defines the primitive, without the prefix of JAX's private packages.
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


@shown
@dataclass(frozen=True)
class Status:
    """The status of one primitive.

    Attributes:
        kind: see the module docstring.
        reason: why it has no rule; empty if it has one or is structure.
        row: the key that lists it in `NO_RULE` or `EXEMPT`.
    """

    kind: StatusKind
    reason: str = ""
    row: str = ""


def status(primitive: Any) -> Status | None:
    """Returns the status of a primitive, None if nothing lists it.

    Example:
        >>> from jax import lax
        >>> status(lax.dot_general_p).kind
        'rule'
    """
    return statuses([primitive])[primitive]


def statuses(primitives: Iterable[Any]) -> dict[Any, Status | None]:
    """Returns `status` for many primitives with a single search for the modules that define them."""
    listed = list(primitives)
    modules = _compat.defining_modules(listed)
    return {primitive: _status(primitive, modules[primitive]) for primitive in listed}


def _status(primitive: Any, modules: set[str]) -> Status | None:
    name = primitive.name
    if has_rule(primitive):
        return Status("rule")
    if name in STRUCTURE:
        return Status("structure")
    if name in NO_RULE:
        return Status("no rule", NO_RULE[name], name)
    if name in EXEMPT:
        return Status("exempt", EXEMPT[name], name)
    rows = (row for row in EXEMPT if any(f"{module}.".startswith(f"{row}.") for module in modules))
    row = next(rows, None)
    return None if row is None else Status("exempt", EXEMPT[row], row)
