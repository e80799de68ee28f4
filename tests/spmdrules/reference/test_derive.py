"""Rules of functions, derived from the primitives that they are made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.sharding.oracle.rule_check import check_rule
from autoshard.spmdrules import Rule
from autoshard.spmdrules.catalogue import Operator, f32
from autoshard.spmdrules.custom_ops.operator import operator
from autoshard.spmdrules.reference.derive import derive, derive_gradient
from autoshard.spmdrules.reference.derived_rule import Derived, DerivedFactor
from autoshard.spmdrules.reference.operator_table import OperatorRow, operator_rows, why_unshardable

X, CUBE = f32(4, 8), f32(4, 8, 16)


def layer_norm(x, scale, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + bias


def group_norm(x, scale):
    groups = x.reshape(*x.shape[:-1], -1, 3)
    centred = groups - groups.mean((1, 3), keepdims=True)
    return (centred * lax.rsqrt((centred**2).mean((1, 3), keepdims=True) + 1e-5)).reshape(x.shape) * scale


def attention(q, k, v):
    return jnp.einsum("hst,the->she", jax.nn.softmax(jnp.einsum("shd,thd->hst", q, k)), v)


def cross_entropy(logits, labels):
    return -(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, logits.shape[-1])).sum(-1)


def extremes(x):
    return x.max(0), x.min(0), x.sum()


def summed_twice(x):
    return x - x.sum(1, keepdims=True), x.sum(1)


LABELS = np.arange(4, dtype=np.int32)
NORM = Operator("norm", layer_norm, (CUBE, f32(16), f32(16)), (0, 1, 2))
EMBEDDING = Operator("embedding", lambda table, i: table[i], (f32(16, 8), LABELS))

FUNCTIONS = [
    ("elementwise", lambda x, y: jnp.exp(x) * y, (X, f32(8)), "a b, b -> a b"),
    ("matmul", jnp.matmul, (X, f32(8, 12)), "a b, b c -> a c; reduce b"),
    ("layer norm", layer_norm, (CUBE, f32(16), f32(16)), "a b c, c, c -> a b c; inside c"),
    ("a part of a dimension", group_norm, (f32(4, 8, 12), f32(12)),
     "a b (c d), (c d) -> a b (c d); inside b d; where c=4 d=3"),
    ("softmax", jax.nn.softmax, (X,), "a b -> a b; inside b:max+sum"),
    ("attention", attention, (f32(4, 8, 16), f32(12, 8, 16), f32(12, 8, 20)),
     "a b c, d b c, d b e -> a b e; inside c d:max+sum"),
    ("vocabulary", cross_entropy, (f32(4, 8), LABELS), "a b, a -> a; inside b:max+sum"),
    ("different reductions", extremes, (X,), "a b -> b, b, []; reduce b; reduce a:max[0] a:min[1] a:sum[2]"),
    ("used inside and returned", summed_twice, (X,), "a b -> a b, a; inside b"),
    ("looked up", EMBEDDING.fn, EMBEDDING.args, "a b, c -> c b; index a"),
    ("positions", jnp.triu, (X,), "a b -> a b; offset a b"),
    ("created", lambda x: jax.nn.one_hot(x, 8), (LABELS,), "a -> a b; offset b"),
    ("merged", lambda x: x.reshape(4, -1), (CUBE,), "a b c -> a (b c); where b=8 c=16"),
    ("concatenated", lambda x: jnp.concatenate([x, x], 1), (X,), "a b -> a c; whole b c"),
    ("sorted", jnp.sort, (X,), "a b -> a b; whole b"),
    ("added to its transpose", lambda x: x + x.T, (f32(8, 8),), "a b -> a b; whole a b"),
    ("twice in a result", lambda x: x @ x.T, (X,), "a b -> a c; reduce b; whole a c"),
    ("factors in another order", lambda x: x.reshape(4, 6).T.reshape(24), (f32(24),), "a -> b; whole a b"),
    ("a tree", lambda tree: jax.tree.map(jnp.sin, tree), ({"a": X, "b": f32()},), "a b, [] -> a b, []"),
    ("steps", lambda x: lax.scan(lambda c, s: (c + s, c), jnp.zeros(8), x), (X,), "a b -> b, a b; whole a"),
    ("empty", lambda x: x * 2, (f32(1, 0),), "1 a -> 1 a; whole a"),
    ("odd", jnp.sin, (f32(9),), "a -> a"),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "args", "text"), [row[1:] for row in FUNCTIONS], ids=[row[0] for row in FUNCTIONS])
def test_rule(fn, args, text):
    assert derive(fn, *args).text == text


GRADIENTS = [
    (NORM, "a b c, c, c, a b c -> a b c, c, c; reduce a b; inside c"),
    (EMBEDDING, "a b, c, c b -> a b; reduce c; index a"),
    (Operator("bias", jnp.add, (X, f32(8)), (0, 1)), "a b, b, a b -> a b, b; reduce a"),
    (Operator("reshape", lambda x: x.reshape(-1), (X,)), "a b, (a b) -> a b; where a=4 b=8"),
    (Operator("max", lambda x: x.max(1), (X,)), "a b, a -> a b; inside b:max+sum"),
    (Operator("second", lambda i, x: x * i[:, None], (LABELS, X), (1,)), "a, a b, a b -> a b"),
]


@pytest.mark.parametrize(("op", "text"), GRADIENTS, ids=[op.name for op, _ in GRADIENTS])
def test_rule_of_a_gradient(op, text):
    assert derive_gradient(op).text == text


SIMPLE = [(fn, args, text) for _, fn, args, text in FUNCTIONS if "inside" not in text and "[0]" not in text]


@pytest.mark.parametrize(("fn", "args", "text"), SIMPLE, ids=[text for _, _, text in SIMPLE])
def test_rule_parse_reads_the_text(fn, args, text):
    derived = derive(fn, *args)
    parsed = Rule.parse(text, *jax.tree.leaves(args))
    assert parsed.text == derived.rule.text == text
    assert [(f.name, f.kind, f.op) for f in parsed.factors] == [(f.name, f.kind, f.op) for f in derived.rule.factors]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (layer_norm, NORM.args), (group_norm, (f32(4, 8, 12), f32(12))), (cross_entropy, (X, LABELS)),
        (extremes, (X,)), (summed_twice, (X,)), (jnp.sort, (X,)), (jnp.matmul, (X, f32(8, 12))),
        (lambda x: x + x.T, (f32(8, 8),)), (lambda x: jnp.concatenate([x, x], 1), (X,)),
    ],
)  # fmt: skip
def test_the_oracle_confirms_derived_rules(fn, args):
    """The function becomes an opaque operator with the derived rule, and the oracle runs it on shards."""
    rule = derive(fn, *args).rule
    sizes = " ".join(f"{f.name}={f.size}" for f in rule.factors)
    opaque = operator(f"{rule.text.partition('; where')[0]}; where {sizes}", name="opaque")(fn)
    assert [f for f in check_rule(opaque, *args, partitioner=False) if f.kind == "wrong"] == []


def test_a_factor_reduced_inside_is_whole_in_a_plain_rule():
    derived = derive(layer_norm, *NORM.args)
    assert [f.name for f in derived.shardable_factors] == ["a", "b", "c"]
    assert derived.rule.text == "a b c, c, c -> a b c; whole c"


def test_fields_of_derived_factors():
    assert derive(extremes, X).factors == (
        DerivedFactor("a", 4, "reduce", ("max", "min", "sum")),
        DerivedFactor("b", 8, "reduce", (None, None, "sum")),
    )
    (merged,) = derive(lambda x: jnp.sort(x.reshape(2, 3)).reshape(6), f32(6)).factors[1:]
    assert (merged.kind, merged.size, merged.because, merged.shardable) == ("whole", 3, ("sort",), False)


def test_unused_arguments_require_nothing():
    assert derive(lambda x, y: (x, jnp.sort(y))[0], X, f32(4, 6)).text == "a b, c d -> a b"


def test_deriving_twice_gives_the_same():
    assert derive_gradient(NORM) == derive_gradient(NORM)


def test_rows_of_an_operator():
    forward, gradient = operator_rows("norms", NORM)
    assert (forward.name, forward.gradient, gradient.name, gradient.gradient) == ("norm", "norm_grad", "norm_grad", "")
    assert isinstance(forward, OperatorRow) and forward.checked and isinstance(gradient.rule, Derived)
    (count,) = operator_rows("order", Operator("unique", lambda x: jnp.sort(x)[:4], (f32(8),), (), "no gradient"))
    assert (count.gradient, count.note) == ("", "no gradient; nothing to shard: sort needs factor a whole")


def test_why_nothing_can_be_sharded():
    assert why_unshardable(derive(jnp.sin, f32())) == "nothing to shard: it has no dimensions"
