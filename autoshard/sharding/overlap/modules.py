"""The words of `overlap=` for the parameters of one program, and the operators that they concern."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np

from autoshard.errors import PlanError
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.overlap.gradient_owners import gradient_owners
from autoshard.sharding.plan.overlap_words import GATHER, MATMUL, OFF, ON, REDUCE
from autoshard.sharding.program.argument_names import path_forms
from autoshard.sharding.program.path_patterns import AmbiguousPathError, FoundPaths, find_paths, first_few
from autoshard.sharding.program.tracing import Traced
from autoshard.spmdrules.ir.program import Op


class ModuleOverlap:
    """The words of `overlap=`, resolved for one program.

    A collective belongs to the parameter that it gathers, or to the one whose gradient it reduces. A collective matmul
    belongs to the parameter that is an operand of the product, or whose gradient it computes.

    Args:
        traced: the function.
        axes: its logical axes.
        roles: the roles of its inputs.
        state: pairs (input, output) of its state, or of inputs and results of the same structure.
        table: path -> kind -> word, see `plan.overlap_words`.

    Attributes:
        paths: parameter -> its path.
        words: kind -> parameter -> word.
        named: (path of the table, kind) -> the parameters that get their word from it.
        overriding: the entries that take precedence over others.

    Raises:
        PlanError: a path of the table names no parameter. The message lists the parameters.
    """

    def __init__(
        self,
        traced: Traced,
        axes: LogicalAxes,
        roles: Roles,
        state: Sequence[tuple[int, int]],
        table: Mapping[str, Mapping[str, str]],
    ):
        self.axes, self.roles, self._state, self.table = axes, roles, state, table
        inputs = zip(axes.program.inputs, traced.in_paths, strict=True)
        self.paths = {v: path for v, path in inputs if roles.inputs.get(v) == "parameter"}
        self.words: dict[str, dict[int, str]] = {GATHER: {}, REDUCE: {}, MATMUL: {}}
        self.named: dict[tuple[str, str], list[int]] = {}
        self.overriding: set[tuple[str, str]] = set()
        owner: dict[tuple[str, int], tuple[bool, str]] = {}
        for pattern, found in self._found(traced).items():
            for kind, word in table[pattern].items():
                self.named[pattern, kind] = []
                for v in found[1]:
                    if (kind, v) in owner and owner[kind, v][0] and not found[0]:
                        self.overriding.add((owner[kind, v][1], kind))
                        continue  # an exact path takes precedence over globs
                    if (kind, v) in owner:
                        self.named[owner[kind, v][1], kind].remove(v)
                        self.overriding.add((pattern, kind))
                    owner[kind, v] = found[0], pattern
                    self.named[pattern, kind].append(v)
                    self.words[kind][v] = word

    def _found(self, traced: Traced) -> dict[str, tuple[bool, list[int]]]:
        """Path of the table -> whether it is an exact path, and the parameters that it names."""
        values, forms = list(self.paths), [path_forms(path, traced.arguments) for path in self.paths.values()]
        found: dict[str, tuple[bool, list[int]]] = {}
        problems = []
        for pattern in self.table:
            try:
                some = find_paths(pattern, forms) or _ending(pattern, forms)
            except AmbiguousPathError as error:
                problems.append(f"overlap {error}")
                continue
            if some is None:
                problems.append(f"overlap '{pattern}' names no parameter")
            else:
                found[pattern] = not some.is_glob, [values[i] for i in some.indices]
        if problems:
            listed = first_few(dict.fromkeys(without_numbers(each[-1]) for each in forms)) or "none"
            raise PlanError(f"auto_shard({traced.name}): {'; '.join(problems)}. The parameters are {listed}")
        return found

    def module(self, parameter: int) -> str:
        """The name of a parameter's module: its path, without the layer's number if all layers have the same words."""
        return self._modules[parameter]

    @cached_property
    def _modules(self) -> dict[int, str]:
        alike: dict[str, list[int]] = {}
        for v, path in self.paths.items():
            alike.setdefault(without_numbers(path), []).append(v)
        words = {v: tuple(self.words[kind].get(v) for kind in self.words) for v in self.paths}
        return {
            v: name if len({words[each] for each in some}) == 1 else self.paths[v]
            for name, some in alike.items()
            for v in some
        }

    def source(self, value: int) -> int:
        """The input that a value equals, up to slices and casts; the value itself if there is none."""
        return self.axes.parameter_aliases.get(value, value)

    def operands(self, op: Op, kind: str, word: str) -> list[int]:
        """The positions of an operator's operands that are parameters with this word."""
        words = self.words[kind]
        return [i for i, v in enumerate(op.operands) if words and words.get(self.source(v)) == word]

    def results(self, op: Op, kind: str, word: str) -> list[int]:
        """The positions of an operator's results that are gradients of parameters with this word."""
        words = self.words[kind]
        if word not in words.values():
            return []
        return [i for i, v in enumerate(op.results) if any(words.get(p) == word for p in self.owners.get(v, ()))]

    def products(self, op: Op, word: str) -> list[int]:
        """The parameters with this word for `matmul` that an operator multiplies, or whose gradient it computes."""
        words = self.words[MATMUL]
        return [p for p in self.modules_of(op, MATMUL) if words.get(p) == word] if words else []

    @cached_property
    def owners(self) -> dict[int, frozenset[int]]:
        """Gradient -> the parameters that it belongs to."""
        return gradient_owners(self.axes, self.roles, self._state)

    def modules_of(self, op: Op, kind: str) -> list[int]:
        """The parameters that the collectives of an operator belong to, by kind."""
        operands = [p for v in op.operands if (p := self.source(v)) in self.paths]
        owners = [p for v in op.results for p in self.owners.get(v, ())]
        return operands if kind == GATHER else owners if kind == REDUCE else [*operands, *owners]

    def parameters(self, kind: str, word: str) -> frozenset[int]:
        """The parameters with this word."""
        return frozenset(v for v, w in self.words[kind].items() if w == word)

    def gathers_alone(self, value: int) -> bool:
        """Whether nothing may run beside the gathers of a value."""
        return self.words[GATHER].get(self.source(value)) == OFF

    @cached_property
    def free(self) -> frozenset[int]:
        """The parameters whose gathers wait for no earlier use, whatever `gather=` says."""
        return self.parameters(GATHER, ON)

    @cached_property
    def synchronous(self) -> dict[bool, np.ndarray]:
        """For gathers (True) and reductions (False), a mask of the operators whose collectives compute cannot hide."""
        ops = list(self.axes.program.ops())
        return {
            True: np.array([bool(self.operands(op, GATHER, OFF)) for op in ops], bool),
            False: np.array([bool(self.results(op, REDUCE, OFF)) for op in ops], bool),
        }


def without_numbers(path: str) -> str:
    """A path with `*` in place of the numbers of layers; the position of its argument stays.

    >>> without_numbers("0/layers/3/wq")
    '0/layers/*/wq'
    """
    head, slash, rest = path.partition("/")
    return head + slash + re.sub(r"(?<![^/])\d+(?![^/])", "*", rest)


def _ending(pattern: str, forms: Iterable[Sequence[str]]) -> FoundPaths | None:
    """The paths with an end that a glob, such as `experts/*`, matches."""
    found = tuple(i for i, each in enumerate(forms) if any(fnmatch.fnmatchcase(p, f"*/{pattern}") for p in each))
    return FoundPaths(0, found, True) if found and any(c in pattern for c in "*?[") else None
