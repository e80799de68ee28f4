"""Attention over a sharded sequence: loss and gradients equal those of one device, and no device gathers a sequence."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.errors import PlanError, PlanRequestError
from autoshard.kernels.blockwise_attention import Softmax
from autoshard.kernels.splash_attention import splash_attention
from autoshard.kernels.visibility import Visibility
from autoshard.sharding.lower import compiler_remarks

BATCH, HEAD_DIM, WIDTH = 2, 8, 16
CASES = {  # visibility, length, key-value heads, query heads of each, segments
    "causal, segments": (Visibility(causal=True), 64, 4, 2, True),
    "causal, one key-value head": (Visibility(causal=True), 64, 1, 8, False),
    "full": (Visibility(), 64, 8, 1, False),
    "window": (Visibility(causal=True, window=20), 128, 4, 2, False),
    "two-sided window": (Visibility(window=20), 64, 8, 1, True),
    "causal, long": (Visibility(causal=True), 4096, 4, 2, True),
}
FAST = {
    ("ring:2 ulysses:4", "causal, segments"),
    ("dp:2 ulysses:2 tp:2", "causal, one key-value head"),
    ("dp:2 isp:4", "causal, segments"),
}
WORDS = [
    "gather:8",
    "gather:2 ulysses:4",
    "ulysses:8",
    "ring:8",
    "ring:2 ulysses:4",
    "dp:2 ring:2 ulysses:2",
    "dp:2 ulysses:2 tp:2",
    "dp:2 isp:4",
    "ring:2 isp:4",
    "fsdp:2 isp:2 tp:2",
]


def attention_step(case):
    """Return a step with projections around attention, its parameters, and a batch."""
    visibility, length, kv_heads, group, has_segments = CASES[case]
    heads = kv_heads * group
    shapes = {"wq": heads, "wk": kv_heads, "wv": kv_heads}
    draw = np.random.default_rng(0).normal
    params = {name: jnp.asarray(draw(size=(WIDTH, n * HEAD_DIM)) * 0.3, jnp.float32) for name, n in shapes.items()}
    params["wo"] = jnp.asarray(draw(size=(heads * HEAD_DIM, WIDTH)) * 0.3, jnp.float32)
    params["sinks"] = jnp.asarray(draw(size=(kv_heads, group)), jnp.float32)
    batch = jnp.asarray(draw(size=(BATCH, length, WIDTH)), jnp.float32)
    segments = jnp.broadcast_to(jnp.arange(length) // (length // 5), (BATCH, length))

    def loss(params, x):
        q = (x @ params["wq"]).reshape(BATCH, length, kv_heads, group, HEAD_DIM)
        k, v = ((x @ params[n]).reshape(BATCH, length, kv_heads, HEAD_DIM) for n in ("wk", "wv"))
        both = (segments, segments) if has_segments else None
        softmax = Softmax(visibility, HEAD_DIM**-0.5, soft_cap=5.0)
        y = splash_attention(softmax, q, k, v, plain=True, segments=both, sinks=params["sinks"])
        return jnp.mean(jnp.square(x + y.reshape(BATCH, length, -1) @ params["wo"]))

    return jax.value_and_grad(loss), params, batch


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "words, case",
    [
        pytest.param(words, case, marks=[] if (words, case) in FAST else pytest.mark.slow)
        for words in WORDS
        for case in CASES
    ],
)
def test_values_and_gradients_equal_one_device(words, case):
    step, params, batch = attention_step(case)
    plan = autoshard.plan(step, params, batch, target="cpu:8", plan=words)
    run = plan.jit()
    found, expected = run(params, batch), jax.jit(step)(params, batch)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert float(jnp.max(jnp.abs(a - b))) < 1e-5 * float(jnp.max(jnp.abs(b)))
    heads = math.prod(int(word.split(":")[1]) for word in words.split() if word.startswith(("ulysses", "isp", "tp")))
    if (
        not {"gather", "isp"} & {*re.findall(r"[a-z]+", words)} and CASES[case][2] % heads == 0
    ):  # else keys are gathered
        compiled = run.lower(params, batch).compile().as_text()
        length = CASES[case][1]
        gathers = re.findall(r"(?:f32|bf16)\[([\d,]+)\]\S* all-gather\(", compiled)
        assert not [shape for shape in gathers if str(length) in shape.split(",")]
        assert ("collective-permute" in compiled) == ("ring" in words)
        assert ("all-to-all" in compiled) == ("ulysses" in words)


def test_queries_move_by_all_to_alls_where_key_heads_run_out(monkeypatch):
    """Two all-to-alls follow each other: XLA would gather the queries of all devices for both at once."""
    monkeypatch.setattr(compiler_remarks, "LEAST_REMARK_BYTES", 1)  # such a gather is then a warning, so an error
    step, params, batch = attention_step("causal, segments")
    run = autoshard.plan(step, params, batch, target="cpu:8", plan="ulysses:8").jit()
    found, expected = run(params, batch), jax.jit(step)(params, batch)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert float(jnp.max(jnp.abs(a - b))) < 1e-5 * float(jnp.max(jnp.abs(b)))
    text = run.lower(params, batch).compile().as_text()
    gathers = [line for line in text.splitlines() if " all-gather(" in line]
    assert gathers and all("[2,1,64,8]" in line for line in gathers if "f32" in line)  # a head's keys, of two devices
    assert not re.search(r"= f32\[2,1,64,8\]\S* all-reduce\(", text)  # gradients of keys are scattered
    assert "reduce-scatter" in text


def plain_step(params, x):
    """A step whose attention is written out."""

    def loss(params, x):
        q, k, v = ((x @ params[name]).reshape(*x.shape[:2], 4, 8) for name in ("wq", "wk", "wv"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1)
        return jnp.mean(jnp.square(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*x.shape[:2], -1) @ params["wo"]))

    return jax.value_and_grad(loss)(params, x)


def plain_arguments(length=64):
    params = {name: jnp.ones((16, 32)) for name in ("wq", "wk", "wv")} | {"wo": jnp.ones((32, 16))}
    draw = np.random.default_rng(0).normal
    params = {name: jnp.asarray(draw(size=x.shape) * 0.3, jnp.float32) for name, x in params.items()}
    return params, jnp.asarray(draw(size=(2, length, 16)), jnp.float32)


@pytest.mark.slow
@pytest.mark.whole
def test_written_out_attention_runs_on_a_ring_and_its_plan_can_be_read():
    """The words alone turn attention into an operator. A plan that was read runs it in the same way."""
    args = plain_arguments()
    plan = autoshard.plan(plain_step, *args, target="cpu:8", plan="ring:2 ulysses:2 tp:2")
    assert [record.replaced for record in plan.kernels] == [True]
    again = autoshard.Plan.from_json(plan.to_json()).bind(plain_step, *args)
    assert again.sequence == {"ring": "ring", "ulysses": "ulysses"}
    assert again.estimate == plan.estimate
    found, expected = again.jit()(*args), jax.jit(plain_step)(*args)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert float(jnp.max(jnp.abs(a - b))) < 1e-5 * float(jnp.max(jnp.abs(b)))


def no_attention(params, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ params["wq"]) @ params["wo"]))


@pytest.mark.parametrize(
    "fn, words, length, message",
    [
        (plain_step, "ulysses:8", 64, "has 4 heads; 8 devices do not divide them. Use 'ring:2 ulysses:4' instead"),
        (plain_step, "ulysses:4 tp:2", 64, "sharded 2 ways by other mesh axes; 4 devices do not divide them"),
        (plain_step, "isp:8", 64, "isp:8: attention at"),
        (plain_step, "isp:8", 64, "has 4 heads; 8 devices do not divide them. Use 'ring:2 isp:4' instead"),
        (no_attention, "isp:8", 64, "'isp:8' says how attention runs, but no attention was recognised"),
        (plain_step, "ring:8", 60, "has a sequence of 60, which 8 devices do not divide. Pad it"),
        (no_attention, "ring:8", 64, "'ring:8' says how attention runs, but no attention was recognised"),
        (plain_step, "ring:4 gather:2", 64, "'ring' and 'gather' both say how keys reach all queries"),
    ],
)
def test_what_cannot_run_says_what_would(fn, words, length, message):
    with pytest.raises((PlanError, PlanRequestError), match=re.escape(message)) as error:
        autoshard.plan(fn, *plain_arguments(length), target="cpu:8", plan=words)
    assert "\n" not in str(error.value)


def test_cp_takes_the_fastest_way_that_fits():
    step, params, batch = attention_step("window")
    plan = autoshard.plan(step, params, batch, target="cpu:8", plan="cp:8")
    assert {name for name, *_ in plan.candidates} == {
        "cp:8",
        "gather:8",
        "ulysses:8",
        "ring:8",
        "ring:2 ulysses:4",
        "ring:4 ulysses:2",
    }
    assert plan.chosen == min(plan.candidates, key=lambda one: one[1])[0]
