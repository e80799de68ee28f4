"""The oracle finds the errors of rules that are wrong in one way at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard import _compat
from autoshard.sharding.oracle import rule_check
from autoshard.sharding.oracle.cases import collect
from autoshard.sharding.oracle.probe_values import trials
from autoshard.sharding.oracle.rule_check import Finding, check_rule
from autoshard.spmdrules.core import registry
from autoshard.spmdrules.core.rule import Factor, Rule
from tests.arrays import array

A = np.arange(24, dtype=np.float32).reshape(4, 6) / 7 - 1.5
B = np.arange(48, dtype=np.float32).reshape(6, 8) % 5 - 2.25
SQUARE = np.arange(36, dtype=np.float32).reshape(6, 6) % 7 - 3.1


@pytest.fixture
def replace_rule(monkeypatch):
    """Replaces the rule of a primitive for one test: `ruled("sin", "a b -> a b")` or with a rule function."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    monkeypatch.setattr(registry, "_CACHE", {})

    def override(name, rule, **more):
        function = rule if callable(rule) else lambda *avals, **params: Rule.parse(rule, *avals, **more)
        primitive = _compat.primitive(name)
        assert primitive is not None
        registry._RULES[primitive] = function  # type: ignore[assignment]
        registry._CACHE.clear()

    return override


def kinds_and_factors(findings: list[Finding]) -> set[tuple[str, tuple[str, ...]]]:
    return {(f.kind, f.factors) for f in findings}


def check_on_shards(fn, *args) -> list[Finding]:
    return check_rule(fn, *args, partitioner=False)


# The contraction ------------------------------------------------------------------------------------------------

DOT = "m k, k n -> m n; reduce k; linear 0; linear 1"


def test_right_rule_has_no_findings(replace_rule):
    replace_rule("dot_general", DOT)
    assert check_rule(lambda a, b: a @ b, A, B) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (DOT.replace("reduce k", "reduce k:max"), ("wrong", ("k",))),
        (DOT.replace("reduce k", "reduce k:mul"), ("wrong", ("k",))),
        (DOT.replace("; reduce k", ""), ("wrong", ("k",))),  # replicated results that differ
        (DOT.replace("reduce k", "whole k"), ("missing", ("k",))),
        (DOT.replace("reduce k", "reduce k; whole n"), ("missing", ("n",))),
        (DOT.replace("linear 0;", "linear 0 1;"), ("wrong", ())),
        (DOT.replace("linear 0;", ""), ("missing", ())),
        ("m k, j n -> m n; linear 0; linear 1", ("wrong", ("k",))),  # k is missing from the second operand
        (DOT.replace("-> m n", "-> n m"), ("wrong", ())),  # shapes disagree
    ],
)
def test_broken_contraction(replace_rule, text, expected):
    replace_rule("dot_general", text)
    assert expected in kinds_and_factors(check_on_shards(lambda a, b: a @ b, A, B))


def test_swapped_dimensions_of_one_size(replace_rule):
    replace_rule("dot_general", DOT.replace("-> m n", "-> n m"))
    findings = kinds_and_factors(check_on_shards(lambda a, b: a @ b, SQUARE, SQUARE))
    assert {("wrong", ("m",)), ("wrong", ("n",))} <= findings


# Recorded values do not hide errors -------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, 1.0, -np.inf])
def test_uninformative_values_are_replaced(replace_rule, value):
    replace_rule("reduce_max", "a b -> a; reduce b:min")
    assert ("wrong", ("b",)) in kinds_and_factors(
        check_on_shards(lambda x: x.max(1), np.full((4, 6), value, np.float32))
    )


@pytest.mark.parametrize(("right", "wrong"), [("and", "or"), ("or", "and"), ("or", "xor"), ("and", "max")])
def test_reductions_of_booleans(replace_rule, right, wrong):
    fn = {"and": jnp.all, "or": jnp.any}[right]
    replace_rule(f"reduce_{right}", f"a b -> a; reduce b:{right}")
    assert check_on_shards(lambda x: fn(x, axis=1), np.ones((4, 6), bool)) == []
    replace_rule(f"reduce_{right}", f"a b -> a; reduce b:{wrong}")
    assert ("wrong", ("b",)) in kinds_and_factors(check_on_shards(lambda x: fn(x, axis=1), np.ones((4, 6), bool)))


