"""Shardings that every plan must respect: those that the user fixes, and the program's own sharding constraints."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from autoshard._units import spec_text
from autoshard.errors import PlanError
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.layout.layout import Layout
from autoshard.sharding.program.argument_names import path_forms
from autoshard.sharding.program.path_patterns import AmbiguousPathError, find_paths, first_few, suggestions
from autoshard.sharding.program.tracing import Traced
from autoshard.spmdrules.core.placement import Spec, from_partition_spec, is_spec_entry
from autoshard.spmdrules.ir.program import Op

Named = tuple[str, Layout]  # a candidate's strategy and its layout

WISH = "wish"  # what messages call the sharding that `explain` prices

_EITHER = (
    "give {path glob: PartitionSpec} on a named mesh, or {path glob: names of logical axes, None for a dimension that "
    "stays whole}, such as {'0/*/kernel': PartitionSpec(None, 'model')} or {'0/*/kernel': (None, 'ffn')}"
)


def program_shardings(op: Op) -> list[NamedSharding]:
    """The shardings that the program itself gives at an operator: a sharding constraint, or those of a nested `jit`."""
    params = op.eqn.params
    if op.name == "sharding_constraint":
        shardings = (params["sharding"],)
    elif op.name in ("jit", "pjit"):
        shardings = (*params["in_shardings"], *params["out_shardings"])
    else:
        shardings = ()
    return [s for s in shardings if isinstance(s, NamedSharding)]


def program_constraints(traced: Traced) -> list[tuple[Op, NamedSharding]]:
    """All shardings in the program itself, each with its operator."""
    return [(op, sharding) for op in traced.program.ops() for sharding in program_shardings(op)]


def constraint_mesh(constraints: Sequence[tuple[Op, NamedSharding]]) -> Any:
    """The mesh of the program's own sharding constraints; None if there are none."""
    for _, sharding in constraints:
        if not sharding.mesh.empty and sharding.mesh.size > 1:
            return sharding.mesh
    return None


def check_constraints(name: str, constraints: Sequence[tuple[Op, NamedSharding]], layout: Layout) -> None:
    """Check that the plan's mesh has all mesh axes that the program's own sharding constraints name.

    Raises:
        PlanError: it lacks some. The message lists every such constraint.
    """
    problems = []
    for op, sharding in constraints:
        spec = sharding.spec
        names = [a for dim in from_partition_spec(spec, len(spec)) for a in dim]
        if missing := [a for a in names if a not in layout.mesh]:
            problems.append(
                f"the constraint {spec} at {op.line} names mesh axis {missing[0]!r}, but the "
                f"plan's mesh has {dict(layout.mesh)}; give auto_shard the mesh of the constraint"
            )
    if problems:
        raise PlanError(f"auto_shard({name}): " + "; ".join(problems))


class NoSuchAxisError(PlanError):
    """A spec names a mesh axis that the mesh does not have."""


class FixedError(PlanError):
    """Fixed shardings are not possible, or contradict each other.

    The message has only the first problems, because one pattern may match hundreds of inputs.

    Attributes:
        name: the name of the function.
        problems: all problems, one sentence each.
        lacks_axis: whether a problem is that the mesh lacks an axis.
    """

    def __init__(self, name: str, problems: Sequence[str], hint: str = "", lacks_axis: bool = False):
        super().__init__(f"auto_shard({name}): {first_few(_merged(problems), '; ')}{hint}")
        self.name, self.problems, self.lacks_axis = name, tuple(problems), lacks_axis


def _merged(problems: Sequence[str]) -> list[str]:
    """The problems, with those that are the same for several inputs as one.

    >>> _merged(["fixed 'a/up': too long", "fixed 'b/up': too long"])
    ["fixed 'a/up' (and 1 more): too long"]
    """
    inputs: dict[str, list[str]] = {}
    for problem in problems:
        found = re.match(r"\w+ '[^']*'", problem)
        inputs.setdefault(problem[found.end() :] if found else problem, []).append(found[0] if found else "")
    return [
        f"{some[0]}{f' (and {len(some) - 1} more)' if len(some) > 1 else ''}{text}" for text, some in inputs.items()
    ]


def fixed_specs(
    traced: Traced, axes: LogicalAxes, layout: Layout, fixed: Mapping[str, Any], word: str
) -> dict[int, Spec]:
    """The specs that the user fixed: program input -> spec.

    Args:
        traced: the traced function.
        axes: its logical axes.
        layout: the layout that gives named logical axes their mesh axes.
        fixed: path or pattern -> `PartitionSpec` or names of logical axes.
        word: what messages call such a sharding: `fixed`, `annotated` or `wish`.

    Raises:
        FixedError: patterns match no input, specs are not possible, or two specs of one input differ.
    """
    specs: dict[int, Spec] = {}
    problems, lacks_axis = _malformed(fixed, word), False
    shown = traced.in_names if word == WISH else traced.in_paths  # a wish is priced in a report
    for i, wanted in {} if problems else found_inputs(traced, fixed, word, problems).items():
        value, aval = traced.program.inputs[i], traced.in_avals[i]
        try:
            specs[value] = _fixed_spec(wanted, aval, f"{word} '{shown[i]}'", layout, axes, value)
        except PlanError as error:
            problems.append(str(error))
            lacks_axis |= isinstance(error, NoSuchAxisError)
    if problems:
        raise FixedError(traced.name, problems, lacks_axis=lacks_axis)
    return specs


