"""What the sharding of an operator's operands means for its results, as data.

A `Rule` lists, for each dimension of each operand and result, the factors that it is made of, major to minor. A factor
that occurs in several places is sharded in the same way in all of them. The kind of a factor says what sharding it
means:

    pass      nothing to do: the result is sharded in the same way
    reduce    the result is partial under an operation (sum, max, ...) until it is reduced
    whole     the factor cannot be sharded: the operator needs the whole dimension
    halo      neighbouring shards exchange borders
    index     the dimension is addressed by values: each shard masks what it does not hold, and the result is a partial
              sum where it lacks the dimension
    offset    the shard needs to know where it starts (iota, random bits)

The text form expresses all of this: ``b m k, b k n -> b m n; reduce k``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, cast, get_args

from autoshard._shown import shown
from autoshard.errors import AutoshardError

Kind = Literal["pass", "reduce", "whole", "halo", "index", "offset"]
Reduction = Literal["sum", "max", "min", "mul", "and", "or", "xor", "argmax", "argmin"]
Dims = tuple[tuple[str, ...], ...]  # the factors of each dimension, major to minor; () is a dimension of size 1

KINDS: tuple[str, ...] = get_args(Kind)
REDUCTIONS: tuple[str, ...] = get_args(Reduction)
POSITIONS = ("argmax", "argmin")  # reductions to positions; choosing among positions needs the values there
_CLAUSES = ("reduce", "whole", "halo", "index", "offset", "linear", "moves", "where")
_EXAMPLES = {"linear": "linear 0", "moves": "moves 0", "where": "where k=4"}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class RuleError(AutoshardError):
    """A rule cannot be read, contradicts itself, or does not fit its operands."""


@shown
@dataclass(frozen=True)
class Factor:
    """One axis of an operator's iteration space.

    Attributes:
        name: the factor's name in the rule's text.
        size: its size in elements, None if not known yet.
        kind: what sharding it means; the module docstring lists the kinds.
        op: the operation that a `reduce` factor reduces by, None for the other kinds.
    """

    name: str
    size: int | None = None
    kind: Kind = "pass"
    op: Reduction | None = None

    def __post_init__(self):
        if self.kind not in KINDS:
            raise RuleError(f"factor '{self.name}': unknown kind '{self.kind}'. Known kinds: {', '.join(KINDS)}.")
        if (self.kind == "reduce") != (self.op is not None):
            raise RuleError(
                f"factor '{self.name}' has kind '{self.kind}' and op {self.op!r}. A 'reduce' factor needs an "
                "operation, such as op='sum'; for other kinds, leave op at None."
            )

    @property
    def shardable(self) -> bool:
        """Whether one shard of this factor can be computed without the others."""
        return self.kind != "whole"

    def shardable_into(self, pieces: int) -> bool:
        """Whether a plan may shard it into this many pieces: they are equal and exchange no borders."""
        return self.kind not in ("whole", "halo") and bool(self.size) and self.size % pieces == 0


@shown
@dataclass(frozen=True)
class Shard:
    """One shard's view of a rule.

    Attributes:
        rule: the rule.
        counts: factor -> number of shards, for factors that are sharded.
        index: factor -> which of these shards this is, from 0; may be a traced integer.
        axes: factor -> the `shard_map` axis that shards it, where exactly one does.
    """

    rule: Rule
    counts: Mapping[str, int]
    index: Mapping[str, Any]
    axes: Mapping[str, str] = field(default_factory=dict)

    def count(self, name: str) -> int:
        """The number of shards of factor `name`."""
        return self.counts.get(name, 1)

    def size(self, name: str) -> int:
        """The size of factor `name` on this shard, in elements."""
        size = self.rule.factor(name).size
        assert size is not None, f"factor {name} has no size"
        return size // self.count(name)

    def offset(self, name: str) -> Any:
        """The first element of this shard along factor `name`."""
        return self.index.get(name, 0) * self.size(name)

    def shape(self, dims: Dims) -> tuple[int, ...]:
        """The local shape of an operand or result made of `dims`."""
        return tuple(math.prod(self.size(f) for f in dim) for dim in dims)


LocalParams = Callable[[Mapping[str, Any], Shard], Mapping[str, Any]]
Body = Callable[..., Any]


@shown
@dataclass(frozen=True)
class Rule:
    """A factor map, plus what a shard runs where it cannot run the operator unchanged.

    Attributes:
        operands: the factors of each dimension of each operand.
        results: the factors of each dimension of each result.
        factors: every factor that occurs, in order of first appearance.
        linear: groups of operands in which the operator is jointly linear: if exactly these are partial sums, so are
            the results.
        moves: operands whose elements are only moved and copied: partials of any operation pass through.
        local: rewrites the parameters (such as shapes) for a shard: `local(params, shard) -> params`.
        body: replaces the operator on a shard: `body(shard, *operand_shards) -> results`.
        is_unknown: whether nothing is known about the operator, so that every dimension is whole.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    factors: tuple[Factor, ...]
    linear: tuple[tuple[int, ...], ...] = ()
    moves: tuple[int, ...] = ()
    local: LocalParams | None = field(default=None, compare=False, repr=False)
    body: Body | None = field(default=None, compare=False, repr=False)
    is_unknown: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self):
        known = {f.name for f in self.factors}
        if len(known) != len(self.factors):
            raise RuleError(f"rule '{self.text}': a factor is declared twice. Declare each factor once, with one kind.")
        for side, arrays in (("operand", self.operands), ("result", self.results)):
            for i, dims in enumerate(arrays):
                flat = [f for dim in dims for f in dim]
                if len(set(flat)) != len(flat):
                    twice = next(f for f in flat if flat.count(f) > 1)
                    raise RuleError(
                        f"rule '{self.text}': {side} {i} names factor '{twice}' twice. A factor can shard only one "
                        "dimension of an array. Give the other dimension its own name."
                    )
                if unknown := set(flat) - known:
                    raise RuleError(
                        f"rule: {side} {i} uses {', '.join(sorted(unknown))}, which `factors` does not declare. "
                        "Declare them there."
                    )
        for group in (*self.linear, self.moves):
            if any(not 0 <= i < len(self.operands) for i in group):
                raise RuleError(
                    f"rule '{self.text}': linear or moves names operand {max(group)}, but the last operand is "
                    f"{len(self.operands) - 1}. Operands are numbered from 0."
                )

    def factor(self, name: str) -> Factor:
        """The factor called `name`."""
        return self.by_name[name]

    @cached_property
    def by_name(self) -> dict[str, Factor]:
        """The factors by name."""
        return {f.name: f for f in self.factors}

    @cached_property
    def compound_dims(self) -> frozenset[tuple[str, ...]]:
        """The dimensions of operands and results that several factors make up."""
        return frozenset(dim for dims in (*self.operands, *self.results) for dim in dims if len(dim) > 1)

    def where(self, **changes: Any) -> Rule:
        """Returns this rule with some attributes replaced."""
        return replace(self, **changes)

    def partial(self, name: str, result: int) -> Reduction | None:
        """Returns the operation that a result is partial under if factor `name` is sharded, None if it is not partial.

        Args:
            name: the factor.
            result: the number of the result.
        """
        factor = self.factor(name)
        if any(name in dim for dim in self.results[result]):
            return None
        if factor.kind == "reduce":
            return factor.op
        return "sum" if factor.kind == "index" else None

    def bind(self, *avals: Any) -> Rule:
        """Returns this rule with the sizes of its factors taken from the operands.

        Args:
            *avals: anything with a `shape`, one for each operand.

        Raises:
            RuleError: the ranks or sizes disagree.
        """
        if len(avals) != len(self.operands):
            raise RuleError(f"rule '{self.text}' has {_counted(len(self.operands), 'operand')}, but got {len(avals)}")
        sizes = {f.name: f.size for f in self.factors if f.size is not None}
        sized: list[tuple[tuple[str, ...], int, str]] = []
        for i, (aval, dims) in enumerate(zip(avals, self.operands, strict=True)):
            shape = tuple(aval.shape)
            if len(shape) != len(dims):
                raise RuleError(
                    f"rule '{self.text}': operand {i} is declared with {_counted(len(dims), 'dimension')}, but the "
                    f"argument has shape {shape}"
                )
            for d, (size, dim) in enumerate(zip(shape, dims, strict=True)):
                sized.append((dim, size, f"rule '{self.text}': operand {i} dimension {d} (of {shape})"))
        # Dimensions of one factor are bound first. Other dimensions may need the sizes of these factors.
        for dim, size, where in sorted(sized, key=lambda one: len(one[0])):
            _bind_size(sizes, dim, size, where)
        return self.where(factors=tuple(replace(f, size=sizes.get(f.name)) for f in self.factors))

    @property
    def text(self) -> str:
        """The text form; `Rule.parse` reads it back."""
        kinds: dict[str, list[str]] = {}
        for f in self.factors:
            if f.kind == "reduce":
                kinds.setdefault("reduce", []).append(f.name if f.op == "sum" else f"{f.name}:{f.op}")
            elif f.kind != "pass":
                kinds.setdefault(f.kind, []).append(f.name)
        clauses = [f"{kind} {' '.join(kinds[kind])}" for kind in _CLAUSES[:5] if kind in kinds]
        clauses += [f"linear {' '.join(map(str, group))}" for group in self.linear]
        if self.moves:
            clauses.append(f"moves {' '.join(map(str, self.moves))}")
        compound = [f for a in (*self.operands, *self.results) for dim in a if len(dim) > 1 for f in dim]
        sized = [f"{f.name}={f.size}" for f in self.factors if f.size is not None and f.name in compound]
        if sized:
            clauses.append(f"where {' '.join(sized)}")
        head = f"{', '.join(map(_dims_text, self.operands))} -> {', '.join(map(_dims_text, self.results))}"
        return "; ".join([head.strip(), *clauses])

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str, *avals: Any, local: LocalParams | None = None, body: Body | None = None) -> Rule:
        """Reads a rule from its text form.

        Args:
            text: such as ``"b m k, b k n -> b m n; reduce k"``; the module docstring explains the kinds.
            *avals: operands (anything with a `shape`) to bind the sizes to; none leaves the sizes unbound.
            local: see `Rule`.
            body: see `Rule`.

        Raises:
            RuleError: the text does not parse, or does not fit the operands.
            TypeError: `text` is not a string.
        """
        if not isinstance(text, str):
            raise TypeError(f"a rule must be text, such as 'm k, k n -> m n; reduce k', but got {text!r}")
        head, *clauses = (part.strip() for part in text.split(";"))
        if head.count("->") != 1:
            raise RuleError(
                f"rule '{text}': write exactly one '->' between operands and results, as in 'm k, k n -> m n; reduce k'"
            )
        left, right = head.split("->")
        operands, results = _parse_arrays(left, text), _parse_arrays(right, text)
        names = dict.fromkeys(f for a in (*operands, *results) for dim in a for f in dim)
        factors = {name: Factor(name) for name in names}
        linear: list[tuple[int, ...]] = []
        moves: tuple[int, ...] = ()
        for clause in filter(None, clauses):
            word, *items = clause.split()
            if word not in _CLAUSES:
                raise RuleError(f"rule '{text}': unknown clause '{word}'. Known clauses: {', '.join(_CLAUSES)}.")
            if not items:
                raise RuleError(
                    f"rule '{text}': clause '{word}' is empty. Write, for example, "
                    f"'{_EXAMPLES.get(word, word + ' k')}'."
                )
            if word in ("linear", "moves"):
                group = _parse_operands(items, text)
                if word == "moves" and moves:
                    raise RuleError(f"rule '{text}': there are two 'moves' clauses. Name all the operands in one.")
                linear, moves = ([*linear, group], moves) if word == "linear" else (linear, group)
            else:
                for item in items:
                    _apply_clause(factors, word, item, text)
        rule = cls(operands, results, tuple(factors.values()), tuple(linear), moves, local, body)
        return rule.bind(*avals) if avals else rule


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + "s" * (count != 1)


