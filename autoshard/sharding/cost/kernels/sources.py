"""From which values in memory a value is computed, and which kernels compute from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

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


def readers(
    values: Iterable[int], users: Mapping[int, Sequence[Op]], kernel_ids: Set[int], memory: Set[int]
) -> list[Op]:
    """Return the operators at which the chains of elementwise operators from some values end.

    These are kernels, operators with inner blocks, and operators whose results are stored in memory.

    Args:
        values: the values.
        users: value -> the operators of the block that take it.
        kernel_ids: the `id`s of the operators that are kernels.
        memory: the values that are stored in memory.
    """
    todo, seen, found = [*values], set[int](), list[Op]()
    while todo:
        for user in users.get(todo.pop(), ()):
            if id(user) in seen:
                continue
            seen.add(id(user))
            if user.blocks or id(user) in kernel_ids or not memory.isdisjoint(user.results):
                found.append(user)
            else:
                todo += user.results
    return found