def with_fixed_shardings(
    layouts: Sequence[Named], fix_shardings: Callable[[Layout], None], mesh_is_given: bool
) -> list[Named]:
    """Write the fixed shardings into layouts, and return the layouts in which they are possible.

    Args:
        layouts: the layouts, each with its strategy.
        fix_shardings: writes the fixed shardings into one layout, or raises `FixedError`.
        mesh_is_given: whether the user gave the mesh.

    Raises:
        FixedError: the fixed shardings are possible in no layout.
    """
    feasible: list[Named] = []
    failed: list[FixedError] = []
    for named in layouts:
        try:
            fix_shardings(named[1])
            feasible.append(named)
        except FixedError as error:
            failed.append(error)
    if feasible or not failed:
        return feasible
    nearest = min(failed, key=lambda error: len(error.problems))
    if mesh_is_given or not nearest.lacks_axis:
        raise nearest
    used = ", ".join(dict.fromkeys(a for _, layout in layouts for a in layout.mesh))
    raise FixedError(
        nearest.name,
        nearest.problems,
        f". Without mesh=, the planner names the mesh axes: the plans that it tried have {used}",
    )


def found_inputs(traced: Traced, fixed: Mapping[str, Any], word: str, problems: list[str]) -> dict[int, Any]:
    """Index of an input -> what is fixed for it. A path, or the end of one, takes precedence over globs.

    Appends to `problems`: texts that name no input or are the end of several, and different shardings of one input.
    """
    if not fixed:
        return {}
    exact: dict[int, list[str]] = {}
    by_pattern: dict[int, list[str]] = {}
    forms = [path_forms(path, traced.arguments) for path in traced.in_paths]
    for pattern in fixed:
        try:
            found = find_paths(pattern, forms)
        except AmbiguousPathError as error:
            problems.append(f"{word} {error}")
            continue
        if found is None:
            known = traced.in_paths if pattern[:1].isdecimal() else traced.in_names
            problems.append(f"{word} '{pattern}' matches no input. {suggestions(pattern, known)}")
            continue
        for i in found.indices:
            (by_pattern if found.is_glob else exact).setdefault(i, []).append(pattern)
    chosen = {i: (exact if i in exact else by_pattern)[i] for i in sorted({*exact, *by_pattern})}
    conflicts: dict[tuple[str, str], list[int]] = {}
    for i, patterns in chosen.items():
        others = [p for p in patterns[1:] if _differ(fixed[patterns[0]], fixed[p], traced.in_avals[i].ndim)]
        for other in others:
            conflicts.setdefault((patterns[0], other), []).append(i)
    for (one, other), inputs in conflicts.items():
        also = f" and {len(inputs) - 1} more" if len(inputs) > 1 else ""
        path = traced.in_paths[inputs[0]]
        problems.append(
            f"{word} '{one}' is {fixed[one]} and {word} '{other}' is {fixed[other]}, but both match '{path}'{also}: "
            f"drop one, or add '{path}' itself; an exact path takes precedence over patterns"
        )
    unresolved = {i for inputs in conflicts.values() for i in inputs}
    return {i: fixed[patterns[0]] for i, patterns in chosen.items() if i not in unresolved}


def _differ(one: Any, other: Any, rank: int) -> bool:
    """Whether two specs, or two lists of names, differ for an array of `rank` dimensions."""
    if isinstance(one, PartitionSpec) != isinstance(other, PartitionSpec):
        return True
    if isinstance(one, PartitionSpec):
        return not same_spec(one, other, rank)
    return [*one, *[None] * (rank - len(one))] != [*other, *[None] * (rank - len(other))]


def same_spec(one: PartitionSpec, other: PartitionSpec, rank: int) -> bool:
    """Whether two specs mean the same for an array of `rank` dimensions."""
    rank = max(rank, len(one), len(other))
    return from_partition_spec(one, rank) == from_partition_spec(other, rank)


