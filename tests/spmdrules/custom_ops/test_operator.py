"""Opaque operators with declared rules: in jaxprs, under transformations, on shards."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.sharding.oracle.rule_check import check_rule
from autoshard.spmdrules import RuleError
from autoshard.spmdrules.core import registry
from autoshard.spmdrules.custom_ops.opaque_primitive import (
    BatchedFunction,
    batched_text,
    is_operator,
    one_of_batch,
    stating_results,
)
from autoshard.spmdrules.custom_ops.operator import operator, run_sharded
from autoshard.spmdrules.ir.program import build
from autoshard.spmdrules.propagation.propagate import propagate

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """Registers the operators of these tests in a copy of the registry."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def plain_norm(x, scale):
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def doubling(x, y):
    """Two results, of which the second lacks the dimension that the first is sharded along."""
    return 2.0 * x, y * y


def plain_matmul(x, w):
    return jnp.tanh(x) @ w


def norm_operator():
    return operator("b s d, d -> b s d; whole d", name="norm")(plain_norm)


def tripled(x):
    """A Pallas kernel: neither the partitioner nor autodiff can look inside."""

    def kernel(source, target):
        target[...] = source[...] * 3.0

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def kernel_operator():
    triple = operator("b d -> b d", vjp=(None, lambda xs, cotangent: triple(cotangent)), name="triple")(tripled)
    return triple


