"""Rules that `discover` finds by running functions on pieces: which factors it finds, and which it refuses and why."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl

import autoshard
from autoshard import Discovery, Rule, check_rule, discover, operator
from autoshard.sharding.discover.rule_discovery import DiscoveryError
from autoshard.spmdrules import catalogue
from autoshard.spmdrules.core import registry
from autoshard.spmdrules.reference.derive import derive


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def bools(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bool_)


@pytest.fixture
def own_registry(monkeypatch):
    """Keeps the operators of a test out of the other tests."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))


def layer_norm(x, scale, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * scale + bias


def attention(q, k, v):
    scores = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k))
    return jnp.einsum("bhst,bthd->bshd", scores, v)


def convolution(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME")


def rope(x, angles):
    a, b = x[..., ::2], x[..., 1::2]
    cos, sin = jnp.cos(angles)[..., None], jnp.sin(angles)[..., None]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)


def gated(x, w, bias):
    a, b = jnp.split(x @ w + bias, 2, -1)
    return a * jax.nn.sigmoid(b)


def on_host(x):
    return jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def kernel(x, scale):
    def body(x_ref, scale_ref, out_ref):
        x = x_ref[...]
        out_ref[...] = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale_ref[...]

    return pl.pallas_call(body, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x, scale)


TOKENS = np.arange(20).reshape(4, 5) % 8
# Factors that can be split by running the function itself on a shard. The rows of a table and the dimension of an
# argmax cannot be split in this way.
FOUND = {
    "matmul": (jnp.matmul, (f32(4, 6), f32(6, 8)), "a b, b c -> a c; reduce b; linear 0; linear 1"),
    "matmul of trees": (
        lambda p: {"y": p["x"] @ p["w"]},
        ({"w": f32(6, 8), "x": f32(4, 6)},),
        "a b, c a -> c b; reduce a; linear 0; linear 1",
    ),
    "layer norm": (layer_norm, (f32(4, 6, 8), f32(8), f32(8)), "a b c, c, c -> a b c; whole c"),
    "softmax": (jax.nn.softmax, (f32(4, 8),), "a b -> a b; whole b"),
    "attention": (
        attention,
        (f32(2, 6, 4, 8), f32(2, 12, 4, 8), f32(2, 12, 4, 8)),
        "a b c d, a e c d, a e c f -> a b c f; whole d e; linear 2",
    ),
    "convolution": (
        convolution,
        (f32(4, 6, 8, 10), f32(12, 6, 3, 3)),
        "a b c d, e b f g -> a e c d; reduce b; whole c d f g; linear 0; linear 1",
    ),
    "embedding": (lambda table, at: table[at], (f32(8, 6), TOKENS), "a b, c d -> c d b; whole a; linear 0"),
    "cumsum": (lambda x: jnp.cumsum(x, 1), (f32(4, 6),), "a b -> a b; whole b; linear 0"),
    "argmax": (lambda x: jnp.argmax(x, 1), (f32(4, 6),), "a b -> a; whole b"),
    "a primitive": (
        lambda x: lax.cumsum_p.bind(x, axis=1, reverse=False),
        (f32(4, 6),),
        "a b -> a b; whole b; linear 0",
    ),
    "merged": (lambda x: x.reshape(-1, x.shape[2]), (f32(4, 6, 8),), "a b c -> (a b) c; linear 0"),
    "split": (
        lambda x: x.reshape(x.shape[0], -1, 4),
        (f32(6, 16),),
        "a (b c) -> a b d; whole c d; linear 0; where c=4 d=4",
    ),
    "split within": (
        lambda x: x.reshape(x.shape[0], 4, -1),
        (f32(6, 24),),
        "a (b c) -> a d c; whole b d; linear 0; where b=4 d=4",
    ),
    "pooled": (
        lambda x: x.reshape(x.shape[0], -1, 2).max(-1),
        (f32(4, 8),),
        "a (b c) -> a b; whole c; where c=2",
    ),
    "pairs": (
        rope,
        (f32(4, 6, 8), f32(4, 6)),
        "a b (c d), a b -> a b (c e); whole d e; linear 0; where d=2 e=2",
    ),
    "gated": (gated, (f32(4, 6), f32(6, 16), f32(16)), "a b, b (c d), (e d) -> a d; whole b c e; where c=2"),
    "tiled": (lambda x: jnp.tile(x, (1, 2)), (f32(4, 6),), "a b -> a (c b); whole c; linear 0; where c=2"),
    "joined": (lambda x, y: jnp.concatenate([x, y]), (f32(6), f32(6)), "a, a -> (b a); whole b; linear 0 1; where b=2"),
    "several results": (lambda x: (x.sum(0), x * 2), (f32(4, 6),), "a b -> b, a b; reduce a; linear 0"),
    "all": (lambda x: jnp.all(x, 1), (bools(4, 6),), "a b -> a; reduce b:and"),
    "keys": (
        jax.vmap(lambda key: jax.random.normal(key, (6,))),
        (jax.random.split(jax.random.key(0), 4),),
        "a -> a b; whole b; where b=6",
    ),
    "factored": (
        lambda x: jnp.linalg.cholesky(x, symmetrize_input=False),
        (np.eye(4) + 4 * np.eye(4) * np.ones((6, 1, 1)) + 0.5,),
        "a b c -> a d e; whole b c d e; where d=4 e=4",
    ),
    "on the host": (on_host, (f32(4, 6),), "a b -> a b"),
    "a kernel": (kernel, (f32(4, 8), f32(8)), "a b, b -> a b; whole b; linear 1"),
    "an argument that is not an array": (lambda x, axis: x.sum(axis), (f32(4, 6), 1), "a b -> a; reduce b; linear 0"),
}


# The fast tests. The others take the same paths through the search and take longer.
FAST = {"matmul", "layer norm", "softmax", "embedding", "argmax", "merged", "split within", "pooled", "a kernel"}


@pytest.mark.few(3)
@pytest.mark.whole
@pytest.mark.parametrize(
    ("fn", "args", "text"),
    [pytest.param(*row, id=name, marks=[pytest.mark.slow] * (name not in FAST)) for name, row in FOUND.items()],
)
def test_found_rules(fn, args, text):
    discovery = discover(fn, *args)
    assert discovery.text == text
    assert discovery.rule.where(body=None).text.split("; where")[0] == text.split("; where")[0]
    assert {e.factor for e in discovery.evidence} == {f.name for f in discovery.rule.factors if f.shardable}


# Functions for which wrong rules pass on some values, sizes or splits.
TRAPS = {
    "a product with itself": (lambda x: x @ x.T, (f32(6, 6),), "a b -> a c; reduce b; whole a c; where c=6"),
    "one matrix times another": (jnp.matmul, (f32(6, 6), f32(6, 6)), "a b, b c -> a c; reduce b; linear 0; linear 1"),
    "a sum of squares": (lambda x: (x * x).sum(), (f32(4, 6),), "a b -> []; reduce a b"),
    "the square of a sum": (lambda x: x.sum() ** 2, (f32(4, 6),), "a b -> []; whole a b"),
    "a mean": (lambda x: x.mean(1), (f32(4, 6),), "a b -> a; whole b; linear 0"),
    "a sum and what is added once": (lambda x, y: x.sum() + y, (f32(4), f32()), "a, [] -> []; whole a; linear 0 1"),
    "equal sizes, unrelated dimensions": (lambda x, y: (x * 2, y * 3), (f32(6), f32(6)), "a, b -> a, b; linear 0 1"),
    "two of three": (
        lambda x, y, z: (x + y, z * 2),
        (f32(6), f32(6), f32(6)),
        "a, a, b -> a, b; linear 0 1 2",
    ),
    "an outer product": (lambda x, y: x[:, None] * y, (f32(6), f32(6)), "a, b -> a b; linear 0; linear 1"),
    "a maximum of negative values": (
        lambda x: x.max(1),
        (-1 - np.arange(24.0).reshape(4, 6),),
        "a b -> a; reduce b:max",
    ),
    "a maximum unless all are negative": (
        lambda x: jnp.where(x.max(1) < 0, x.sum(1), x.max(1)),
        (f32(4, 64),),
        "a b -> a; whole b",
    ),
    "a sum of cubes, given ones": (lambda x: (x**3).sum(1), (np.ones((4, 6), np.float32),), "a b -> a; reduce b"),
    "the first": (lambda x: x[0], (f32(4, 6),), "a b -> b; whole a; linear 0"),
    "the last first": (lambda x: x[::-1], (f32(4, 6),), "a b -> a b; whole a; linear 0"),
    "a sum and a maximum": (lambda x: (x.sum(0), x.max(0)), (f32(4, 6),), "a b -> b, b; whole a"),
    "a second, constant result": (lambda x: (x * 2, jnp.zeros(())), (f32(4, 6),), "a b -> a b, []; linear 0"),
    "pieces of one element": (
        lambda x: x.squeeze(),
        (f32(4, 6),),
        "(a b) (c d) -> (a e) (c f); whole b d e f; linear 0; where b=2 d=3 e=2 f=3",
    ),
}


@pytest.mark.whole
@pytest.mark.parametrize(("fn", "args", "text"), TRAPS.values(), ids=TRAPS.keys())
def test_wrong_rules_are_not_proposed(fn, args, text):
    assert discover(fn, *args).text == text


def doubled_4_by_6(x):
    assert x.shape == (4, 6), "only (4, 6) is known here"
    return x * 2


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("fn", "args", "why"),
    [
        (
            doubled_4_by_6,
            (f32(4, 6),),
            "operand 0 dim 0 split into 2: it does not accept the pieces: AssertionError: only (4, 6) is",
        ),
        (lambda x: x @ x.T, (f32(6, 6),), "result 0 has shape (3, 3) for a piece and (6, 6) for the whole"),
        (lambda x: x.mean(1), (f32(4, 6),), "no way of joining its pieces gives the whole (the closest: "),
        (
            lambda x: (x.sum(0), x.max(0)),
            (f32(4, 6),),
            "joined in different ways, which no rule can express: result 0: sum, result 1: max",
        ),
        (lambda x: (x > 1e9).any(1), (f32(4, 6),), "only 0 of 32 sets of values gave informative results"),
        (lambda x: (x, (x > 1e9).any()), (f32(4, 6),), "result 1 is the same on all sets of values"),
        (lambda x: x * 2, (f32(11),), "11 cannot be split into 2, 3, 5 or 7 equal pieces"),
    ],
)
def test_refused_factors_have_a_reason(fn, args, why):
    discovery = discover(fn, *args)
    assert why in str(discovery)
    assert any(why in reason for refusal in discovery.refused for _, reason in refusal.tried) or why in str(
        discovery.refused[0]
    )


@pytest.mark.parametrize(
    ("fn", "args", "message"),
    [
        (lambda: 1, (), "has no array arguments. Pass arrays or jax.ShapeDtypeStructs"),
        (lambda x: x, (3,), "has no array arguments"),
        (lambda x: None, (f32(4),), "returns no arrays"),
        (lambda x: x @ x, (f32(4, 6),), "cannot be traced with the whole arguments: TypeError: "),
        (lambda x: x + np.random.default_rng().normal(), (f32(4),), "two runs on the same values differ in result 0"),
        (
            lambda x: x + jax.pure_callback(lambda: np.float32(next(COUNTER)), jax.ShapeDtypeStruct((), np.float32)),
            (f32(4),),
            "two runs on the same values differ in result 0",
        ),
    ],
)
def test_functions_without_a_discoverable_rule(fn, args, message):
    with pytest.raises(DiscoveryError, match=r"^discover\(<lambda>\): ") as error:
        discover(fn, *args)
    assert message in str(error.value)


COUNTER = itertools.count()


def test_not_a_function():
    with pytest.raises(TypeError, match="discover takes a function and its arguments, but got 3"):
        discover(3, f32(4))  # pyright: ignore[reportArgumentType]


def test_values_that_the_function_rejects_are_skipped():
    table = np.arange(7, dtype=np.float32) ** 2

    def looked_up(index):
        assert index.min() >= 0, "a negative position"
        return table[index]

    discovery = discover(
        lambda index: jax.pure_callback(looked_up, jax.ShapeDtypeStruct(index.shape, np.float32), index),
        np.array([1, 2, 3, 6]),
    )
    assert discovery.text == "a -> a" and discovery.evidence[0].sets < 16


def test_evidence():
    discovery = discover(jnp.matmul, f32(4, 6), f32(6, 8))
    assert isinstance(discovery, Discovery) and isinstance(discovery.rule, Rule)
    assert [(e.factor, e.size, e.pieces, e.operands, e.joins) for e in discovery.evidence] == [
        ("a", 4, (2, 4), ("0 dim 0",), ("concatenated along dim 0",)),
        ("b", 6, (2, 6), ("0 dim 1", "1 dim 0"), ("reduced by sum",)),
        ("c", 8, (2, 8), ("1 dim 1",), ("concatenated along dim 1",)),
    ]
    assert all(e.sets == 16 and e.error < 1e-5 for e in discovery.evidence) and not discovery.refused
    text = str(discovery)
    assert text.startswith(discovery.text) and "by sum; 16 sets" in text
    assert "not proof. @autoshard.operator(text) applies the rule." in text


@pytest.mark.filterwarnings("ignore:.*attached devices are idle")
def test_nothing_is_applied_and_the_oracle_agrees(own_registry):
    before = dict(registry._RULES)
    args = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32), np.ones(8, np.float32)
    discovery = discover(kernel, *args)
    assert registry._RULES == before
    norm = operator(discovery.text)(kernel)
    assert [f for f in check_rule(norm, *args, partitioner=False) if f.kind == "wrong"] == []
    step = autoshard.auto_shard(lambda x, scale: norm(jnp.sin(x), scale), mesh={"data": 4})
    np.testing.assert_allclose(step(*args), kernel(jnp.sin(args[0]), args[1]), rtol=1e-5)


def test_factors_that_only_the_oracle_finds_wrong_are_withdrawn():
    """Each of two dimensions can be split alone, but not both: the pieces are too small."""

    def large(x):
        if x.size < 8:
            raise ValueError("at least 8 elements")
        return x + 1

    discovery = discover(large, f32(4, 6))
    assert discovery.text == "(a b) c -> (a d) c; whole b c d; where b=2 d=2"
    assert "cannot run on these shards: ValueError: at least 8" in str(discovery.refused[-1])


# Against derived rules --------------------------------------------------------------------------------------------

CATALOGUE = {op.name: op for _, op in catalogue.catalogue()}
FAST_DERIVED = ("gelu", "rms_norm", "cumsum")
SAME_AS_DERIVED = (
    "softmax", "layer_norm", "batch_norm", "logsumexp", "matmul", "embedding", "rope", "feed_forward", "swiglu",
    "linear_attention", "conv2d", "conv2d_depthwise", "max_pool2d", "take_along_axis",
    "one_hot", "index_put", "segment_sum", "argmax", "sort", "isclose", "transpose", "cholesky", "cross_entropy",
    "adamw", "dot",
)  # fmt: skip


def local_factors(rule):
    """The factors that can be split by running the function on a shard: kind, operation and places of each."""

    def places(arrays, name):
        for i, dims in enumerate(arrays):
            for d, dim in enumerate(dims):
                if name in dim:
                    yield i, d, math.prod(rule.factor(f).size for f in dim[: dim.index(name)])

    return {
        (f.kind, f.op, *places(rule.operands, f.name), "->", *places(rule.results, f.name))
        for f in rule.factors
        if f.kind in ("pass", "reduce") and any(True for _ in places(rule.operands, f.name))
    }


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.whole) for name in FAST_DERIVED]
    + [pytest.param(name, marks=pytest.mark.slow) for name in SAME_AS_DERIVED],
)
def test_discovered_rules_of_the_catalogue_equal_derived_rules(name):
    op = CATALOGUE[name]
    assert local_factors(discover(op.fn, *op.args).rule) == local_factors(derive(op.fn, *op.args).rule)
