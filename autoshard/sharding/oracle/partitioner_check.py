"""Giving the partitioner the strategies that a rule declares: does it keep the values, and is free really free?

The partitioner can be silently wrong, and where it does not know an operator it silently gathers. Both are facts
about the installed XLA and no faults of a rule, so they are findings of their own kind.
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
from autoshard.sharding.oracle.cases import Case, brief, is_key, plain, typed
from autoshard.sharding.oracle.probe_values import difference
from autoshard.sharding.oracle.shard_runner import QUICK, device_mesh
from autoshard.sharding.program.partitioner_faults import Cut, known_fault
from autoshard.spmdrules.core.rule import POSITIONS, Dims, Rule
from autoshard.spmdrules.custom_ops.opaque_primitive import is_operator
from autoshard.spmdrules.custom_ops.operator import run_sharded

_COLLECTIVE = re.compile(
    r"= (?P<type>.*?) (?P<op>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|"
    r"collective-broadcast|ragged-all-to-all)(?:-start)?\("
)
_MESH = (2, 2)
_PINNED = ("sharding_constraint", "reshard", "layout_constraint", "relayout", "device_put")  # say themselves where


@dataclass(frozen=True)
class Strategy:
    """Some factors of a rule on mesh axes, as specs of the operands and the results."""

    axes: tuple[tuple[str, str], ...]  # factor, mesh axis
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
    """Compiles an operator with the shardings of several strategies, runs it and counts its collectives.

    Args:
        case: the operator.
        rule: its rule.
        counts: the strategies, how many ways each factor is cut; those that no `PartitionSpec` can say are left out.
        operands: whole operands to run it on.
        known: leave out what is among the known faults.

    Returns:
        For each fault its factors and what is wrong.
    """
    if case.name in _PINNED or any(0 in a.shape for a in (*case.avals, *case.results)):
        return []  # jax 0.10 cannot read sharded arrays without elements
    mesh = device_mesh(_MESH)
    assert mesh is not None
    groups: dict[str, list[Strategy]] = {}
    for strategy in filter(None, (_strategy(rule, c) for c in counts)):
        cut = Cut(case.avals, case.eqn.params, rule, strategy.factors)
        if known and known_fault(case.name, cut, "wrong", "crash", "fail"):
            continue
        dear = known and known_fault(case.name, cut, "dear")
        groups.setdefault("anything" if dear else _price(rule, strategy), []).append(strategy)
    whole = case.run(operands)
    faults = []
    for price, strategies in groups.items():
        # Compiling is what takes the time: all at once, and one by one only where something is wrong.
        if len(strategies) > 1 and not _faults(case, rule, strategies, operands, whole, mesh, price):
            continue
        for s in strategies:
            faults += [(s.factors, fault) for fault in _faults(case, rule, [s], operands, whole, mesh, price)]
    return faults


def _price(rule: Rule, strategy: Strategy) -> str:
    """What a strategy may cost: nothing, one reduction, or anything that does not gather an operand."""
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
    known = tuple(spec for spec in specs if spec is not None)
    return Strategy(tuple(axes.items()), known[: len(rule.operands)], known[len(rule.operands) :])


def _spec(rule: Rule, dims: Dims, axes: Mapping[str, str], counts: Mapping[str, int]) -> PartitionSpec | None:
    """The spec that cuts these factors, None where one of them is minor to a factor that is not cut to the end."""
    entries: list[Any] = []
    for dim in dims:
        names: list[str] = []
        reachable = True
        for factor in dim:
            size = rule.factor(factor).size
            if size == 1:
                continue
            if factor in axes:
                if not reachable:
                    return None
                names.append(axes[factor])
            reachable = reachable and factor in axes and counts[factor] == size
        entries.append(tuple(names) or None)
    return PartitionSpec(*entries)


def _faults(
    case: Case,
    rule: Rule,
    strategies: Sequence[Strategy],
    operands: Sequence[np.ndarray],
    whole: Sequence[np.ndarray],
    mesh: Mesh,
    price: str,
) -> list[str]:
    """What is wrong with one program that runs the operator once for each strategy."""
    sharded = functools.partial(NamedSharding, mesh)

    def run(*copies: Sequence[Any]) -> list[list[Any]]:
        return [_as_planned(case, s, mesh, copy) for s, copy in zip(strategies, copies, strict=True)]

    jitted = jax.jit(
        run,
        in_shardings=tuple([sharded(spec) for spec in s.operands] for s in strategies),
        out_shardings=[[sharded(spec) for spec in s.results] for s in strategies],
    )
    arrays = [typed(x, like) for x, like in zip(operands, case.operands, strict=True)]
    # Each strategy has its own copy of the operands, or the compiler would run the operator once for all.
    copies = [list(arrays) for _ in strategies]
    try:
        compiled = jitted.lower(*copies).compile(compiler_options=QUICK)
        placed = [[_place(x, sharded(spec)) for x, spec in zip(arrays, s.operands, strict=True)] for s in strategies]
        results = compiled(*placed)
    except Exception as error:  # JAX and XLA refuse a partitioning with many types: each is a finding of the oracle
        return [f"the partitioner failed: {brief(error)}"]
    faults = []
    for outputs in results:
        for r, (value, expected) in enumerate(zip(outputs, whole, strict=True)):
            if wrong := difference(expected, plain(value)):
                faults.append(f"the partitioned program is silently wrong: result {r} has {wrong}")
    return faults + _excess(rule, strategies, operands, price, compiled.as_text() or "")


def _as_planned(case: Case, strategy: Strategy, mesh: Mesh, operands: Sequence[Any]) -> list[Any]:
    """Runs the operator as a plan does: one with a declared rule on shards, every other one as the partitioner can."""
    if is_operator(case.eqn.primitive):
        return run_sharded(case.eqn.params, mesh, strategy.operands, strategy.results, *operands)
    return _compat.bind(case.eqn, case.eqn.params, *operands)


def _place(x: Any, sharding: NamedSharding) -> Any:
    # From the host: cutting an array that lies on one device would compile a program for each.
    return jax.device_put(x if is_key(x.dtype) else np.asarray(x), sharding)


def _found(rule: Rule, strategy: Strategy) -> int:
    """How many positions the shards find, which are gathered to decide among them."""
    if not any(rule.factor(f).op in POSITIONS for f in strategy.factors):
        return 0
    sizes = [math.prod(rule.factor(f).size or 1 for dim in dims for f in dim) for dims in rule.results]
    return max(sizes) * 2 ** len(strategy.axes)


def _excess(
    rule: Rule, strategies: Sequence[Strategy], operands: Sequence[np.ndarray], price: str, text: str
) -> list[str]:
    """Collectives that the rule does not account for."""
    found = [(m["op"], m["type"]) for m in _COLLECTIVE.finditer(text)]
    names = [op for op, _ in found]
    if price == "nothing" and names:
        return [f"it should be free, but the partitioner makes {_counted(names)}"]
    if price == "one reduction":
        others = [op for op in names if op != "all-reduce"]
        partial = sum(1 for s in strategies for r in range(len(rule.results))
                      if any(rule.partial(f, r) for f in s.factors))  # fmt: skip
        if others or len(names) > partial:
            return [f"it should cost one reduction, but the partitioner makes {_counted(names)}"]
    if price == "some":
        gathered = [_elements(kind) for op, kind in found if op == "all-gather"]
        return [
            f"the partitioner gathers the whole of operand {i}, which the rule says stays sharded"
            for s in strategies
            for i, dims in enumerate(rule.operands)
            if any(f in dim for f in s.factors for dim in dims)
            and any(n >= operands[i].size > max(1, _found(rule, s)) for n in gathered)
        ]
    return []


def _counted(names: Sequence[str]) -> str:
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _elements(hlo_type: str) -> int:
    """Elements of the largest array in an HLO type such as ``f32[8,4]{1,0}`` or a tuple of them."""
    shapes = re.findall(r"\[([\d,]*)\]", hlo_type)
    return max((math.prod(int(n) for n in s.split(",") if n) for s in shapes), default=0)
