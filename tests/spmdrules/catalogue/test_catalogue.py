"""Checks every named operator and its gradient: the derived rule, and each equation by execution."""

import functools
import itertools
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.sharding.oracle.cases import Case, collect, example, to_numpy
from autoshard.sharding.oracle.partitioner_check import _COLLECTIVE, _elements
from autoshard.sharding.oracle.probe_values import difference
from autoshard.sharding.oracle.rule_check import Finding, check_case
from autoshard.sharding.oracle.shard_runner import FAST_COMPILE, device_mesh
from autoshard.sharding.program.partitioner_faults import ShardedOperator, known_fault
from autoshard.spmdrules import Rule, catalogue
from autoshard.spmdrules.catalogue import Operator
from autoshard.spmdrules.core.registry import rule_for
from autoshard.spmdrules.ir.program import build
from autoshard.spmdrules.reference.derived_rule import Derived, DerivedFactor
from autoshard.spmdrules.reference.operator_table import UNCHECKED, rows_of

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "rules.md").read_text()
CATALOGUE = catalogue.catalogue()
FAMILIES = (
    "activation", "attention", "comparison", "convolution", "elementwise", "indexing", "layout", "linalg", "losses",
    "moe", "norms", "order", "random", "reduction", "updates",
)  # fmt: skip
# Operators without a factor that can be sharded. Their rows say why.
UNSHARDABLE = {
    "beta", "choice", "convolve", "convolve_grad", "dirichlet", "fold_in", "gamma", "nonzero", "pad_edge",
    "pad_edge_grad", "permutation", "schur", "unique", "warmup_cosine_rate",
}  # fmt: skip
EVERY = [pytest.param(op, gradient, id=op.name + "_grad" * gradient)
         for _, op in CATALOGUE for gradient in ((False, True) if op.wrt else (False,))]  # fmt: skip


# A sample of the operators. The slow tests run the equations of all of them.
COMMON = {
    "softmax", "layer_norm", "batch_norm", "cross_entropy", "embedding", "index_put", "rope", "adamw",
}  # fmt: skip
SAMPLE = [param for param in EVERY if str(param.id).removesuffix("_grad") in COMMON]


def selected(op: Operator, gradient: bool) -> Operator:
    chosen = op.gradient if gradient else op
    assert chosen is not None
    return chosen


def test_size_of_the_catalogue():
    assert tuple(dict.fromkeys(family for family, _ in CATALOGUE)) == FAMILIES
    assert len(CATALOGUE) >= 190 and sum(bool(op.wrt) for _, op in CATALOGUE) >= 190


def test_operators_without_a_gradient_have_a_note():
    missing = [op.name for _, op in CATALOGUE if not op.wrt and not op.note]
    assert missing == []


def test_names_are_unique(monkeypatch):
    family = type("family", (), {"OPERATORS": (CATALOGUE[0][1],)})
    monkeypatch.setattr(catalogue.importlib, "import_module", lambda name: family)
    with pytest.raises(ValueError, match=f"{CATALOGUE[0][1].name}.* twice. Give each operator a unique name"):
        catalogue.catalogue()


def test_unchecked_operators_exist():
    assert set(UNCHECKED) <= {param.id for param in EVERY}


@pytest.mark.whole
@pytest.mark.skipif(
    f"with jax {jax.__version__};" not in PAGE, reason="the page lists the primitives of another jax version"
)
def test_the_page_is_not_stale():
    # In a separate process, since tests register primitives as well.
    command = [sys.executable, "-m", "autoshard.cli", "rules", "--markdown"]
    generated = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert generated == PAGE, "the page is stale. Run: autoshard rules --markdown > docs/rules.md"


def test_the_page_is_for_a_tested_jax_version():
    (version,) = re.findall(r"with jax (\d+\.\d+\.\d+)", PAGE)
    lock = (ROOT / "requirements.lock").read_text()
    assert re.search(rf"^jax=={re.escape(version)}\s", lock, re.MULTILINE)


def test_every_operator_on_the_page_can_be_sharded():
    """Reads the rules from the page; `test_the_page_is_not_stale` checks that these are the derived ones."""
    cells = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("|")]
    named = {param.id for param in EVERY}
    assert named <= {row[0] for row in cells}
    assert {row[0] for row in cells if row[0] in named and "nothing to shard" in row[-1]} == UNSHARDABLE


@pytest.mark.slow
@pytest.mark.parametrize("op", [op for _, op in CATALOGUE], ids=[op.name for _, op in CATALOGUE])
def test_every_operator_can_be_sharded(op):
    for row in rows_of(op.name):
        assert bool(row.rule.shardable_factors) != (row.name in UNSHARDABLE), f"{row.name}: {row.rule} {row.note}"
        assert row.rule.shardable_factors or "nothing to shard" in row.note


# Equations on shards -------------------------------------------------------------------------------------------

FINDINGS: dict[Any, list[Finding]] = {}  # by equation, of all equations that were checked in this run


def signature(primitive: Any, avals: Any, params: Any, rule: Rule | None, exact: bool) -> Any:
    """Returns a key for an equation: exact, or by its dtypes and the kinds and positions of its rule's factors.

    The inexact key suffices here, since other tests check every primitive with several ranks, sizes and parameters.
    """
    types = tuple(str(a.dtype) for a in avals)
    if exact or rule is None:
        return primitive, types, tuple(a.shape for a in avals), str(sorted(params.items(), key=str))
    arrays = (*rule.operands, *rule.results)
    parts = {f for dims in arrays for dim in dims if len(dim) > 1 for f in dim}
    factors = frozenset(
        (f.kind, f.op, f.name in parts, tuple(any(f.name in dim for dim in dims) for dims in arrays))
        for f in rule.factors
    )
    return primitive, types, factors, rule.linear, rule.moves


def signatures(op: Operator, exact: bool = False) -> Iterator[Any]:
    for each in build(jax.make_jaxpr(op.fn)(*op.args)).ops():
        if each.rule is not None:
            avals = [v.aval for v in each.eqn.invars]
            yield signature(each.eqn.primitive, avals, each.eqn.params, each.rule, exact)


def case_signature(case: Case, exact: bool) -> Any:
    rule = rule_for(case.eqn.primitive, case.avals, case.eqn.params)
    return signature(case.eqn.primitive, case.avals, case.eqn.params, rule, exact)


def findings_text(findings: list[Finding]) -> str:
    return "\n".join(map(str, findings))


@pytest.mark.few(1)
@pytest.mark.whole
@pytest.mark.parametrize(("op", "gradient"), SAMPLE)
def test_equations_of_common_operators(op, gradient):
    examine(selected(op, gradient))


@pytest.mark.slow
@pytest.mark.parametrize(("op", "gradient"), EVERY)
def test_equations(op, gradient):
    examine(selected(op, gradient))


def examine(chosen: Operator) -> None:
    """Checks every equation of an operator with the oracle, except those that are like one checked before."""
    keys = set(signatures(chosen))
    if keys - FINDINGS.keys():
        for case in collect(chosen.fn, chosen.args):
            key = case_signature(case, exact=False)
            if key not in FINDINGS:
                FINDINGS[key] = check_case(case, partitioner=False)
            keys.add(key)
    findings = [finding for key in keys for finding in FINDINGS.get(key, [])]
    assert not findings, findings_text(findings)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "gradient"), EVERY)
def test_equations_with_the_partitioner(op, gradient):
    chosen = selected(op, gradient)
    for case in collect(chosen.fn, chosen.args):
        key = ("partitioner", case_signature(case, exact=True))
        if key not in FINDINGS:
            FINDINGS[key] = check_case(case, partitioner=True)
        assert not FINDINGS[key], findings_text(FINDINGS[key])


# Forward derivatives consist of the equations of operators and gradients, and of a few others.
FORWARD = [pytest.param(op, id=op.name) for _, op in CATALOGUE if op.wrt]
FORWARD_SAMPLE = [param for param in FORWARD if param.id in ("layer_norm", "max_pool1d", "sort")]


def with_random_floats(case: Case) -> Case:
    """A case with random floats. Those of a derivative may cancel, as in products of an inverse with its matrix."""
    floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in case.operands]
    random = [sample_values(100 + k, jax.ShapeDtypeStruct(x.shape, x.dtype)) for k, x in enumerate(case.operands)]
    return Case(case.eqn, tuple(r if f else x for f, r, x in zip(floats, random, case.operands, strict=True)))


@pytest.mark.few(1)
@pytest.mark.whole
@pytest.mark.parametrize("op", FORWARD_SAMPLE)
def test_equations_of_common_tangents(op):
    assert op.forward_derivative is not None
    examine(op.forward_derivative)


@pytest.mark.slow
@pytest.mark.parametrize("op", FORWARD)
def test_equations_of_tangents(op):
    forward = op.forward_derivative
    known = {*signatures(op, True), *signatures(op.gradient, True)}
    if set(signatures(forward, True)) <= known:
        return
    for case in collect(forward.fn, forward.args):
        key = ("partitioner", exact := case_signature(case, exact=True))
        if exact in known:
            continue
        if key not in FINDINGS:
            FINDINGS[key] = check_case(with_random_floats(case), partitioner=True)
        assert not FINDINGS[key], findings_text(FINDINGS[key])


def test_tangents_are_those_of_the_operator():
    op = next(op for _, op in CATALOGUE if op.name == "layer_norm")
    args, tangents = ([sample_values(k + n, x) for k, x in enumerate(op.args)] for n in (0, 10))
    expected = jax.jvp(op.fn, args, tangents)[1]
    assert op.wrt == (0, 1, 2) and op.forward_derivative is not None
    assert difference(to_numpy(expected), to_numpy(op.forward_derivative.fn(*args, *tangents)[0])) is None


# The whole operator on devices ---------------------------------------------------------------------------------


def mesh_and_specs(rule: Derived, f: DerivedFactor) -> tuple[Any, list[PartitionSpec], list[PartitionSpec]] | None:
    """A mesh and specs that shard a factor and fully split the factors major to it; None without enough devices."""
    arrays = (*rule.operands, *rule.results)
    majors, pending = [], [f.name]
    while pending:
        name = pending.pop()
        before = {g: None for dims in arrays for dim in dims if name in dim for g in dim[: dim.index(name)]}
        new = [g for g in before if g not in (*majors, f.name)]
        majors, pending = majors + new, pending + new
    sizes = {g.name: g.size for g in rule.factors}
    shard_counts = [f.fewest_shards, *(sizes[g] for g in majors)]
    mesh = device_mesh(shard_counts) if math.prod(shard_counts) <= 8 else None
    if mesh is None:
        return None
    axes = dict(zip((f.name, *majors), "abcd", strict=False))
    specs = [PartitionSpec(*(tuple(axes[g] for g in dim if g in axes) or None for dim in dims)) for dims in arrays]
    return mesh, specs[: len(rule.operands)], specs[len(rule.operands) :]


def has_known_fault(op: Operator, *effects: Any) -> bool:
    """Whether one of an operator's equations has a known fault of the partitioner with one of these effects."""
    return any(
        known_fault(
            each.name,
            ShardedOperator([v.aval for v in each.eqn.invars], each.eqn.params, each.rule, (f.name,)),
            *effects,
        )
        for each in build(jax.make_jaxpr(op.fn)(*op.args)).ops()
        if each.rule is not None
        for f in each.rule.factors
    )


# Relative error. Wide, since terms of a whole operator cancel; a missing term or factor gives a larger error.
ROUNDING = {"float32": 1e-3, "complex64": 1e-3}
# Shardings that need no communication by the rules, but for which the partitioner communicates.
_SLICED = "a slice of a replicated array is taken by moving pieces of a sharded copy"
_COUNTING = ("choose", "choose_grad", "nanmedian", "nanmedian_grad", "diagonal", "diagonal_grad")
_WINNERS = {"argmax": "b", "argmin": "b", "switch_gate": "d", "switch_gate_grad": "d"}
_POOLING = ("avg_pool1d_grad", "avg_pool2d_grad", "avg_pool3d_grad", "sum_pool2d_grad", "lp_pool2d_grad")
COSTLY = {
    ("tile_grad", "b"): "the copies are summed as if they were sharded as well",
    ("crelu_grad", "b"): _SLICED,
    ("cov_grad", "c"): "the sharded operand of a product is gathered",
    ("masked_select_grad", "d"): "the positions of the updates are gathered, but not the updates",
    ("repeat_interleave_grad", "d"): "the positions of the updates are gathered, but not the updates",
    **dict.fromkeys(_WINNERS.items(), "the extreme of each shard and its position are gathered to choose among them"),
    ("learned_positions", "b"): _SLICED,
    ("sinusoidal_positions", "c"): _SLICED,
    **dict.fromkeys(
        itertools.product(_COUNTING, "abc"), "only a plan's program turns these positions into a batch dimension"
    ),
    **dict.fromkeys(itertools.product(_POOLING, "bdf"), "only a plan's program turns this gradient into one operator"),
}


def sample_values(number: int, x: Any) -> jax.Array:
    """A sample argument. Its floats differ from those of other arguments, since gradients might cancel otherwise."""
    if isinstance(x, jax.ShapeDtypeStruct) and jnp.issubdtype(x.dtype, jnp.floating):
        return jax.random.normal(jax.random.key(number), x.shape, x.dtype)
    return example(x) if isinstance(x, jax.ShapeDtypeStruct) else jnp.asarray(x)


def undeclared_collectives(f: DerivedFactor, rule: Derived, leaves: list[Any], text: str) -> list[str]:
    """Collectives in a compiled program that the rule does not account for."""
    collectives = [(m["op"], m["type"]) for m in _COLLECTIVE.finditer(text)]
    if f.kind == "index":
        sizes = [x.size for x, dims in zip(leaves, rule.operands, strict=True) if any(f.name in dim for dim in dims)]
        return [
            f"{op} {kind}"
            for op, kind in collectives
            if op == "all-gather" and _elements(kind) >= min(sizes, default=1)
        ]
    reduced = ("all-reduce", "reduce-scatter") if f.kind in ("reduce", "inside") else ()
    return [f"{op} {kind}" for op, kind in collectives if op not in reduced]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "gradient"), EVERY)
def test_compiled_for_devices(op, gradient):
    chosen, rule = selected(op, gradient), rows_of(op.name)[gradient].rule
    if has_known_fault(chosen, "wrong", "crash", "fail"):
        return  # a plan avoids these, and the compiler may end the process
    costly = has_known_fault(chosen, "costly")
    shapes, tree = jax.tree.flatten(chosen.args)
    leaves = [sample_values(number, x) for number, x in enumerate(shapes)]

    def run(*xs: Any) -> list[Any]:
        return jax.tree.leaves(chosen.fn(*tree.unflatten(xs)))

    expected = [to_numpy(x) for x in jax.jit(run, compiler_options=FAST_COMPILE)(*leaves)]
    errors = []
    for f in rule.shardable_factors:
        if (where := mesh_and_specs(rule, f)) is None:
            continue
        mesh, inputs, outputs = where
        sharded = functools.partial(NamedSharding, mesh)
        jitted = jax.jit(run, in_shardings=tuple(map(sharded, inputs)), out_shardings=list(map(sharded, outputs)))
        compiled = jitted.lower(*leaves).compile(compiler_options=FAST_COMPILE)
        actual = compiled(*(jax.device_put(x, sharded(spec)) for x, spec in zip(leaves, inputs, strict=True)))
        for r, (a, b) in enumerate(zip(expected, actual, strict=True)):
            if text := difference(a, to_numpy(b), ROUNDING.get(str(a.dtype))):
                errors.append(f"{f.name}: result {r}: {text}")
        if not costly and (chosen.name, f.name) not in COSTLY:
            errors += [
                f"{f.name} ({f.kind}): {each}"
                for each in undeclared_collectives(f, rule, leaves, compiled.as_text() or "")
            ]
    assert not errors, f"{rule}\n" + "\n".join(errors)
