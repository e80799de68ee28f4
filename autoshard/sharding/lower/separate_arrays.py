"""Finds donated arrays that share memory with another argument, at every call of a planned program.

To read the address of a new array's memory takes several microseconds per device, as long as JAX takes to pass the
array. So addresses are read only for arrays that are not known to be separate. Results of a program never share memory,
and most arguments of a train step are results of the call before.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import jax

from autoshard import _compat
from autoshard.sharding.program.donated_arrays import without_repeated, without_shared_memory

Known = dict[int, weakref.ref[Any]]

MESSAGES = ("donate the same buffer twice", "previously donated in the same call")  # of XLA


def is_shared_memory_error(error: BaseException) -> bool:
    """Whether XLA refused a call, before it ran, because an argument has the memory of a donated one."""
    return any(message in str(error) for message in MESSAGES)


class SeparateArrays:
    """Arrays that are known not to share memory, held weakly.

    Attributes:
        needed: whether calls are checked. Over several devices JAX 0.10 ends the process, and JAX 0.12 may already have
            deleted arrays when it refuses the call. On one device a call is checked after XLA refused one.
        results: `id` -> array, of the results of the last call: they share memory with no other array.
        kept: the same of its arguments that were not donated: they share no memory with results and donated arrays.
    """

    def __init__(self, needed: bool):
        self.needed = needed
        self.results: Known = {}
        self.kept: Known = {}

    def distinct(
        self, leaves: Sequence[Any], donated: Collection[int], planned: Mapping[Hashable, Sequence[int]]
    ) -> list[Any] | None:
        """Return the leaves with copies of donated arrays that share memory with another; None if there are none.

        Args:
            leaves: the leaves of the arguments.
            donated: the indices of those that are donated.
            planned: see `memory_kinds`.
        """
        found = without_repeated(leaves, donated)
        if not self.needed:
            return found
        leaves, results = found or leaves, self.results
        new = [i for i, x in enumerate(leaves) if (ref := results.get(id(x))) is None or ref() is not x]
        new = [i for i in new if i in donated or not _is_in(self.kept, leaves[i])]
        new = [i for i in new if isinstance(leaves[i], jax.Array) and not _compat.is_tracer(leaves[i])]
        if not new:
            return found
        same: dict[Hashable, set[int]] = {}
        for i in new:
            same.setdefault(memory_kind(leaves[i].shape, leaves[i].dtype, leaves[i].sharding), set()).add(i)
        for kind, members in same.items():
            members.update(planned.get(kind, ()))
        suspects = sorted({i for s in same.values() if len(s) > 1 and not s.isdisjoint(donated) for i in s})
        part = without_shared_memory([leaves[i] for i in suspects], {n for n, i in enumerate(suspects) if i in donated})
        copies = {i: x for i, x in zip(suspects, part, strict=True) if x is not leaves[i]}
        return [copies.get(i, x) for i, x in enumerate(leaves)] if copies else found

    def learn(self, leaves: Sequence[Any], donated: Collection[int], results: Any) -> None:
        """Note after a call which arrays are separate.

        Args:
            leaves: the leaves of the arguments, as `distinct` returned them.
            donated: the indices of those that were donated.
            results: the results of the program.
        """
        if self.needed:
            stayed = [x for i, x in enumerate(leaves) if i not in donated] if len(donated) < len(leaves) else []
            self.kept = _known([x for x in stayed if _is_in(self.kept, x) or isinstance(x, jax.Array)])
            self.results = _known(jax.tree.leaves(results))


def _known(arrays: Sequence[Any]) -> Known:
    return dict(zip(map(id, arrays), map(weakref.ref, arrays), strict=True))


def _is_in(known: Known, x: Any) -> bool:
    ref = known.get(id(x))
    return ref is not None and ref() is x


def memory_kind(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Hashable:
    """What two arrays that share a shard have in common: the shape of a shard and the dtype."""
    return sharding.shard_shape(shape), dtype


def memory_kinds(avals: Sequence[Any], shardings: Sequence[Any]) -> dict[Hashable, list[int]]:
    """The indices of the planned inputs of each kind of memory."""
    found: dict[Hashable, list[int]] = {}
    for i, (aval, sharding) in enumerate(zip(avals, shardings, strict=True)):
        found.setdefault(memory_kind(aval.shape, aval.dtype, sharding), []).append(i)
    return found