def _bind_size(sizes: dict[str, int], dim: Sequence[str], size: int, where: str) -> None:
    """Infers the one unknown size of a dimension, or checks that the known sizes multiply to the dimension's size."""
    unknown = [f for f in dim if f not in sizes]
    known = math.prod(sizes[f] for f in dim if f in sizes)
    if len(unknown) > 1:
        raise RuleError(
            f"{where}: the sizes of {' and '.join(unknown)} are unknown. Give one with 'where {unknown[0]}=...'."
        )
    if unknown and known and size % known == 0:
        sizes[unknown[0]] = size // known
    elif unknown:
        sized = [f for f in dim if f in sizes]
        raise RuleError(f"{where} has size {size}, which is not divisible by {' x '.join(sized)} = {known}")
    elif known != size:
        declared = f"{' x '.join(dim)} is already {known}" if dim else "it is declared as 1"
        raise RuleError(f"{where} has size {size}, but {declared}")


def _dims_text(dims: Dims) -> str:
    if not dims:
        return "[]"
    return " ".join("1" if not dim else dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in dims)


def _parse_arrays(text: str, whole: str) -> tuple[Dims, ...]:
    if not text.strip():
        return ()
    return tuple(_parse_dims(part, whole) for part in text.split(","))


def _parse_dims(text: str, whole: str) -> Dims:
    tokens = re.findall(r"\[\]|[()]|[^\s()]+", text)
    if tokens == ["[]"]:
        return ()
    if not tokens:
        raise RuleError(f"rule '{whole}': an operand or result is empty. Write a scalar as [].")
    dims: list[tuple[str, ...]] = []
    group: list[str] | None = None
    for token in tokens:
        if token == "(" and group is None:
            group = []
        elif token == ")" and group is not None:
            dims.append(tuple(group))
            group = None
        elif token == "1" and group is None:
            dims.append(())
        elif not _NAME.fullmatch(token):
            raise RuleError(
                f"rule '{whole}': cannot read '{token}' in '{text.strip()}'. Write names of factors, 1, or (a b)."
            )
        elif group is None:
            dims.append((token,))
        else:
            group.append(token)
    if group is not None:
        raise RuleError(f"rule '{whole}': a parenthesis is not closed in '{text.strip()}'. Close it.")
    return tuple(dims)


