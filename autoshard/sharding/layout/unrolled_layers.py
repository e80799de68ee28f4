"""The layers of a program that writes them out, by the parameters that its operators use.

    site     an operator outside of loops that uses parameters; a rematerialized part of the program is one site
    layer    sites that repeat: the next ones are equal operators that use equal parameters, but not the same ones
    stage    a layer, or the sites between two runs of layers

Equal means the same logical axes. Names are not read.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from autoshard._shown import shown
from autoshard.sharding.axes.logical_axes import LogicalAxes
from autoshard.sharding.axes.roles import Roles
from autoshard.sharding.layout.loop_gathers import operators, parameters_of
from autoshard.sharding.program.operator_kinds import INLINED_CALLS
from autoshard.spmdrules.ir.program import Block, Op


@shown
@dataclass(frozen=True, eq=False)
class Site:
    """An operator outside of loops that uses parameters.

    Attributes:
        op: the operator.
        users: the operator, or those in its body that use parameters.
        parameters: what they use: the program's inputs, each with its position in a stack.
        key: equal for equal operators that use equal parameters.
    """

    op: Op
    users: tuple[Op, ...]
    parameters: frozenset[tuple[int, tuple[int, ...]]]
    key: Hashable


@shown
@dataclass(frozen=True, eq=False)
class Stage:
    """Sites that follow each other: those of one layer, or those between two runs of layers.

    Attributes:
        sites: the sites.
        is_layer: whether they use the parameters of a layer.
    """

    sites: tuple[Site, ...]
    is_layer: bool


def stages_of(axes: LogicalAxes, roles: Roles) -> list[Stage]:
    """Return the stages of a program, in order; none if no layer repeats."""
    sites = list(_sites(axes.program.block, axes, roles))
    numbers: dict[Hashable, int] = {}  # of the keys, because numbers are compared faster
    runs = repeats([numbers.setdefault(site.key, len(numbers)) for site in sites])
    runs = [run for first, size, count in runs for run in _layers(sites, first, size, count)]
    if not any(count > 1 for _, _, count in runs):
        return []
    stages = [
        (tuple(sites[first + k * size : first + (k + 1) * size]), count > 1)
        for first, size, count in runs
        for k in range(count)
    ]
    # The backward pass of the first layer may lack gradients that others have. Then it is not part of a run.
    of_layers = {v for stage, repeats in stages if repeats for site in stage for v in site.parameters}
    return [Stage(stage, any(site.parameters & of_layers for site in stage)) for stage, _ in stages]


def _sites(block: Block, axes: LogicalAxes, roles: Roles) -> Iterator[Site]:
    for op in block.ops:
        if op.name in INLINED_CALLS:
            yield from _sites(op.blocks[0], axes, roles)
        elif not op.blocks or op.name == "remat2":
            within = [op] if not op.blocks else [each for each, is_open in operators(op.blocks[0]) if is_open]
            used = [(each, parameters) for each in within if (parameters := parameters_of(axes, roles, each))]
            if used:
                key = tuple((id(each.rule), *(axes.of_value[v] for v in parameters)) for each, parameters in used)
                values = {v for _, parameters in used for v in parameters}
                aliases, positions = axes.parameter_aliases, axes.stack_positions
                every = frozenset((aliases.get(v, v), positions.get(v, ())) for v in values)
                yield Site(op, tuple(each for each, _ in used), every, (op.name, key))


def _layers(sites: Sequence[Site], first: int, size: int, count: int) -> list[tuple[int, int, int]]:
    """Return a run as it is, or as one group if its groups use the same parameters: the uses of one layer."""
    groups = [
        frozenset().union(*(site.parameters for site in sites[first + k * size : first + (k + 1) * size]))
        for k in range(count)
    ]
    if len(frozenset().union(*groups)) < sum(map(len, groups)):
        return [(first, size * count, 1)]
    return [(first, size, count)]


def repeats(keys: Sequence[Hashable]) -> list[tuple[int, int, int]]:
    """Cut a sequence into repeated groups and what is between them: (first, number of keys in a group, groups).

    Each group is the one that covers most keys from there on, and among these the shortest.

    >>> repeats("abxyxyxyc")
    [(0, 2, 1), (2, 2, 3), (8, 1, 1)]
    """
    found: list[tuple[int, int, int]] = []
    start = single = 0  # keys from `single` to `start` are in no group
    while start < len(keys):
        best = (0, 0)
        for size in range(1, (len(keys) - start) // 2 + 1):
            count = 1
            while keys[start + count * size : start + (count + 1) * size] == keys[start : start + size]:
                count += 1
            if count > 1 and count * size > best[0] * best[1]:
                best = (size, count)
        if not best[0]:
            start += 1
            continue
        if start > single:
            found.append((single, start - single, 1))
        found.append((start, best[0], best[1]))
        start = single = start + best[0] * best[1]
    return [*found, (single, len(keys) - single, 1)] if single < len(keys) else found