COLLECTIVE = re.compile(r"= .*? (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def compiled(fn, *args):
    """The HLO text of a compiled function."""
    return jax.jit(fn).lower(*args).compile().as_text() or ""


def equations(fn, *args):
    return [e for e in jax.make_jaxpr(fn)(*args).eqns]


def assert_close(actual, expected):
    for g, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(g, e, rtol=1e-5, atol=1e-5)


def test_an_operator_is_one_equation_and_the_function():
    norm = norm_operator()
    args = normal(0, 4, 4, 8), normal(1, 8)
    (eqn,) = equations(norm, *args)
    assert eqn.primitive.name == "norm"
    assert is_operator(eqn.primitive) and not is_operator(lax.add_p)
    assert norm.__wrapped__ is plain_norm and norm.__name__ == "plain_norm"
    assert_close(norm(*args), plain_norm(*args))
    assert_close(jax.jit(norm)(*args), plain_norm(*args))


def test_several_results_and_options():
    both = operator("b d, e -> b d, e")(doubling)
    assert_close(both(jnp.ones((2, 4)), jnp.ones(3)), doubling(jnp.ones((2, 4)), jnp.ones(3)))

    @operator("b -> b")
    def shifted(x, *, by=0.0):
        return x + by

    assert_close(shifted(jnp.zeros(4), by=2.0), jnp.full(4, 2.0))
    assert_close(shifted(jnp.zeros(4)), jnp.zeros(4))


def test_derivatives_are_those_of_the_function():
    norm = norm_operator()
    args = normal(0, 4, 4, 8), normal(1, 8)
    loss = lambda f: lambda *xs: (f(*xs) ** 3).sum()  # noqa: E731
    assert_close(jax.grad(loss(norm), (0, 1))(*args), jax.grad(loss(plain_norm), (0, 1))(*args))
    assert_close(jax.jvp(norm, args, args), jax.jvp(plain_norm, args, args))
    assert_close(jax.hessian(loss(norm), 1)(*args), jax.hessian(loss(plain_norm), 1)(*args))
    assert "norm" in [e.primitive.name for e in equations(jax.grad(loss(norm)), *args)]


def test_integers_have_no_derivative():
    @operator("v d, b -> b d, b; whole v")
    def rows(table, tokens):
        return table[tokens], tokens + 1

    table, tokens = normal(0, 8, 4), jnp.arange(4)
    loss = lambda f: lambda t: (f(t, tokens)[0] ** 2).sum()  # noqa: E731
    assert_close(jax.grad(loss(rows))(table), jax.grad(loss(rows.__wrapped__))(table))


def test_a_declared_vjp_is_used():
    scaled = operator("b -> b", vjp=(lambda x: (x * 2.0, x), lambda x, ct: (ct * 100.0 + 0.0 * x,)))(lambda x: x * 2.0)
    assert_close(jax.grad(lambda x: scaled(x).sum())(jnp.ones(4)), jnp.full(4, 100.0))
    kept = operator("b -> b", vjp=(None, lambda xs, ct: xs[0] * ct))(lambda x: x * x / 2)
    assert_close(jax.grad(lambda x: kept(x).sum())(jnp.arange(4.0)), jnp.arange(4.0))


def test_vmap_keeps_the_operator_and_gives_it_a_dimension():
    mapped = jax.vmap(norm_operator(), in_axes=(1, None))
    args = normal(0, 4, 6, 4, 8), normal(1, 8)
    assert_close(mapped(*args), jax.vmap(plain_norm, in_axes=(1, None))(*args))
    eqn = equations(mapped, *args)[-1]
    assert eqn.primitive.name == "norm" and eqn.params["text"] == "b0 b s d, d -> b0 b s d; whole d"
    propagation = propagate(mapped, *args, in_specs=(P(None, "a"), None), mesh={"a": 2})
    assert propagation.out_specs == P("a") and not propagation.reshards


def test_batched_text():
    assert batched_text("[] -> []", (True,)) == "b -> b"
    assert batched_text("b (h d) -> b h d; where h=4", (True,)) == "b0 b (h d) -> b0 b h d; where h=4"


def test_propagation_follows_the_declaration():
    norm = norm_operator()
    avals = jax.ShapeDtypeStruct((4, 4, 8), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.float32)
    propagation = propagate(norm, *avals, in_specs=(P("a", "b"), P()), mesh={"a": 2, "b": 2})
    assert propagation.out_specs == P("a", "b") and not propagation.reshards and not propagation.unknown
    whole = propagate(norm, *avals, in_specs=(P(None, None, "a"), P("a")), mesh={"a": 2})
    assert whole.out_specs == P() and [r.kind for r in whole.reshards] == ["all-gather", "all-gather"]
    product = operator("b k, k n -> b n; reduce k")(plain_matmul)
    two = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    assert propagate(product, two, two, in_specs=(P(None, "a"), None), mesh={"a": 2}).out_partial == {"a": "sum"}


def test_the_oracle_finds_a_wrong_declaration():
    args = normal(0, 4, 4, 8), normal(1, 8)
    assert [f for f in check_rule(norm_operator(), *args, partitioner=False) if f.kind == "wrong"] == []
    wrong = operator("b s d, d -> b s d", name="wrong")(plain_norm)
    assert ("wrong", ("d",)) in [(f.kind, f.factors) for f in check_rule(wrong, *args, partitioner=False)]
    product = operator("b k, k n -> b n; reduce k:max", name="wrong_product")(plain_matmul)
    findings = check_rule(product, normal(0, 4, 4), normal(1, 4, 4), partitioner=False)
    assert ("wrong", ("k",)) in [(f.kind, f.factors) for f in findings]


@pytest.mark.parametrize("name", ["gather", "scatter_mine", "dynamic_slice"])
def test_an_operator_may_have_the_name_of_a_jax_primitive(name):
    def fn(x, i):
        return x * i

    fn.__name__ = name
    times = operator("a b, a b -> a b; linear 0; linear 1")(fn)
    assert check_rule(times, normal(0, 4, 6), normal(1, 4, 6), partitioner=False) == []


@pytest.mark.few(1)
@pytest.mark.parametrize("specs", [(P("data", "model"), P()), (P("model"), P()), (P(None, ("data", "model")), P())])
def test_run_sharded_equals_the_function_with_its_gradient(specs, mesh8):
    args = normal(0, 4, 8, 8), normal(1, 8)
    (eqn,) = equations(norm_operator(), *args)

    def sharded(*xs):
        (out,) = run_sharded(eqn.params, mesh8, specs, (specs[0],), *xs)
        return out

    sharded_args = [jax.device_put(x, NamedSharding(mesh8, s)) for x, s in zip(args, specs, strict=True)]
    assert_close(jax.jit(sharded)(*sharded_args), plain_norm(*args))
    loss = lambda f: lambda *xs: (f(*xs) ** 3).sum()  # noqa: E731
    assert_close(jax.jit(jax.grad(loss(sharded), (0, 1)))(*sharded_args), jax.grad(loss(plain_norm), (0, 1))(*args))
    assert not COLLECTIVE.findall(compiled(sharded, *sharded_args))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "goal,collective",
    [(P("data"), "all-reduce"), (P("data", "model"), "reduce-scatter"), (None, "all-reduce")],
)
def test_run_sharded_reduces_what_is_partial(goal, collective, mesh8):
    args = normal(0, 4, 8), normal(1, 8, 8)
    (eqn,) = equations(operator("b k, k n -> b n; reduce k")(plain_matmul), *args)
    specs = (P("data", "model"), P("model"))

    def sharded(*xs):
        return run_sharded(eqn.params, mesh8, specs, (goal,), *xs)[0]

    sharded_args = [jax.device_put(x, NamedSharding(mesh8, s)) for x, s in zip(args, specs, strict=True)]
    assert_close(jax.jit(sharded)(*sharded_args), plain_matmul(*args))
    loss = lambda f: lambda *xs: (f(*xs) ** 3).sum()  # noqa: E731
    assert_close(jax.jit(jax.grad(loss(sharded), (0, 1)))(*sharded_args), jax.grad(loss(plain_matmul), (0, 1))(*args))
    assert COLLECTIVE.findall(compiled(sharded, *sharded_args)) == [collective]


