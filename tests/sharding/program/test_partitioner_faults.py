"""The listed faults of the partitioner still exist. A fault that XLA has fixed should leave the list."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding

from autoshard import _compat, plan
from autoshard.sharding.oracle.cases import collect, to_numpy
from autoshard.sharding.oracle.partitioner_check import check_partitioner
from autoshard.sharding.oracle.probe_values import difference, trials
from autoshard.sharding.oracle.shard_runner import device_mesh
from autoshard.sharding.program.partitioner_faults import (
    KNOWN_PARTITIONER_FAULTS,
    ShardedOperator,
    known_fault,
    writes_one_row,
)
from autoshard.spmdrules.core.placement import to_partition_spec
from autoshard.spmdrules.core.registry import rule_for
from autoshard.spmdrules.custom_ops.sharded_execution import body_of, run_on_shards
from autoshard.spmdrules.ir.program import build
from tests.sharding.programs import assert_close

COLLECTIVE = re.compile(r"= .*? (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def conv(groups=1, batch_groups=1, strides=(1, 1), padding="SAME", dilation=(1, 1)):
    return lambda x, kernel: lax.conv_general_dilated(
        x, kernel, strides, padding, None, dilation, feature_group_count=groups, batch_group_count=batch_groups
    )


def bound(name, **params):
    primitive = _compat.primitive(name)
    assert primitive is not None
    return lambda *xs: primitive.bind(*xs, **params)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def solve(x, y):
    return lax.linalg.triangular_solve(x + 4 * jnp.eye(4, dtype=x.dtype), y, left_side=True)


def all_xor(x):
    return lax.reduce(x, np.int32(0), lax.bitwise_xor, (1,))


@jax.vmap
def windows_of(x, at):
    return lax.dynamic_slice(x, (at,), (3,))


@jax.vmap
def write_windows(x, update, at):
    return lax.dynamic_update_slice(x, update, (at,))


def ragged_gradient(x, y, sizes):
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    return lax.ragged_dot_general(x, y, sizes.astype(jnp.int32), numbers)


# primitive, effect, function, arguments, sharded factors
FAULTS = [
    ("conv_general_dilated", "wrong", conv(batch_groups=4), (f32(8, 4, 6, 6), f32(16, 4, 3, 3)), ["c"]),
    ("conv_general_dilated", "wrong", conv(strides=(2, 2), padding="VALID"),
     (f32(4, 3, 8, 8), f32(8, 3, 2, 2)), ["t", "o"]),
    ("conv_general_dilated", "wrong", conv(dilation=(2, 2)), (f32(4, 3, 8, 8), f32(8, 3, 2, 1)), ["a", "o"]),
    ("conv_general_dilated", "wrong", conv(dilation=(2, 2), padding="VALID"),
     (f32(4, 3, 8, 8), f32(8, 3, 4, 4)), ["r"]),
    ("conv_general_dilated", "wrong", conv(groups=2), (f32(4, 4, 8, 8), f32(4, 2, 1, 1)), ["n", "g"]),
    ("conv_general_dilated", "wrong", conv(groups=2), (f32(4, 2, 6, 6), f32(8, 1, 3, 2)), ["g", "o"]),
    ("conv_general_dilated", "costly", conv(groups=2), (f32(4, 4, 6, 6), f32(8, 2, 3, 3)), ["n"]),
    ("dynamic_slice", "costly", lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 4)), (f32(8, 4), np.int32(3)), ["v"]),
    ("dynamic_update_slice", "costly", lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0)),
     (f32(8, 4), f32(2, 4), np.int32(3)), ["v"]),
    ("ragged_dot_general", "costly", ragged_gradient, (f32(8, 4), f32(8, 12), np.array([3, 1, 0, 4])), ["v"]),
    ("gather", "costly", windows_of, (f32(4, 8), np.array([5, 0, 3, 2])), ["u"]),
    ("scatter", "costly", write_windows, (f32(4, 8), f32(4, 3), np.array([5, 0, 3, 2])), ["u"]),
    ("scatter-sub", "costly", lambda x, i, u: x.at[i].subtract(u), (f32(8, 4), np.arange(4), f32(4, 4)), ["n"]),
    ("triangular_solve", "costly", solve, (f32(2, 4, 4), f32(2, 4, 8)), ["n"]),
    ("fft", "costly", jnp.fft.fft, (jax.ShapeDtypeStruct((4, 8), jnp.complex64),), ["a"]),
    ("top_k", "costly", lambda x: lax.top_k(x, 2), (f32(4, 8),), ["a"]),
    ("igamma", "costly", lax.igamma, (f32(4, 8), f32(4, 8)), ["a"]),
    ("mulhi", "fail", bound("mulhi") if _compat.primitive("mulhi") else None, (i32(4, 8), i32(4, 8)), ["a"]),
    ("reduce_xor", "fail", all_xor, (i32(4, 8),), ["r"]),
    ("reduce_and", "fail", lambda x: lax.reduce_and_p.bind(x, axes=(1,)), (i32(4, 8),), ["r"]),
    ("reduce_or", "fail", lambda x: lax.reduce_or_p.bind(x, axes=(1,)), (i32(4, 8),), ["r"]),
]  # fmt: skip
MESSAGES = {"wrong": "silently wrong", "fail": "the partitioner failed", "costly": "the partitioner "}
FIXED_IN_JAX_0_12 = {"fft", "ragged_dot_general"}


def case_of(name, fn, args):
    case = next(case for case in collect(fn, args) if case.name == name)
    rule = rule_for(case.eqn.primitive, case.avals, case.eqn.params)
    assert rule is not None
    return case, rule


def primitive_exists(name, *_):
    return _compat.primitive(name.replace("-", "_")) is not None


def fault_exists(name, *_):
    return primitive_exists(name) and not (name in FIXED_IN_JAX_0_12 and jax.__version_info__ >= (0, 12))


def for_each_fault(condition):
    """Parametrizes a test with every row for which `condition` is true."""
    rows = [pytest.param(*row, id=f"{row[0]}-{'-'.join(row[4])}") for row in FAULTS if condition(*row)]
    return pytest.mark.parametrize(("name", "effect", "fn", "args", "factors"), rows)


@for_each_fault(fault_exists)
def test_fault_is_still_there(name, effect, fn, args, factors):
    case, rule = case_of(name, fn, args)
    fault = known_fault(name, ShardedOperator(case.avals, case.eqn.params, rule, factors), effect)
    assert fault is not None
    counts, operands = [dict.fromkeys(factors, 2)], trials(case)[1]
    findings = check_partitioner(case, rule, counts, operands, known=False)
    assert any(MESSAGES[effect] in text for _, text in findings), f"XLA has fixed this fault. Remove it: {fault}"
    assert check_partitioner(case, rule, counts, operands) == []


@pytest.mark.few(4)
@for_each_fault(primitive_exists)
def test_operator_runs_correctly_on_shards_without_gathers(name, effect, fn, args, factors):
    """A plan runs the operator on shards instead: no gather, and a reduction only if the rule has one."""
    case, rule = case_of(name, fn, args)
    fault = known_fault(name, ShardedOperator(case.avals, case.eqn.params, rule, factors), effect)
    assert fault is not None
    if not fault.avoided:
        return
    mesh = device_mesh((2, 2))
    assert mesh is not None
    axes = dict(zip("ab", factors, strict=False))
    run = jax.jit(
        lambda *xs: run_on_shards(
            rule, body_of(case.eqn, rule), case.results, mesh, axes, [None] * len(case.results), *xs
        )
    )
    operands = trials(case)[1]
    for actual, expected in zip(run(*operands), case.run(operands), strict=True):
        assert difference(expected, to_numpy(actual)) is None
    specs = [tuple(tuple(a for f in dim for a, g in axes.items() if g == f) for dim in dims) for dims in rule.operands]
    placed = [
        jax.device_put(x, NamedSharding(mesh, to_partition_spec(s))) for x, s in zip(operands, specs, strict=True)
    ]
    text = run.lower(*placed).compile().as_text() or ""
    partial = any(rule.partial(f, r) for f in factors for r in range(len(rule.results)))
    assert set(COLLECTIVE.findall(text)) <= ({"all-reduce"} if partial else set())


CRASH = """
import jax, numpy as np, jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
devices = np.array(jax.devices()[:4]).reshape(2, 2)
mesh = Mesh(devices, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
image, kernel, out = (NamedSharding(mesh, spec) for spec in (P("a"), P(("a", "b")), P(None, ("a", "b"))))
fn = lambda x, k: lax.conv_general_dilated(x, k, (1, 1), "SAME", batch_group_count=2)
arrays = jnp.ones((4, 4, 6, 6)), jnp.ones((8, 4, 3, 3))
lowered = jax.jit(fn, in_shardings=(image, kernel), out_shardings=out).lower(*arrays)
print("compiles", flush=True)
lowered.compile()
print("fixed", flush=True)
"""


@pytest.mark.slow
def test_crash_is_still_there():
    """Runs in a separate process, since the crash ends it."""
    done = subprocess.run([sys.executable, "-c", CRASH], capture_output=True, text=True, timeout=120)
    assert "compiles" in done.stdout, done.stderr
    assert "fixed" not in done.stdout and "Check failed" in done.stderr


def test_batch_groups_are_a_known_crash():
    case, rule = case_of("conv_general_dilated", conv(batch_groups=2), (f32(4, 4, 6, 6), f32(8, 4, 3, 3)))
    assert known_fault(case.name, ShardedOperator(case.avals, case.eqn.params, rule, ["g", "o"]), "crash") is not None


def test_every_fault_is_checked():
    checked = set()
    for name, effect, fn, args, factors in filter(lambda row: fault_exists(*row), FAULTS):
        case, rule = case_of(name, fn, args)
        checked.add(known_fault(name, ShardedOperator(case.avals, case.eqn.params, rule, factors), effect))
    known = [f for f in KNOWN_PARTITIONER_FAULTS if any(fault_exists(name, f.effect) for name in f.primitives)]
    assert [f for f in known if f not in checked and f.effect != "crash"] == []


def write_to_slice(x, start, row):
    """Writes one row of a slice; a row outside of the slice is dropped."""
    numbers = lax.ScatterDimensionNumbers((), (0,), (0,))
    window = lax.dynamic_slice(x, (start,), (4,))
    return lax.scatter(window, row[None], jnp.float32(9), numbers, mode=lax.GatherScatterMode.FILL_OR_DROP)


def test_before_jax_0_12_a_row_outside_of_a_slice_changes_the_slice():
    x, start, row = jnp.arange(8.0), 4, jnp.int32(-2)
    assert jnp.array_equal(write_to_slice(x, start, row), x[4:])
    is_right = jnp.array_equal(jax.jit(write_to_slice)(x, start, row), x[4:])
    assert is_right == (jax.__version_info__ >= (0, 12)), "XLA has fixed this fault, or it is back"


def test_each_device_may_write_one_row_of_several():
    x, rows = jnp.zeros((16, 8)), jnp.arange(4)
    jaxpr = jax.make_jaxpr(lambda x, rows, new: x.at[rows].set(new))(x, rows, jnp.ones((4, 8)))
    (op,) = [op for op in build(jaxpr).ops() if op.name == "scatter"]
    assert op.rule is not None
    (index,) = [f.name for f in op.rule.factors if f.kind == "index"]
    (row,) = op.rule.operands[1][0]
    avals = [v.aval for v in op.eqn.invars]
    for factors, devices, expected in (((index, row), 4, True), ((index, row), 2, False), ((index,), 4, False)):
        assert writes_one_row(op.name, ShardedOperator(avals, op.eqn.params, op.rule, factors), devices) is expected


@pytest.mark.parametrize("write", [lambda x: x.at[0].set(1.0), lambda x: x.at[5].add(1.0), lambda x: x.at[-1].max(2.0)])
def test_one_row_of_a_resharded_array_is_written(write):
    def step(weight, x):
        rows = write(x[jnp.argsort(x[:, 0])])
        loss, grads = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(rows @ w) ** 2))(weight)
        return weight - grads, loss, rows

    weight, x = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate([(16, 32), (8, 16)]))
    planned = plan(step, weight, x, target="cpu:8", plan="dp:2 fsdp:2 tp:2").jit()
    assert_close(jax.jit(step)(weight, x), planned(weight, x))
