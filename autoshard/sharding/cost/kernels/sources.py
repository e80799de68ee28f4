"""The values in memory from which other values are computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from autoshard.spmdrules.ir.program import Op


class Sources:
    """Finds the values in memory from which values are computed, and keeps what it found.

    Args:
        memory: the values that are stored in memory. After a value is removed, call `clear`.
        maker: value -> the operator that makes it.
    """

    def __init__(self, memory: Set[int], maker: Mapping[int, Op]):
        self.memory, self.maker = memory, maker
        self._known: dict[int, frozenset[int]] = {}

    def __call__(self, values: Iterable[int]) -> tuple[int, ...]:
        """Return the values in memory from which these values are computed."""
        found: set[int] = set()
        for v in values:
            found |= self._of(v)
        return tuple(sorted(found))

    def clear(self) -> None:
        """Forget what was found."""
        self._known.clear()

    def _of(self, value: int) -> frozenset[int]:
        memory, maker, known = self.memory, self.maker, self._known
        if value < 0:
            return frozenset()
        if value in memory or value not in maker:
            return frozenset({value})
        stack = [value]
        while stack:  # not recursive, because chains can be long
            v = stack[-1]
            if v in known:
                stack.pop()
                continue
            own: set[int] = set()
            unknown: list[int] = []
            for u in maker[v].operands:
                if u in memory or u not in maker:
                    own.add(u)
                elif (found := known.get(u)) is not None:
                    own |= found
                else:
                    unknown.append(u)
            if unknown:
                stack.extend(unknown)
                continue
            stack.pop()
            own.discard(-1)  # the number of literals
            known[v] = frozenset(own)
        return known[value]