@pytest.mark.slow
@pytest.mark.parametrize(
    "op,x",
    [("mul", RNG.normal(size=(4, 4)).astype(np.float32))]
    + [(op, RNG.integers(0, 255, (4, 8), np.int32)) for op in ("and", "or", "xor")]
    + [("xor", RNG.normal(size=(4, 8)) > 0)],
)
def test_run_sharded_reduces_by_operations_without_a_collective(mesh8, op, x):
    fold = {"mul": lax.mul, "and": lax.bitwise_and, "or": lax.bitwise_or, "xor": lax.bitwise_xor}[op]
    folded = operator(f"b k -> b; reduce k:{op}")(lambda x: functools.reduce(fold, list(x.T)))
    (eqn,) = equations(folded, x)
    sharded = lambda x: run_sharded(eqn.params, mesh8, [P("data", "model")], [P("data")], x)[0]  # noqa: E731
    np.testing.assert_allclose(sharded(x), folded.__wrapped__(x), rtol=1e-5)
    if op == "mul":
        gradients = [jax.grad(lambda x, f=f: (f(x) ** 2).sum())(x) for f in (sharded, folded.__wrapped__)]
        np.testing.assert_allclose(*gradients, rtol=1e-4)


def test_run_sharded_reductions_sizes_and_copies(mesh8):
    largest = operator("b k -> b; reduce k:max")(lambda x: x.max(1))
    x = normal(0, 4, 8)
    (eqn,) = equations(largest, x)
    assert_close(run_sharded(eqn.params, mesh8, [P("data", "model")], [P("data")], x), [x.max(1)])
    anything = operator("b k -> b; reduce k:or")(lambda x: x.any(1))
    (eqn,) = equations(anything, x > 0)
    assert_close(run_sharded(eqn.params, mesh8, [P("data", "model")], [P("data")], x > 0), [(x > 0).any(1)])
    heads = operator("b (h d) -> b h d; where h=4")(lambda x: x.reshape(x.shape[0], -1, 2))
    (eqn,) = equations(heads, x)
    assert_close(run_sharded(eqn.params, mesh8, [P("data", "model")], [None], x), [x.reshape(4, 4, 2)])
    both = operator("b d, e -> b d, e")(doubling)
    (eqn,) = equations(both, x, x[0])
    assert_close(run_sharded(eqn.params, mesh8, [P("data"), P()], [P("data"), P("model")], x, x[0]), doubling(x, x[0]))


def test_a_pallas_kernel_runs_plain_and_on_shards(mesh8):
    triple = kernel_operator()
    x = normal(0, 8, 8)
    assert_close(triple(x), 3 * x)
    assert_close(jax.jit(jax.grad(lambda x: (triple(x) ** 2).sum()))(x), 18 * x)
    assert [e.primitive.name for e in equations(tripled, x)] == ["pallas_call"]
    assert propagate(triple, x, in_specs=P("data", "model"), mesh=mesh8).out_specs == P("data", "model")
    (params,) = [op.eqn.params for op in build(jax.make_jaxpr(triple)(x)).ops() if op.name == "triple"]

    def sharded(x):
        return run_sharded(params, mesh8, [P("data", "model")], [P("data", "model")], x)[0]

    sharded_x = jax.device_put(x, NamedSharding(mesh8, P("data", "model")))
    assert_close(jax.jit(sharded)(sharded_x), 3 * x)
    assert_close(jax.jit(jax.grad(lambda x: (sharded(x) ** 2).sum()))(sharded_x), 18 * x)
    assert not COLLECTIVE.findall(compiled(sharded, sharded_x))


def lapack_factor(x):
    """An FFI call: the Cholesky factors by LAPACK, shape (batch, n, n), and the status of each call."""
    results = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:1], jnp.int32)
    factor, info = jax.ffi.ffi_call("lapack_spotrf_ffi", results)(x, uplo=np.uint8(ord("U")))
    return jnp.tril(factor), info  # upper triangular in column-major order is lower triangular in row-major order


def factor_gradient(x, cotangents):
    return jax.vjp(jnp.linalg.cholesky, x)[1](cotangents[0])


def positive(n, size):
    half = normal(0, n, size, size)
    return half @ half.mT + size * jnp.eye(size)


def test_an_ffi_call_is_planned_and_runs_on_shards(mesh8):
    x = positive(8, 4)
    expected = jnp.linalg.cholesky(x)  # this also registers the FFI targets of LAPACK
    factor = operator("b i j -> b i j, b; whole i j", vjp=(lambda x: (factor(x), x), factor_gradient))(lapack_factor)
    assert_close(factor(x)[0], expected)
    assert check_rule(factor, x) == []

    def loss(x):
        return (factor(2.0 * x)[0] ** 3).sum()

    def loss_in_jax(x):
        return (jnp.linalg.cholesky(2.0 * x) ** 3).sum()

    sharded_x = jax.device_put(x, NamedSharding(mesh8, P(("data", "model"))))
    step = autoshard.auto_shard(jax.value_and_grad(loss), mesh=mesh8, fixed={"0": P(("data", "model"))})
    (plan,) = [step.plan(sharded_x)]
    assert plan.unknown == {} and [line for line in plan.traffic if line[0] != "all-reduce"] == []
    assert_close(step(sharded_x), jax.value_and_grad(loss_in_jax)(x))
    text = plan.jit().lower(sharded_x).compile().as_text() or ""
    assert "lapack_spotrf_ffi" in text and set(COLLECTIVE.findall(text)) == {"all-reduce"}


def test_a_wrong_declaration_of_an_ffi_call_is_found():
    jnp.linalg.cholesky(jnp.eye(2))
    rows = operator("b i j -> b i j, b; whole j", name="rows")(lapack_factor)
    (finding,) = check_rule(rows, positive(2, 4), partitioner=False)
    assert finding.kind == "wrong" and finding.factors == ("i",) and finding.primitive == "rows"
    assert "test_operator.py" in finding.source and finding.source.endswith("(lapack_factor)")


def test_source_lines_are_the_users():
    def model(x, scale):
        return norm(jnp.tanh(x), scale)

    norm = operator("b s d, d -> b s d; whole d", name="norm")(plain_norm)
    x, scale = normal(0, 4, 4, 8), jnp.ones(8)
    (reshard,) = propagate(
        model, x, scale, in_specs=(P(None, None, "model"), P()), mesh={"data": 2, "model": 4}
    ).reshards
    assert reshard.operator == "norm" and reshard.source.endswith("model)")
    wrong = operator("b s d, d -> b s d", name="norm")(plain_norm)
    findings = check_rule(lambda *xs: wrong(*xs), x, scale, partitioner=False)
    assert {f.kind for f in findings} == {"wrong", "missing"}
    assert all(f.source.endswith("<lambda>)") for f in findings)


def test_an_operator_inside_the_users_own_shard_map(mesh8):
    triple, norm = kernel_operator(), norm_operator()
    x, scale = normal(0, 4, 8, 8), normal(1, 8)
    users_map = jax.shard_map(
        lambda x, s: norm(triple(x.reshape(-1, 8)).reshape(x.shape), s),
        mesh=mesh8, in_specs=(P("data", "model"), P()), out_specs=P("data", "model"), check_vma=True,
    )  # fmt: skip
    same = lambda x, s: plain_norm(3 * x, s)  # noqa: E731
    assert_close(jax.jit(users_map)(x, scale), same(x, scale))
    loss = lambda f: lambda *xs: (f(*xs) ** 3).sum()  # noqa: E731
    assert_close(jax.jit(jax.grad(loss(users_map), (0, 1)))(x, scale), jax.grad(loss(same), (0, 1))(x, scale))


@pytest.mark.parametrize(
    "text,args,message",
    [
        ("b s -> b s", (jnp.ones(4),), "operand 0 is declared with 2 dimensions, but the argument has shape"),
        ("b, b -> b", (jnp.ones(4),), "has 2 operands, but got 1"),
        ("b -> b, b", (jnp.ones(4),), "'b -> b, b' declares 2 results, but the function returns 1"),
        ("b -> b 1", (jnp.ones(4),), r"result 0 has shape \(4,\), but 'b -> b 1' declares \(4, 1\)"),
        ("b -> c", (jnp.ones(4),), "result 0 in 'b -> c' has factor 'c', which no operand has"),
    ],
)
def test_a_declaration_that_does_not_fit_the_call_is_reported(text, args, message):
    with pytest.raises(RuleError, match=f"operator 'same'.*{message}"):
        operator(text, name="same")(lambda *xs: xs[0])(*args)


@pytest.mark.parametrize("text", ["v d, b -> b d; index v", "b -> b; offset b", "b k -> b; reduce k:argmax"])
def test_factors_that_need_the_position_of_a_shard_are_rejected(text):
    with pytest.raises(RuleError, match="does not know where the shard starts. Declare 'whole [vbk]'"):
        operator(text)


def test_a_text_that_does_not_parse_is_reported_at_once():
    with pytest.raises(RuleError, match="write exactly one '->'"):
        operator("b s d")


def test_specs_that_an_operator_cannot_take_are_reported(mesh8):
    args = normal(0, 4, 4, 8), normal(1, 8)
    (eqn,) = equations(norm_operator(), *args)
    with pytest.raises(RuleError, match=r"operand 0 .* cannot be sharded over 'model'.*needs the dimension whole"):
        run_sharded(eqn.params, mesh8, (P(None, None, "model"), P()), (None,), *args)


def test_a_declared_cotangent_is_summed_over_shards_that_share_the_operand(mesh8):
    def backward(operands, cotangent):
        x, scale = operands
        return cotangent * scale, (cotangent * x).sum(0)

    scaled = operator("b d, d -> b d", vjp=(None, backward), name="scaled")(lambda x, scale: x * scale)
    args = normal(0, 8, 8), normal(1, 8)
    (params,) = [op.eqn.params for op in build(jax.make_jaxpr(scaled)(*args)).ops() if op.name == "scaled"]

    def sharded(*xs):
        return run_sharded(params, mesh8, [P("data", "model"), P("model")], [None], *xs)[0]

    loss = lambda f: lambda *xs: (f(*xs) ** 3).sum()  # noqa: E731
    assert_close(jax.jit(jax.grad(loss(sharded), (0, 1)))(*args), jax.grad(loss(lambda x, s: x * s), (0, 1))(*args))


