"""Pair arguments with the results that they come back as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from autoshard._shown import shown

if TYPE_CHECKING:
    pass


Words = tuple[str, ...]


@shown
@dataclass(frozen=True)
class StateMismatch:
    """An argument and the part of the results that is most like it, but not the same.

    Attributes:
        owner: the argument's number.
        kept: pairs (input leaf, output leaf) of the same path, shape and dtype.
        changed: pairs of the same path and another shape or dtype.
        dropped: input leaves that do not come back.
        added: output leaves that did not go in, with their paths in that part.
        depth: how deep in the results the part stands; 0 is all of them.
        stands: whether it is the result with the argument's own number.
    """

    owner: int
    kept: tuple[tuple[int, int], ...]
    changed: tuple[tuple[int, int], ...]
    dropped: tuple[int, ...]
    added: tuple[tuple[int, str], ...]
    depth: int
    stands: bool

    @property
    def odd(self) -> int:
        """How many leaves are not as they were."""
        return len(self.changed) + len(self.dropped) + len(self.added)

    @property
    def same_paths(self) -> bool:
        """Whether only shapes or dtypes differ."""
        return not self.dropped and not self.added


@dataclass(frozen=True)
class Matches:
    """How arguments and results belong together.

    Attributes:
        state: pairs (input leaf, output leaf) of what comes back, each result used once.
        alike: pairs of results that have the leaves of an argument that came back already: moments, gradients.
        drifts: the arguments that nearly come back.
    """

    state: list[tuple[int, int]]
    alike: list[tuple[int, int]]
    drifts: list[StateMismatch]


def match(
    arguments: Mapping[int, Mapping[Words, int]],
    avals: Sequence[Any],
    out_keys: Sequence[Any],
    out_avals: Sequence[Any],
    donated: frozenset[int],
) -> Matches:
    """Pairs each argument with the part of the results that has the same leaves, each part used once.

    Args:
        arguments: number of each positional argument -> its leaves by relative path.
        avals: shape and dtype of each input leaf.
        out_keys: key path of each output leaf.
        out_avals: shape and dtype of each output leaf.
        donated: the arguments whose buffers the results may take.
    """
    parts: dict[Words, dict[Words, int]] = {}
    for n, keys in enumerate(out_keys):
        words = tuple(map(str, keys))
        for depth in range(min(3, len(words)) + 1):
            parts.setdefault(words[:depth], {})[words[depth:]] = n
    used: set[int] = set()
    state, alike = [], []
    found: set[int] = set()
    for owner, leaves in sorted(arguments.items()):
        fits = [p for p in parts.values() if p.keys() == leaves.keys() and not used & set(p.values())]
        if len(leaves) == 1 and owner not in donated:  # a lone array: an activation, unless it stands where it stood
            fits = [p for p in fits if len(out_keys) > 1 and _stands_at(out_keys[min(p.values())], owner)]
        same = [p for p in fits if all(_same(avals[leaves[k]], out_avals[p[k]]) for k in leaves)]
        if same:
            state += [(leaves[k], same[0][k]) for k in leaves]
            used |= set(same[0].values())
            found.add(owner)
    for _, leaves in sorted(arguments.items()):  # both moments of an optimizer
        for part in parts.values():
            if len(leaves) > 1 and part.keys() == leaves.keys() and not used & set(part.values()):
                if all(_same(avals[leaves[k]], out_avals[part[k]]) for k in leaves):
                    alike += [(leaves[k], part[k]) for k in leaves]
                    used |= set(part.values())
    left = {prefix: part for prefix, part in parts.items() if not used & set(part.values())}
    drifts = [
        drift
        for owner, leaves in sorted(arguments.items())
        if owner not in found and len(leaves) > 1
        for drift in _nearest(owner, leaves, left, avals, out_keys, out_avals, owner in donated)
    ]
    return Matches(state, alike, drifts)


def _nearest(
    owner: int,
    leaves: Mapping[Words, int],
    parts: Mapping[Words, Mapping[Words, int]],
    avals: Sequence[Any],
    out_keys: Sequence[Any],
    out_avals: Sequence[Any],
    donated: bool,
) -> list[StateMismatch]:
    """The part of the results that has most of an argument's leaves, if one has any."""
    found = []
    for prefix, part in parts.items():
        first = out_keys[min(part.values())]
        if not prefix and (not first or isinstance(first[0], jax.tree_util.SequenceKey)):
            if len(first) < 2 or not donated:
                continue  # positions among the results and in a tuple argument say nothing of each other
        shared = [(leaves[k], part[k]) for k in leaves if k in part]
        kept = tuple(pair for pair in shared if _same(avals[pair[0]], out_avals[pair[1]]))
        if not kept and part.keys() != leaves.keys():
            continue
        added = tuple(
            (n, jax.tree_util.keystr(out_keys[n][len(prefix) :], simple=True, separator="/"))
            for k, n in part.items()
            if k not in leaves
        )
        dropped = tuple(i for k, i in leaves.items() if k not in part)
        changed = tuple(pair for pair in shared if pair not in kept)
        stands = len(prefix) == 1 and _stands_at(first, owner)
        found.append(StateMismatch(owner, kept, changed, dropped, added, len(prefix), stands))
    return sorted(found, key=lambda d: (-len(d.kept), d.odd, not d.stands))[:1]


def _stands_at(keys: Any, owner: int) -> bool:
    return len(keys) > 0 and getattr(keys[0], "idx", None) == owner


def _same(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype
