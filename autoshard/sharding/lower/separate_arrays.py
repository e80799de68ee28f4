"""Finds donated arrays that share memory with another argument, at every call of a planned program.

To read the address of a new array's memory takes several microseconds per device, as long as JAX takes to pass the
array. So addresses are read only for arrays that are not known to be separate. Results of a program never share memory,
and most arguments of a train step are results of the call before.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.program.donated_arrays import without_repeated, without_shared_memory

Known = dict[int, weakref.ref[Any]]

MESSAGES = ("donate the same buffer twice", "previously donated in the same call")  # of XLA


def is_shared_memory_error(error: BaseException) -> bool:
    """Whether XLA refused a call, before it ran, because an argument has the memory of a donated one."""
    return any(message in str(error) for message in MESSAGES)


@shown
@dataclass(frozen=True)
class Places:
    """Which leaves of the arguments were which results of the call before. A train step repeats this at every call.

    Attributes:
        counts: the number of leaves and of results.
        leaves, results: take these leaves and their results out of a list.
        others: the indices of the other leaves.
    """

    counts: tuple[int, int]
    leaves: Callable[[Sequence[Any]], tuple[Any, ...]]
    results: Callable[[Sequence[Any]], tuple[Any, ...]]
    others: tuple[int, ...]

    @classmethod
    def found(cls, positions: Sequence[int | None], results: int) -> Places | None:
        """The places of leaves with these positions among the results; None if no leaf was a result."""
        known = [(i, position) for i, position in enumerate(positions) if position is not None]
        if not known:
            return None
        # With a single index, `itemgetter` returns no tuple. So the last index is there twice.
        taken, of_results = (operator.itemgetter(*indices, indices[-1]) for indices in zip(*known, strict=True))
        others = tuple(i for i, position in enumerate(positions) if position is None)
        return cls((len(positions), results), taken, of_results, others)

    def hold(self, leaves: Sequence[Any], results: Sequence[weakref.ref[Any]]) -> bool:
        """Whether the leaves are these results again. It is fast, because it runs at every call."""
        if self.counts != (len(leaves), len(results)):
            return False
        return all(map(operator.is_, self.leaves(leaves), map(operator.call, self.results(results))))


class SeparateArrays:
    """Arrays that are known not to share memory, held weakly.

    Attributes:
        needed: whether calls are checked. Over several devices JAX 0.10 ends the process, and JAX 0.12 may already have
            deleted arrays when it refuses the call. On one device a call is checked after XLA refused one.
        results: the results of the last call: they share memory with no other array.
        places: where the leaves of its arguments were among the results of the call before.
        kept: `id` -> array, of its arguments that were not donated: they share no memory with results and donated
            arrays.
    """

    def __init__(self, needed: bool):
        self.needed = needed
        self.results: list[weakref.ref[Any]] = []
        self.places: Places | None = None
        self.kept: Known = {}

    def distinct(
        self, leaves: Sequence[Any], donated: Set[int], planned: Mapping[Hashable, Sequence[int]]
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
        leaves = found or leaves
        new = self._new(leaves, donated)
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

    def _new(self, leaves: Sequence[Any], donated: Set[int]) -> list[int]:
        """The indices of leaves that are neither results of the last call nor, if they are not donated, kept."""
        places = self.places
        if places is not None and places.hold(leaves, self.results) and donated.isdisjoint(places.others):
            others = places.others
        else:
            alive = {id(x): i for i, ref in enumerate(self.results) if (x := ref()) is not None}
            positions = [alive.get(id(x)) for x in leaves]
            self.places = Places.found(positions, len(self.results))
            others = [i for i, position in enumerate(positions) if position is None]
        return [i for i in others if i in donated or not _is_in(self.kept, leaves[i])]

    def learn(self, leaves: Sequence[Any], donated: Set[int], results: Any) -> None:
        """Note after a call which arrays are separate.

        Args:
            leaves: the leaves of the arguments, as `distinct` returned them.
            donated: the indices of those that were donated.
            results: the results of the program.
        """
        if self.needed:
            stayed = [leaves[i] for i in _not_donated(len(leaves), frozenset(donated))]
            self.kept = _known([x for x in stayed if _is_in(self.kept, x) or isinstance(x, jax.Array)])
            self.results = list(map(weakref.ref, jax.tree.leaves(results)))


@functools.lru_cache(maxsize=256)
def _not_donated(count: int, donated: frozenset[int]) -> tuple[int, ...]:
    return tuple(i for i in range(count) if i not in donated)


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