def test_low_precision_sums_are_allowed_their_rounding(replace_rule):
    replace_rule("reduce_sum", "a b -> a; reduce b; linear 0")
    x = array(np.random.default_rng(0).normal(size=(4, 64)), jnp.bfloat16)
    assert check_on_shards(lambda x: lax.reduce_sum_p.bind(x, axes=(1,), out_sharding=None), x) == []


# Rules with `local` or `body` -------------------------------------------------------------------------------------


def reshaped(params, shard):
    return {**params, "new_sizes": shard.shape(shard.rule.results[0])}


def test_compound_dimensions(replace_rule):
    x = np.arange(32, dtype=np.float32).reshape(2, 16)
    good = "b (h d) -> b h d; linear 0; moves 0; where h=4 d=4"
    replace_rule("reshape", good, local=reshaped)
    assert check_rule(lambda x: x.reshape(2, 4, 4), x) == []
    replace_rule("reshape", good.replace("(h d)", "(d h)"), local=reshaped)
    findings = kinds_and_factors(check_on_shards(lambda x: x.reshape(2, 4, 4), x))
    assert {("wrong", ("h",)), ("wrong", ("d",))} <= findings


def test_forgotten_local(replace_rule):
    replace_rule("reshape", "b (h d) -> b h d; linear 0; moves 0; where h=4 d=4")
    findings = check_on_shards(lambda x: x.reshape(2, 4, 4), np.ones((2, 16), np.float32))
    assert ("wrong", ("b",)) in kinds_and_factors(findings)
    assert "cannot run on these shards" in str(findings[0])


def iota_rule(right):
    def rule(*, dtype, shape, dimension, **_):
        def body(shard):
            start = shard.offset("n") if right else 0
            return lax.iota(dtype, shard.size("n")) + jnp.asarray(start, dtype)

        return Rule((), ((("n",),),), (Factor("n", shape[0], "offset"),), body=body)

    return rule


def test_offset(replace_rule):
    def fn():
        return lax.iota(np.int32, 12)

    replace_rule("iota", iota_rule(right=True))
    assert check_rule(fn) == []
    replace_rule("iota", iota_rule(right=False))
    assert ("wrong", ("n",)) in kinds_and_factors(check_rule(fn))


def lookup_rule(masked):
    def rule(table, at, **params):
        def body(shard, table, at):
            local = at[:, 0] - shard.offset("v")
            inside = (local >= 0) & (local < shard.size("v"))
            rows = table[jnp.clip(local, 0, shard.size("v") - 1)]
            return jnp.where(inside[:, None], rows, 0) if masked else rows

        return Rule.parse("v d, b 1 -> b d; index v; linear 0", table, at, body=body)

    return rule


def test_index(replace_rule):
    def fn(table, at):
        return table.at[at].get(mode="promise_in_bounds")

    def gathered(table, at):
        numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
        return lax.gather(table, at, numbers, (1, 4), mode="promise_in_bounds")

    table, at = np.zeros((8, 4), np.float32), np.zeros((6, 1), np.int32)
    replace_rule("gather", lookup_rule(masked=True))
    assert check_rule(gathered, table, at) == []
    replace_rule("gather", lookup_rule(masked=False))
    assert ("wrong", ("v",)) in kinds_and_factors(check_on_shards(gathered, table, at))


def cumsum_rule(right):
    def rule(x, **params):
        def body(shard, x):
            local = jnp.cumsum(x, axis=0)
            if "s" not in shard.axes:
                return local
            totals = lax.all_gather(local[-1], shard.axes["s"])
            earlier = jnp.arange(shard.count("s")) < shard.index["s"] + (not right)
            return local + jnp.sum(jnp.where(earlier[:, None], totals, 0), axis=0)

        return Rule.parse("s d -> s d; halo s; linear 0", x, body=body)

    return rule


def test_bodies_that_communicate_run_on_devices(replace_rule):
    x = np.ones((8, 6), np.float32)
    replace_rule("cumsum", cumsum_rule(right=True))
    assert check_on_shards(lambda x: lax.cumsum(x), x) == []
    replace_rule("cumsum", cumsum_rule(right=False))
    assert ("wrong", ("s",)) in kinds_and_factors(check_on_shards(lambda x: lax.cumsum(x), x))


def argmax_rule(right):
    def rule(x, *, axes, index_dtype):
        def body(shard, x):
            return lax.argmax(x, axes[0], index_dtype) + jnp.asarray(shard.offset("k") if right else 0, index_dtype)

        return Rule.parse("b k -> b; reduce k:argmax", x, body=body)

    return rule


def test_argmax(replace_rule):
    def fn(x):
        return lax.argmax(x, 1, np.int32)

    replace_rule("argmax", argmax_rule(right=True))
    assert check_on_shards(fn, A) == []
    replace_rule("argmax", argmax_rule(right=False))
    assert ("wrong", ("k",)) in kinds_and_factors(check_on_shards(fn, A))


def test_random_keys_are_operands(replace_rule):
    factors = (Factor("b", 4), Factor("w", 2, "whole"))
    keys = jax.random.split(jax.random.key(0), 4)
    replace_rule("random_unwrap", lambda x: Rule(((("b",),),), ((("b",), ("w",)),), factors))
    assert check_rule(jax.random.key_data, keys) == []
    replace_rule("random_unwrap", lambda x: Rule(((),), (((), ("w",)),), factors[1:]))
    (finding,) = check_on_shards(jax.random.key_data, keys)
    assert "operand 0 has" in finding.message


# Linearity -------------------------------------------------------------------------------------------------------


def test_wrongly_declared_linearity(replace_rule):
    replace_rule("exp", "a b -> a b; linear 0")
    (finding,) = check_on_shards(jnp.exp, A)
    assert finding.kind == "wrong" and "not linear in operands 0" in finding.message


def test_undeclared_linearity(replace_rule):
    replace_rule("neg", "a b -> a b")
    (finding,) = check_on_shards(lambda x: -x, A)
    assert finding.kind == "missing" and "linear in operands 0" in finding.message


def test_wrongly_declared_moves(replace_rule):
    replace_rule("neg", "a b -> a b; linear 0; moves 0")
    (finding,) = check_on_shards(lambda x: -x, A)
    assert finding.kind == "wrong" and "partial maxima" in finding.message


# Missing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fn", "rule", "joined"),
    [
        ("sin", jnp.sin, "a b -> a b; whole b", "concatenated along dimension 1"),
        ("reduce_max", lambda x: x.max(1), "a b -> a; whole b", "max"),
        ("reduce_min", lambda x: x.min(1), "a b -> a; whole b", "min"),
        ("reduce_prod", lambda x: x.prod(1), "a b -> a; whole b", "mul"),
        ("reduce_sum", lambda x: x.sum(1), "a b -> a; whole b; linear 0", "sum"),
        ("sin", jnp.sin, "a b -> c d; whole a b c d; where c=4 d=6", "concatenated along dimension 1"),
    ],
)
def test_missing_strategy(replace_rule, name, fn, rule, joined):
    replace_rule(name, lambda *avals, **params: _with_sizes(rule, avals))
    findings = [f for f in check_on_shards(fn, A) if f.factors == ("b",)]
    assert [f.kind for f in findings] == ["missing"]
    assert findings[0].message.endswith(joined)


def _with_sizes(text, avals):
    head = text.partition("; where")[0]
    rule = Rule.parse(head).bind(*avals)
    sizes = {"c": 4, "d": 6}
    factors = tuple(f if f.size else type(f)(f.name, sizes[f.name], f.kind, f.op) for f in rule.factors)
    return rule.where(factors=factors)


def test_factors_that_are_rightly_whole_are_not_missing(replace_rule):
    replace_rule("cumsum", "a b -> a b; whole b; linear 0")
    assert check_on_shards(lambda x: lax.cumsum(x, axis=1), A) == []


