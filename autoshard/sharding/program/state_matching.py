"""Matches arguments with the results that are their updated values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from autoshard._shown import shown
from autoshard.sharding.program.constants import MAX_STATE_DEPTH

Words = tuple[str, ...]  # a path, one word for each key


@shown
@dataclass(frozen=True)
class StateMismatch:
    """An argument and the most similar subtree of the results, where the two differ.

    Attributes:
        owner: the index of the argument.
        kept: pairs (input leaf, output leaf) with the same path, shape and dtype.
        changed: pairs with the same path, but another shape or dtype.
        dropped: input leaves whose path is not in the subtree.
        added: output leaves whose path is not in the argument, with their paths in the subtree.
        depth: the depth of the subtree in the results; 0 if it is all of them.
        at_own_index: whether the subtree is the result with the index of the argument.
    """

    owner: int
    kept: tuple[tuple[int, int], ...]
    changed: tuple[tuple[int, int], ...]
    dropped: tuple[int, ...]
    added: tuple[tuple[int, str], ...]
    depth: int
    at_own_index: bool

    @property
    def differing(self) -> int:
        """The number of leaves that differ."""
        return len(self.changed) + len(self.dropped) + len(self.added)

    @property
    def same_paths(self) -> bool:
        """Whether both have the same paths, so that only shapes or dtypes differ."""
        return not self.dropped and not self.added


@shown
@dataclass(frozen=True)
class Matches:
    """The matches between arguments and results.

    Attributes:
        state: pairs (input leaf, output leaf) of the state; each result occurs once.
        state_like: pairs (input leaf, output leaf) of other results with an argument's leaves, such as gradients.
        mismatches: arguments that are returned with some leaves changed.
    """

    state: list[tuple[int, int]]
    state_like: list[tuple[int, int]]
    mismatches: list[StateMismatch]


def match(
    arguments: Mapping[int, Mapping[Words, int]],
    avals: Sequence[Any],
    out_keys: Sequence[Any],
    out_avals: Sequence[Any],
    donated: frozenset[int],
) -> Matches:
    """Matches each argument with a subtree of the results that has the same leaves. Each subtree is used once.

    Args:
        arguments: index of each positional argument -> its leaves by relative path.
        avals: shape and dtype of each input leaf.
        out_keys: key path of each output leaf.
        out_avals: shape and dtype of each output leaf.
        donated: indices of the arguments whose buffers the results may reuse.
    """
    subtrees: dict[Words, dict[Words, int]] = {}
    for n, keys in enumerate(out_keys):
        words = tuple(map(str, keys))
        for depth in range(min(MAX_STATE_DEPTH, len(words)) + 1):
            subtrees.setdefault(words[:depth], {})[words[depth:]] = n
    used: set[int] = set()
    state, state_like = [], []
    found: set[int] = set()
    for owner, leaves in sorted(arguments.items()):
        with_same_paths = [p for p in subtrees.values() if p.keys() == leaves.keys() and not used & set(p.values())]
        # A single array is state only if it is returned at its own index. Elsewhere it may be an activation.
        if len(leaves) == 1 and owner not in donated:
            with_same_paths = [
                p for p in with_same_paths if len(out_keys) > 1 and _has_index(out_keys[min(p.values())], owner)
            ]
        with_same_leaves = [p for p in with_same_paths if all(_same(avals[leaves[k]], out_avals[p[k]]) for k in leaves)]
        if with_same_leaves:
            state += [(leaves[k], with_same_leaves[0][k]) for k in leaves]
            used |= set(with_same_leaves[0].values())
            found.add(owner)
    for _, leaves in sorted(arguments.items()):  # other results, such as the moments of an optimizer
        for subtree in subtrees.values():
            if len(leaves) > 1 and subtree.keys() == leaves.keys() and not used & set(subtree.values()):
                if all(_same(avals[leaves[k]], out_avals[subtree[k]]) for k in leaves):
                    state_like += [(leaves[k], subtree[k]) for k in leaves]
                    used |= set(subtree.values())
    unused = {prefix: subtree for prefix, subtree in subtrees.items() if not used & set(subtree.values())}
    mismatches = [
        mismatch
        for owner, leaves in sorted(arguments.items())
        if owner not in found and len(leaves) > 1
        for mismatch in _nearest(owner, leaves, unused, avals, out_keys, out_avals, owner in donated)
    ]
    return Matches(state, state_like, mismatches)


def _nearest(
    owner: int,
    leaves: Mapping[Words, int],
    subtrees: Mapping[Words, Mapping[Words, int]],
    avals: Sequence[Any],
    out_keys: Sequence[Any],
    out_avals: Sequence[Any],
    donated: bool,
) -> list[StateMismatch]:
    """The subtree of the results that has most of an argument's leaves; empty if none has any."""
    found = []
    for prefix, subtree in subtrees.items():
        first = out_keys[min(subtree.values())]
        if not prefix and (not first or isinstance(first[0], jax.tree_util.SequenceKey)):
            if len(first) < 2 or not donated:
                continue  # an index among the results and the same index in a tuple argument are unrelated
        shared = [(leaves[k], subtree[k]) for k in leaves if k in subtree]
        kept = tuple(pair for pair in shared if _same(avals[pair[0]], out_avals[pair[1]]))
        if not kept and subtree.keys() != leaves.keys():
            continue
        added = tuple(
            (n, jax.tree_util.keystr(out_keys[n][len(prefix) :], simple=True, separator="/"))
            for k, n in subtree.items()
            if k not in leaves
        )
        dropped = tuple(i for k, i in leaves.items() if k not in subtree)
        changed = tuple(pair for pair in shared if pair not in kept)
        at_own_index = len(prefix) == 1 and _has_index(first, owner)
        found.append(StateMismatch(owner, kept, changed, dropped, added, len(prefix), at_own_index))
    return sorted(found, key=lambda d: (-len(d.kept), d.differing, not d.at_own_index))[:1]


def _has_index(keys: Any, owner: int) -> bool:
    return len(keys) > 0 and getattr(keys[0], "idx", None) == owner


def _same(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype
