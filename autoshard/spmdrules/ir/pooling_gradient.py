"""Fuses the two operators of the gradient of sum pooling into one.

JAX writes this gradient as a `pad`, which puts zeros around and between the cotangents, and a `reduce_window_sum` over
the padded array. The padded array has an odd size (9 elements for 4 windows of 2), so it cannot be sharded evenly,
although the cotangents and the result can, window by window. `reduce_window_sum` has its own padding and base dilation,
which give the same result.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from autoshard import _compat


def fuse_padding(jaxpr: Any) -> Sequence[Any]:
    """Returns the equations of a jaxpr, with a `pad` by zeros fused into the window sum that is its only user."""
    sums = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "reduce_window_sum" and _unpadded(eqn.params)]
    if not sums:
        return jaxpr.eqns
    atoms = [*jaxpr.outvars, *(v for eqn in jaxpr.eqns for v in eqn.invars)]
    uses = collections.Counter(v for v in atoms if not isinstance(v, _compat.Literal))
    pads = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns if eqn.primitive.name == "pad" and _pads_with_zeros(eqn)}
    pad_of = {id(eqn): pads[eqn.invars[0]] for eqn in sums if eqn.invars[0] in pads and uses[eqn.invars[0]] == 1}
    fused = {id(pad) for pad in pad_of.values()}
    return [_fused(eqn, pad_of.get(id(eqn))) for eqn in jaxpr.eqns if id(eqn) not in fused]


def _unpadded(params: Any) -> bool:
    return not any(map(any, params["padding"])) and set(params["base_dilation"]) <= {1}


def _pads_with_zeros(eqn: Any) -> bool:
    value = eqn.invars[1]
    zero = isinstance(value, _compat.Literal) and bool(value.val == 0)
    return zero and all(n >= 0 for dim in eqn.params["padding_config"] for n in dim)


def _fused(eqn: Any, pad: Any) -> Any:
    """Returns a window sum that takes the operand of `pad` and pads it itself; unchanged if `pad` is None."""
    if pad is None:
        return eqn
    config = [tuple(map(int, each)) for each in pad.params["padding_config"]]
    padding = tuple((low, high) for low, high, _ in config)
    dilation = tuple(inner + 1 for _, _, inner in config)
    return eqn.replace(
        invars=[pad.invars[0]], params={**eqn.params, "padding": padding, "base_dilation": dilation}
    )  # fmt: skip
