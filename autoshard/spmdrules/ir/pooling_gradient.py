"""The gradient of pooling by sums as one operator.

JAX writes it as two: the cotangents are padded, zeros between them, and windows of what that gives are summed. Between
the two stands an array of odd size (9 elements for 4 windows of 2) that cannot be cut evenly, though cotangents and
result could be, window by window. Sums over windows know such padding themselves, and mean the same with it.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from autoshard import _compat


def fuse_padding(jaxpr: Any) -> Sequence[Any]:
    """The equations of a jaxpr, each padding with zeros that a sum over windows alone takes made part of that."""
    sums = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "reduce_window_sum" and _unpadded(eqn.params)]
    if not sums:
        return jaxpr.eqns
    atoms = [*jaxpr.outvars, *(v for eqn in jaxpr.eqns for v in eqn.invars)]
    uses = collections.Counter(v for v in atoms if not isinstance(v, _compat.Literal))
    pads = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns if eqn.primitive.name == "pad" and _pads_with_zeros(eqn)}
    parts = {id(eqn): pads[eqn.invars[0]] for eqn in sums if eqn.invars[0] in pads and uses[eqn.invars[0]] == 1}
    gone = {id(pad) for pad in parts.values()}
    return [_fused(eqn, parts.get(id(eqn))) for eqn in jaxpr.eqns if id(eqn) not in gone]


def _unpadded(params: Any) -> bool:
    return not any(map(any, params["padding"])) and set(params["base_dilation"]) <= {1}


def _pads_with_zeros(eqn: Any) -> bool:
    value = eqn.invars[1]
    zero = isinstance(value, _compat.Literal) and bool(value.val == 0)
    return zero and all(n >= 0 for around in eqn.params["padding_config"] for n in around)


def _fused(eqn: Any, pad: Any) -> Any:
    """A sum over windows of what a padding takes, padded by itself; as it is where there is none."""
    if pad is None:
        return eqn
    around = [tuple(map(int, each)) for each in pad.params["padding_config"]]
    padding = tuple((low, high) for low, high, _ in around)
    dilation = tuple(inner + 1 for _, _, inner in around)
    return eqn.replace(
        invars=[pad.invars[0]], params={**eqn.params, "padding": padding, "base_dilation": dilation}
    )  # fmt: skip
