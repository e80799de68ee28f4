"""Checks that XLA's partitioner implements a rule's strategies: with the right values, and no extra collectives.

The partitioner can be silently wrong, and it silently gathers where it does not support an operator. Both are
properties of the installed XLA and not errors of a rule, so such a finding has its own kind.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.oracle.cases import Case, error_summary, from_numpy, is_key, to_numpy
from autoshard.sharding.oracle.probe_values import difference
from autoshard.sharding.oracle.shard_runner import FAST_COMPILE, device_mesh
from autoshard.sharding.program.partitioner_faults import ShardedOperator, known_fault
from autoshard.spmdrules.core.rule import POSITIONS, Dims, Rule
from autoshard.spmdrules.custom_ops.opaque_primitive import is_operator
from autoshard.spmdrules.custom_ops.operator import run_sharded

_COLLECTIVE = re.compile(
    r"= (?P<type>.*?) (?P<op>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|"
    r"collective-broadcast|ragged-all-to-all)(?:-start)?\("
)
_MESH = (2, 2)
# These primitives contain a sharding themselves.
_SHARDING_PRIMITIVES = (
    "sharding_constraint",
    "reshard",
    "layout_constraint",
    "relayout",
    "device_put",
)


@shown
@dataclass(frozen=True)
class Strategy:
    """An assignment of factors of a rule to mesh axes, as specs of the operands and the results."""

    axes: tuple[tuple[str, str], ...]  # pairs of factor and mesh axis
    operands: tuple[PartitionSpec, ...]
    results: tuple[PartitionSpec, ...]

    @property
    def factors(self) -> tuple[str, ...]:
        """The factors that are sharded."""
        return tuple(f for f, _ in self.axes)


def check_partitioner(
    case: Case,
    rule: Rule,
    counts: Sequence[Mapping[str, int]],
    operands: Sequence[np.ndarray],
    known: bool = True,
) -> list[tuple[tuple[str, ...], str]]:
    """Compiles an operator with the shardings of several strategies, runs it, and counts its collectives.

    Args:
        case: the operator.
        rule: its rule.
        counts: the strategies: how many ways each factor is split. Those that no `PartitionSpec` expresses are skipped.
        operands: unsharded operands to run it on.
        known: whether to skip the known faults.

    Returns:
        The factors and a description for each fault.
    """
    if case.name in _SHARDING_PRIMITIVES or any(0 in a.shape for a in (*case.avals, *case.results)):
        return []  # jax 0.10 cannot read empty sharded arrays
    mesh = device_mesh(_MESH)
    assert mesh is not None
    groups: dict[str, list[Strategy]] = {}
    for strategy in filter(None, (_strategy(rule, c) for c in counts)):
        application = ShardedOperator(case.avals, case.eqn.params, rule, strategy.factors)
        if known and known_fault(case.name, application, "wrong", "crash", "fail"):
            continue
        costly = known and known_fault(case.name, application, "costly")
        groups.setdefault("anything" if costly else _allowed_cost(rule, strategy), []).append(strategy)
    whole = case.run(operands)
    faults = []
    for allowed, strategies in groups.items():
        # Compilation dominates the time: compile all at once, and one by one only if something is wrong.
        if len(strategies) > 1 and not _faults(case, rule, strategies, operands, whole, mesh, allowed):
            continue
        for s in strategies:
            faults += [(s.factors, fault) for fault in _faults(case, rule, [s], operands, whole, mesh, allowed)]
    return faults


def _allowed_cost(rule: Rule, strategy: Strategy) -> str:
    """The communication that a strategy may need: nothing, one reduction, or some that does not gather an operand."""
    factors = [rule.factor(f) for f in strategy.factors]
    if any(f.kind in ("index", "halo") or f.op in POSITIONS for f in factors):
        return "some"
    return "one reduction" if any(f.kind == "reduce" for f in factors) else "nothing"


def _strategy(rule: Rule, counts: Mapping[str, int]) -> Strategy | None:
    if len(counts) > len(_MESH) or any(n != _MESH[0] for n in counts.values()):
        return None
    axes = dict(zip(counts, "ab", strict=False))
    specs = [_spec(rule, dims, axes, counts) for dims in (*rule.operands, *rule.results)]
    if any(spec is None for spec in specs):
        return None
    expressed = tuple(spec for spec in specs if spec is not None)
    return Strategy(tuple(axes.items()), expressed[: len(rule.operands)], expressed[len(rule.operands) :])


def _spec(rule: Rule, dims: Dims, axes: Mapping[str, str], counts: Mapping[str, int]) -> PartitionSpec | None:
    """The spec that shards these factors; None if one is minor to a factor that is not fully sharded."""
    entries: list[Any] = []
    for dim in dims:
        names: list[str] = []
        contiguous = True
        for factor in dim:
            size = rule.factor(factor).size
            if size == 1:
                continue
            if factor in axes:
                if not contiguous:
                    return None
                names.append(axes[factor])
            contiguous = contiguous and factor in axes and counts[factor] == size
        entries.append(tuple(names) or None)
    return PartitionSpec(*entries)


def _faults(
    case: Case,
    rule: Rule,
    strategies: Sequence[Strategy],
    operands: Sequence[np.ndarray],
    whole: Sequence[np.ndarray],
    mesh: Mesh,
    allowed: str,
) -> list[str]:
    """Describes what is wrong with one program that runs the operator once for each strategy."""
    sharded = functools.partial(NamedSharding, mesh)

    def run(*copies: Sequence[Any]) -> list[list[Any]]:
        return [_as_planned(case, s, mesh, copy) for s, copy in zip(strategies, copies, strict=True)]

    jitted = jax.jit(
        run,
        in_shardings=tuple([sharded(spec) for spec in s.operands] for s in strategies),
        out_shardings=[[sharded(spec) for spec in s.results] for s in strategies],
    )
    arrays = [from_numpy(x, like) for x, like in zip(operands, case.operands, strict=True)]
    # Each strategy has its own operands. With shared operands, the compiler would run the operator only once.
    copies = [list(arrays) for _ in strategies]
    try:
        compiled = jitted.lower(*copies).compile(compiler_options=FAST_COMPILE)
        placed = [[_place(x, sharded(spec)) for x, spec in zip(arrays, s.operands, strict=True)] for s in strategies]
        results = compiled(*placed)
    except Exception as error:  # JAX and XLA reject a partitioning with many types of error: each is a finding
        return [f"the partitioner failed: {error_summary(error)}"]
    faults = []
    for outputs in results:
        for r, (value, expected) in enumerate(zip(outputs, whole, strict=True)):
            if wrong := difference(expected, to_numpy(value)):
                faults.append(f"the partitioned program is silently wrong: result {r} has {wrong}")
    return faults + _excess(rule, strategies, operands, allowed, compiled.as_text() or "")


def _as_planned(case: Case, strategy: Strategy, mesh: Mesh, operands: Sequence[Any]) -> list[Any]:
    """Runs the operator as a plan does: an `@operator` on its shards, any other by the partitioner."""
    if is_operator(case.eqn.primitive):
        return run_sharded(case.eqn.params, mesh, strategy.operands, strategy.results, *operands)
    return _compat.bind(case.eqn, case.eqn.params, *operands)


def _place(x: Any, sharding: NamedSharding) -> Any:
    # From the host: splitting an array on a device would compile a program for each array.
    return jax.device_put(x if is_key(x.dtype) else np.asarray(x), sharding)


def _gathered_positions(rule: Rule, strategy: Strategy) -> int:
    """The number of positions (argmax) that the shards find, which are gathered to choose among them."""
    if not any(rule.factor(f).op in POSITIONS for f in strategy.factors):
        return 0
    sizes = [math.prod(rule.factor(f).size or 1 for dim in dims for f in dim) for dims in rule.results]
    return max(sizes) * 2 ** len(strategy.axes)


def _excess(
    rule: Rule, strategies: Sequence[Strategy], operands: Sequence[np.ndarray], allowed: str, text: str
) -> list[str]:
    """Describes collectives in a compiled program that the rule does not account for."""
    found = [(m["op"], m["type"]) for m in _COLLECTIVE.finditer(text)]
    names = [op for op, _ in found]
    if allowed == "nothing" and names:
        return [f"the rule needs no communication, but the partitioner inserts {_counted(names)}"]
    if allowed == "one reduction":
        others = [op for op in names if op != "all-reduce"]
        partial = sum(1 for s in strategies for r in range(len(rule.results))
                      if any(rule.partial(f, r) for f in s.factors))  # fmt: skip
        if others or len(names) > partial:
            return [f"the rule needs one reduction, but the partitioner inserts {_counted(names)}"]
    if allowed == "some":
        gathered = [_elements(kind) for op, kind in found if op == "all-gather"]
        return [
            f"the partitioner gathers the whole of operand {i}, although the rule keeps it sharded"
            for s in strategies
            for i, dims in enumerate(rule.operands)
            if any(f in dim for f in s.factors for dim in dims)
            and any(n >= operands[i].size > max(1, _gathered_positions(rule, s)) for n in gathered)
        ]
    return []


def _counted(names: Sequence[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _elements(hlo_type: str) -> int:
    """The number of elements of the largest array in an HLO type, such as ``f32[8,4]{1,0}`` or a tuple of these."""
    shapes = re.findall(r"\[([\d,]*)\]", hlo_type)
    return max((math.prod(int(n) for n in s.split(",") if n) for s in shapes), default=0)
