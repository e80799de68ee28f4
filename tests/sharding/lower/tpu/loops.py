"""Finds the loops of lowered programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autoshard import _compat
from autoshard.sharding.offload.edits import jaxprs_of


def loops(jaxpr: Any) -> Iterator[Any]:
    """Yields the outermost scans of a jaxpr. A scan that moves slices of stacks in host memory is inside of calls."""
    for eqn in _compat.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        else:
            for inner in jaxprs_of(eqn):
                yield from loops(inner)