def test_unknown(monkeypatch):
    monkeypatch.setattr(registry, "_RULES", {})
    (finding,) = check_rule(lambda x: lax.sin(lax.sin(x)), A)
    assert (finding.kind, finding.primitive) == ("unknown", "sin")
    assert "Register one with @rule" in str(finding)


def test_rule_that_raises(replace_rule):
    def broken(*_, **__):
        raise KeyError("axes")

    replace_rule("sin", broken)
    (finding,) = check_rule(jnp.sin, A)
    assert finding.kind == "wrong" and "KeyError" in finding.message


# Nested equations ------------------------------------------------------------------------------------------------


def sine(x):
    return lax.sin(x)


@jax.custom_vjp
def with_vjp(x):
    return sine(x)


with_vjp.defvjp(lambda x: (sine(x), x), lambda x, g: (g,))


@jax.custom_jvp
def with_jvp(x):
    return sine(x)


with_jvp.defjvp(lambda p, t: (with_jvp(p[0]), t[0]))


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "fn",
    [
        jax.jit(sine),
        jax.checkpoint(sine),  # type: ignore[attr-defined]
        with_vjp,
        with_jvp,
        lambda x: lax.scan(lambda c, row: (c, sine(row)), 0, x)[1],
        lambda x: lax.scan(lambda c, _: (sine(c), None), x, None, length=2, reverse=True)[0],
        lambda x: lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, sine(c[1])), (0, x)),
        lambda x: lax.while_loop(lambda c: sine(c)[0, 0] > 2, lambda c: c, x),
        lambda x: lax.cond(x[0, 0] > 1e9, sine, lambda x: x, x),
        lambda x: jax.jit(lambda c: lax.scan(lambda c, _: (jax.jit(sine)(c), None), c, None, length=2))(x),
    ],
    ids=["jit", "remat", "custom_vjp", "custom_jvp", "scan", "carry", "while", "while cond", "cond", "nested"],
)
def test_nested_equations_are_found(replace_rule, fn):
    def half(x, **_):
        dims = " ".join("ab"[: len(x.shape)])
        return Rule.parse(f"{dims} -> {dims}; linear 0", x)

    replace_rule("sin", half)
    (finding,) = [f for f in check_on_shards(fn, A) if f.primitive == "sin"]
    assert finding.kind == "wrong" and "test_rule_check.py" in finding.source


def test_equal_equations_are_checked_once():
    cases = collect(lambda x: sine(sine(x)) + sine(x[:2]).sum(), (A,))
    assert [c.avals[0].shape for c in cases if c.name == "sin"] == [(4, 6), (2, 6)]


def test_shapes_are_accepted_in_place_of_values(replace_rule):
    replace_rule("sin", "a b -> a b")
    assert check_on_shards(sine, jax.ShapeDtypeStruct((4, 6), jnp.bfloat16)) == []


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_linearity_of_types_with_few_bits(dtype):
    """The terms and their sums are exact in the dtype. Rounded sums would refute a linear operator."""
    a, b = jnp.ones((4, 6), dtype), jnp.ones((6, 4), dtype)
    assert check_rule(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32), a, b, partitioner=False) == []


def test_too_few_devices(monkeypatch):
    monkeypatch.setattr(rule_check.jax, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="needs 4 devices, but there are 1.*partitioner=False"):
        check_rule(jnp.sin, A)


def test_finding_reads_as_a_sentence(replace_rule):
    replace_rule("reduce_sum", "a b -> a; reduce b:max; linear 0")
    (finding,) = check_on_shards(lambda x: x.sum(1), A)
    text = str(finding)
    assert text.startswith("wrong: reduce_sum at ")
    for part in ("b split 2 ways", "test_rule_check.py", "a b -> a; reduce b:max", "Correct the rule"):
        assert part in text


def test_drawn_group_sizes_are_valid_and_vary():
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 4), (3, 4, 6))]
    (case,) = collect(lax.ragged_dot, (*shapes, jax.ShapeDtypeStruct((3,), jnp.int32)))
    sizes = np.array([operands[2] for operands in trials(case, 20)])
    assert (sizes >= 0).all() and (sizes.sum(-1) <= 8).all()
    assert (sizes == 0).any() and sizes.max() > 2 and len(np.unique(sizes, axis=0)) > 10