def _parse_operands(items: Iterable[str], text: str) -> tuple[int, ...]:
    try:
        return tuple(int(i) for i in items)
    except ValueError:
        raise RuleError(f"rule '{text}': linear and moves take operand numbers, such as 'linear 0 1'") from None


def _apply_clause(factors: dict[str, Factor], word: str, item: str, text: str) -> None:
    name, _, detail = item.partition("=" if word == "where" else ":")
    if name not in factors:
        raise RuleError(
            f"rule '{text}': '{word} {item}' names a factor that occurs in no operand and no result. Its factors are "
            f"{', '.join(factors) or 'none'}."
        )
    factor = factors[name]
    if word == "where":
        if not detail.isdigit():
            raise RuleError(f"rule '{text}': '{item}' should be a size, such as {name}=16")
        if factor.size not in (None, int(detail)):
            raise RuleError(f"rule '{text}': factor '{name}' has two sizes, {factor.size} and {detail}. Keep one.")
        factors[name] = replace(factor, size=int(detail))
        return
    if factor.kind != "pass":
        raise RuleError(f"rule '{text}': factor '{name}' has two kinds, {factor.kind} and {word}. Keep one.")
    if word == "reduce":
        op = detail or "sum"
        if op not in REDUCTIONS:
            raise RuleError(f"rule '{text}': unknown reduction '{op}'. Known reductions: {', '.join(REDUCTIONS)}.")
        factors[name] = replace(factor, kind="reduce", op=cast(Reduction, op))
    else:
        factors[name] = replace(factor, kind=cast(Kind, word))
