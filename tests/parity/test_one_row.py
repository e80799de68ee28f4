"""Batches and microbatches of one row: the sequence is sharded, and results equal those of one device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import autoshard
from autoshard.models import GPT, GPTConfig

LENGTH, VOCAB, LAYERS, WIDTH, HEADS, HEAD_DIM = 128, 48, 2, 16, 4, 8
LONG = 2048  # of the kernel, whose blocks have 128 positions
WORDS = [
    "cp:8",
    "gather:8",
    "ring:8 state",
    "ring:2 ulysses:4",
    "fsdp:2 ring:4",
    "fsdp:2 gather:4",
    "fsdp:2 ulysses:4",
    "dp:2 ring:2 tp:2 seq",
    "fsdp:2 isp:2 tp:2",
    "dp:8",
]


def tokens(length, rows=1):
    drawn = np.random.default_rng(1).integers(0, VOCAB, (2, rows, length))
    return jnp.asarray(drawn[0], jnp.int32), jnp.asarray(drawn[1], jnp.int32)


def plain_model(causal, scanned):
    """Return the gradient of a model in plain JAX, and its parameters."""
    draw = np.random.default_rng(0).normal
    shapes = {name: (WIDTH, HEADS * HEAD_DIM) for name in ("wq", "wk", "wv")}
    shapes |= {"wo": (HEADS * HEAD_DIM, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    layers = {name: jnp.asarray(draw(size=(LAYERS, *shape)) * 0.3, jnp.float32) for name, shape in shapes.items()}
    params = {"embed": jnp.asarray(draw(size=(VOCAB, WIDTH)), jnp.float32), "layers": layers}

    def layer(x, p):
        q, k, v = ((x @ p[name]).reshape(-1, LENGTH, HEADS, HEAD_DIM) for name in ("wq", "wk", "wv"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * HEAD_DIM**-0.5
        scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9) if causal else scores
        out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        x = x + out.reshape(-1, LENGTH, HEADS * HEAD_DIM) @ p["wo"]
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

    def loss(params, inputs, targets):
        x = params["embed"][inputs]
        if scanned:
            x, _ = jax.lax.scan(layer, x, params["layers"])
        else:
            for i in range(LAYERS):
                x, _ = layer(x, jax.tree.map(lambda p, i=i: p[i], params["layers"]))
        logits = jax.nn.log_softmax(x @ params["embed"].T)
        return -jnp.mean(jnp.take_along_axis(logits, targets[..., None], axis=-1))

    return jax.value_and_grad(loss), params


def llama(scanned):
    """Return the gradient of a small Llama, and its parameters."""
    cfg = GPTConfig(vocab=VOCAB, layers=LAYERS, heads=HEADS, kv_heads=2, width=32, context=LONG, tie_head=False,
                    remat="full" if scanned else "none", scan_layers=scanned, attention="splash")  # fmt: skip
    graph, params = nnx.split(GPT(cfg, rngs=nnx.Rngs(0)))

    def loss(params, inputs, targets):
        total, weight = nnx.merge(graph, params).loss({"inputs": inputs, "targets": targets})
        return total / weight

    return jax.value_and_grad(loss), params


def assert_close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert float(jnp.max(jnp.abs(a - b))) < 3e-5 * float(jnp.max(jnp.abs(b)))


CASES = {
    "causal, scanned": lambda: plain_model(True, True),
    "full, scanned": lambda: plain_model(False, True),
    "causal, unrolled": lambda: plain_model(True, False),
    "full, unrolled": lambda: plain_model(False, False),
    "llama, scanned": lambda: llama(True),
    "llama, unrolled": lambda: llama(False),
}
FAST = {("fsdp:2 ring:4", "causal, scanned"), ("fsdp:2 ulysses:4", "full, unrolled")}


@pytest.mark.parametrize(
    "words, case",
    [
        pytest.param(words, case, marks=[] if (words, case) in FAST else pytest.mark.slow)
        for case in CASES
        for words in WORDS
    ],
)
def test_loss_and_gradients_equal_one_device(words, case):
    step, params = CASES[case]()
    length = LONG if case.startswith("llama") else LENGTH
    args = params, *tokens(length)
    run = autoshard.plan(step, *args, target="cpu:8", plan=words).jit()
    assert_close(run(*args), jax.jit(step)(*args))
    if words == "fsdp:2 ring:4":  # one ring of all devices: no device gathers keys
        text = run.lower(*args).compile().as_text()
        gathers = re.findall(r"f32\[([\d,]+)\]\S* all-gather\(", text)
        assert "collective-permute" in text and not [shape for shape in gathers if str(length) in shape.split(",")]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "words, rows, microbatches",
    [
        ("pp:2 ring:4", 2, 2),
        ("pp:2 fsdp:2 ring:2", 2, 2),
        ("pp:2 ulysses:4", 4, 4),
        ("pp:2 cp:4", 2, 2),
        ("pp:2 dp:2 ring:2", 4, 2),
        ("ring:8", 2, 2),
        ("fsdp:2 ulysses:4", 2, 2),
    ],
)
def test_loss_and_gradients_equal_one_device_if_a_microbatch_has_one_row(words, rows, microbatches):
    step, params = plain_model(causal=True, scanned=True)
    args = params, *tokens(LENGTH, rows)
    made = autoshard.plan(step, *args, target="cpu:8", plan=words, microbatches=microbatches)
    assert_close(made.jit()(*args), jax.jit(step)(*args))