def test_an_operator_that_rejects_some_shard_shapes_can_still_be_planned():
    """The planner traces the function on shards to price it; candidates whose shapes it rejects are left out."""

    @operator("b d, d k, k d -> b d; whole d; reduce k", name="of_128_rows")
    def of_128_rows(x, up, down):
        assert x.shape[0] % 128 == 0
        return jnp.tanh(x @ up) @ down

    def loss(weights, x):
        return jnp.sum(of_128_rows(x, *weights))

    weights = jax.ShapeDtypeStruct((64, 256), "float32"), jax.ShapeDtypeStruct((256, 64), "float32")
    plan = autoshard.plan(loss, weights, jax.ShapeDtypeStruct((256, 64), "float32"), target="cpu:8")
    assert len(plan.candidates) > 1


def test_tables_that_an_operator_reads_are_not_weights():
    """Cosines and sines along a sequence share no contracted dimension, so the sequence can be sharded."""

    @operator("b s h, s h, s h -> b s h; whole h", name="rotated")
    def rotated(x, cos, sin):
        return x * cos + jnp.roll(x, 1, -1) * sin

    def step(params, x, cos, sin):
        def loss(params):
            return jnp.mean((jnp.tanh(rotated(x @ params["up"], cos, sin)) @ params["down"]) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    params = {"up": jax.ShapeDtypeStruct((32, 64), "float32"), "down": jax.ShapeDtypeStruct((64, 32), "float32")}
    tables = [jax.ShapeDtypeStruct((16, 64), "float32")] * 2
    x = jax.ShapeDtypeStruct((8, 16, 32), "float32")
    plan = autoshard.plan(step, params, x, *tables, target="cpu:8", plan="dp:4 cp:2", donate_argnums=0)
    assert plan.axis_rules["cp"] == ("seq",)


def test_a_kernel_without_a_derivative_is_named():
    @jax.custom_jvp
    def kernel(x):
        return x + 0

    @kernel.defjvp
    def no_derivative(primals, tangents):
        raise NotImplementedError  # as a kernel of Pallas does

    op = operator("b d -> b d", name="copies", vjp=(None, lambda residuals, d_out: (d_out,)))(kernel)
    x = jnp.ones((8, 128))
    gradient = jax.grad(lambda x: jnp.sum(op(x) ** 2))
    np.testing.assert_array_equal(gradient(x), 2 * x)
    with pytest.raises(
        NotImplementedError, match="JAX cannot differentiate the kernel of the operator copies. @operator"
    ):
        jax.jvp(gradient, (x,), (x,))


def test_a_function_that_fails_without_a_derivative_too_names_its_own_cause():
    """Such as a kernel that a newer JAX has renamed. Its result types are stated, so only the derivative traces it."""

    @stating_results(lambda x: [jax.ShapeDtypeStruct(x.shape, x.dtype)])
    def renamed(x):
        raise NotImplementedError("this version of JAX has no kernel named _fwd_")

    op = operator("b d -> b d", name="renamed")(renamed)
    with pytest.raises(NotImplementedError, match="^this version of JAX has no kernel named _fwd_"):
        jax.make_jaxpr(jax.grad(lambda x: jnp.sum(op(x))))(jnp.ones((8, 128)))


def test_an_operator_over_one_row_is_the_operator_of_that_row():
    def scaled(x, scale):
        return x * scale

    batched = BatchedFunction(scaled, (True, False))
    row, whole = ((8, 4), jnp.float32), ((4,), jnp.float32)
    assert one_of_batch(batched, [((1, *row[0]), row[1]), whole]) == (scaled, (row, whole))
    assert one_of_batch(batched, [((2, *row[0]), row[1]), whole]) is None
    assert one_of_batch(scaled, [row, whole]) is None