def fixed_conflicts(traced: Traced, axes: LogicalAxes, specs: Mapping[int, Spec]) -> list[str]:
    """Notes on logical axes that two fixed inputs shard over different mesh axes, at the cost of a reshard."""
    by_axis: dict[int, list[tuple[str, tuple[str, ...]]]] = {}
    for value, path in zip(traced.program.inputs, traced.in_names, strict=True):
        for dim, mesh_axes in zip(axes.of_value[value], specs.get(value, ()), strict=False):
            if len(dim) == 1 and mesh_axes:
                by_axis.setdefault(dim[0], []).append((path, mesh_axes))
    notes = []
    for c, uses in by_axis.items():
        path, over = uses[0]
        other = next(((p, x) for p, x in uses if x[: len(over)] != over[: len(x)]), None)
        if other is not None:
            notes.append(
                f"fixed '{path}' shards {axes.name(c)} over {', '.join(over)}, but fixed '{other[0]}' shards it over "
                f"{', '.join(other[1])}: where they meet, one of them is resharded in every step; fix both over the "
                "same mesh axes to avoid this"
            )
    return notes


def _malformed(fixed: Any, word: str) -> list[str]:
    """Problems with entries that are not a path with a `PartitionSpec` or a sequence of names."""
    if not isinstance(fixed, Mapping):
        return [f"{word} is {fixed!r}; {_EITHER}"]
    pairs = [(p, w) for p, w in fixed.items() if not isinstance(p, str) or not is_sharding_wish(w)]
    return [f"{word} {pattern!r}: {wanted!r}; {_EITHER}" for pattern, wanted in pairs]


def is_sharding_wish(what: Any) -> bool:
    """Whether this is a `PartitionSpec` or a sequence of names of logical axes and None."""
    if isinstance(what, PartitionSpec):
        return all(map(is_spec_entry, what.partitions))
    return isinstance(what, (tuple, list)) and all(name is None or isinstance(name, str) for name in what)


def _fixed_spec(wanted: Any, aval: Any, where: str, layout: Layout, axes: LogicalAxes, value: int) -> Spec:
    if not isinstance(wanted, PartitionSpec):
        return _spec_of_names(wanted, aval, where, layout, axes, value)
    if len(wanted) > aval.ndim:
        raise _too_long(wanted, aval, where)
    spec = from_partition_spec(wanted, aval.ndim)
    flat = [a for dim in spec for a in dim]
    if unknown := [a for a in flat if a not in layout.mesh]:
        close = difflib.get_close_matches(unknown[0], layout.mesh, n=1)
        raise NoSuchAxisError(f"{where}: {spec_text(wanted)} names mesh axis {unknown[0]!r}, but the mesh is "
                        f"{dict(layout.mesh)}; "
                        + (f"did you mean {close[0]!r}? Or " if close else "use its names, or ")
                        + "give mesh= with the names that the spec uses")  # fmt: skip
    if twice := [a for a in flat if flat.count(a) > 1]:
        raise PlanError(f"{where}: {spec_text(wanted)} uses mesh axis {twice[0]!r} twice. Keep it on one dimension")
    for d, dim in enumerate(spec):
        n = layout.shard_count(dim)
        if aval.shape[d] % n:
            named = " x ".join(map(repr, dim))
            raise PlanError(f"{where} dim {d} has size {aval.shape[d]}, not divisible by mesh "
                            f"{'axis' if len(dim) == 1 else 'axes'} {named} ({n}). Pad it to "
                            f"{-(-aval.shape[d] // n) * n}, or drop {named} from its spec")  # fmt: skip
    return spec


def _spec_of_names(
    wanted: Sequence[str | None], aval: Any, where: str, layout: Layout, axes: LogicalAxes, value: int
) -> Spec:
    """The spec that shards the named dimensions as the layout does, and keeps the others whole.

    A name without its number, `head_dim`, means all axes of that name.
    """
    known = {text for name in axes.names.values() for text in (name, _stem(name))}
    if unknown := [n for n in wanted if n is not None and n not in known]:
        raise PlanError(
            f"{where}: the program has no logical axis {', '.join(map(repr, unknown))}; it has "
            f"{', '.join(sorted(known))}"
        )
    if len(wanted) > aval.ndim:
        raise _too_long(wanted, aval, where)
    requested = [*wanted, *[None] * (aval.ndim - len(wanted))]
    own = [[axes.name(c) for c in dim] for dim in axes.of_value[value]]
    wrong = [d for d, n in enumerate(requested) if n is not None and n not in (*own[d], *map(_stem, own[d]))]
    if wrong:
        others = ", ".join(f"dim {d} is {' x '.join(own[d]) or 'of size 1'}, not {requested[d]}" for d in wrong)
        raise PlanError(
            f"{where} is {tuple(wanted)}, but {others}. Give each dimension its own logical axis, or None to keep it "
            "whole"
        )
    spec = layout.spec(value)
    return tuple(() if name is None else spec[d] for d, name in enumerate(requested))


def _stem(name: str) -> str:
    """The name of a logical axis without the number that makes it unique."""
    stem, _, number = name.rpartition("_")
    return stem if number.isdecimal() else name


def _too_long(wanted: Any, aval: Any, where: str) -> PlanError:
    return PlanError(
        f"{where}: {wanted} has {len(wanted)} entries, but the array has {aval.ndim} dimensions {aval.shape}. Drop the "
        "last entries"
    )
