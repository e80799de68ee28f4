"""Train steps in plain JAX and Optax, as others write them: the planner must serve programs that are not its own.

Each function returns `(step, state shapes, batch shapes)` of `step(state, *batch) -> (state, loss)`, in bfloat16 with
float32 parameters and AdamW. Sizes are those of published models, with few layers. `remat` is `none`, `dots` or `full`.
With `kernel`, the model calls autoshard's attention kernel for TPUs instead of plain attention.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from autoshard.models.attention import attention

Made = tuple[Callable[..., Any], Any, tuple[Any, ...]]
COMPUTE = jnp.bfloat16
OPTIMIZER = optax.adamw(1e-3)


def llama(
    remat: str, rows: int = 16, seq: int = 2048, layers: int = 4, vocab: int = 32768, *, kernel: bool = False
) -> Made:
    """Llama-3 8B's widths with a smaller vocabulary; the layers are a scan."""
    width, ffn, heads, shared = 4096, 14336, 32, 8
    size = width // heads
    layer = {"wq": (width, heads, size), "wk": (width, shared, size), "wv": (width, shared, size)}
    layer |= {"wo": (heads, size, width), "gate": (width, ffn), "up": (width, ffn), "down": (ffn, width)}
    layer |= {"norm1": (width,), "norm2": (width,)}
    params = _arrays({"embed": (vocab, width), "layers": _stacked(layer, layers), "norm": (width,)})
    params |= _arrays({"head": (width, vocab)})

    def rms(x: Any, scale: Any) -> Any:
        wide = x.astype(jnp.float32)
        return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5) * scale).astype(COMPUTE)

    def block(x: Any, w: Any) -> tuple[Any, None]:
        w = jax.tree.map(lambda a: a.astype(COMPUTE), w)
        y = rms(x, w["norm1"])
        q, k, v = (jnp.einsum("bse,ehd->bshd", y, w[name]) for name in ("wq", "wk", "wv"))
        q, k = _rotated(q), _rotated(k)
        if kernel:
            y = attention(q, k, v, causal=True, impl="splash")
        else:
            y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + jnp.einsum("bshd,hde->bse", y, w["wo"])
        y = rms(x, w["norm2"])
        return x + (jax.nn.silu(y @ w["gate"]) * (y @ w["up"])) @ w["down"], None

    def loss(params: Any, tokens: Any, targets: Any) -> Any:
        x = params["embed"].astype(COMPUTE)[tokens]
        x, _ = lax.scan(_recomputed(block, remat), x, params["layers"])
        return _cross_entropy(rms(x, params["norm"]) @ params["head"].astype(COMPUTE), targets)

    return _step(loss, params, (_tokens(rows, seq),) * 2)


def gpt(remat: str, rows: int = 64, seq: int = 1024, layers: int = 4, *, kernel: bool = False) -> Made:
    """GPT-3 1.3B's widths; the layers are a Python loop, and the head is the embedding."""
    width, heads, vocab = 2048, 16, 51200
    layer = {"qkv": (width, 3, heads, width // heads), "out": (heads, width // heads, width)}
    layer |= {"up": (width, 4 * width), "down": (4 * width, width), "norm1": (width,), "norm2": (width,)}
    params = _arrays({"embed": (vocab, width), "places": (seq, width), "layers": [layer] * layers, "norm": (width,)})
    block = _recomputed(functools.partial(_attention_block, causal=True, kernel=kernel), remat)

    def loss(params: Any, tokens: Any, targets: Any) -> Any:
        table = params["embed"].astype(COMPUTE)
        x = table[tokens] + params["places"].astype(COMPUTE)
        for w in params["layers"]:
            x = block(x, w)
        return _cross_entropy(_layer_norm(x, params["norm"]) @ table.T, targets)

    return _step(loss, params, (_tokens(rows, seq),) * 2)


def vit(remat: str, rows: int = 512, layers: int = 4, *, side: int = 14, kernel: bool = False) -> Made:
    """ViT-L/16's widths on images of `16 * side` pixels a side; the layers are a Python loop."""
    width, heads, patches, classes = 1024, 16, side * side, 1024
    layer = {"qkv": (width, 3, heads, width // heads), "out": (heads, width // heads, width)}
    layer |= {"up": (width, 4 * width), "down": (4 * width, width), "norm1": (width,), "norm2": (width,)}
    params = {"patch": (16 * 16 * 3, width), "places": (patches, width), "layers": [layer] * layers}
    params = _arrays(params | {"norm": (width,), "head": (width, classes)})
    block = _recomputed(functools.partial(_attention_block, causal=False, kernel=kernel), remat)

    def loss(params: Any, images: Any, labels: Any) -> Any:
        x = images.reshape(rows, side, 16, side, 16, 3).transpose(0, 1, 3, 2, 4, 5).reshape(rows, patches, -1)
        x = x.astype(COMPUTE) @ params["patch"].astype(COMPUTE) + params["places"].astype(COMPUTE)
        for w in params["layers"]:
            x = block(x, w)
        pooled = _layer_norm(x, params["norm"]).mean(1)
        return _cross_entropy(pooled @ params["head"].astype(COMPUTE), labels)

    images = jax.ShapeDtypeStruct((rows, 16 * side, 16 * side, 3), jnp.float32)
    return _step(loss, params, (images, jax.ShapeDtypeStruct((rows,), jnp.int32)))


def moe(remat: str, rows: int = 64, seq: int = 1024, layers: int = 2, *, kernel: bool = False) -> Made:
    """A mixture of 16 experts with one-hot dispatch in groups of `seq` tokens; the layers are a scan."""
    width, ffn, experts, heads, vocab, capacity = 1024, 4096, 16, 16, 32000, seq // 8
    layer = {
        "qkv": (width, 3, heads, width // heads),
        "out": (heads, width // heads, width),
        "router": (width, experts),
    }
    layer |= {"up": (experts, width, ffn), "down": (experts, ffn, width), "norm1": (width,), "norm2": (width,)}
    params = _arrays({"embed": (vocab, width), "layers": _stacked(layer, layers), "norm": (width,)})

    def block(x: Any, w: Any) -> tuple[Any, None]:
        w = jax.tree.map(lambda a: a.astype(COMPUTE), w)
        x = x + _attention(_layer_norm(x, w["norm1"]), w, True, kernel)
        y = _layer_norm(x, w["norm2"])
        gates = jax.nn.softmax((y @ w["router"]).astype(jnp.float32))
        chosen = jax.nn.one_hot(gates.argmax(-1), experts)
        place = (jnp.cumsum(chosen, 1) * chosen - chosen).sum(-1).astype(jnp.int32)
        slots = chosen[..., None] * jax.nn.one_hot(place, capacity)[:, :, None]  # [batch, seq, experts, capacity]
        sent = jnp.einsum("bsec,bsd->ebcd", slots.astype(COMPUTE), y)
        done = jnp.einsum("ebcf,efd->ebcd", jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", sent, w["up"])), w["down"])
        weights = (slots * (gates * chosen)[..., None]).astype(COMPUTE)
        return x + jnp.einsum("bsec,ebcd->bsd", weights, done), None

    def loss(params: Any, tokens: Any, targets: Any) -> Any:
        x = params["embed"].astype(COMPUTE)[tokens]
        x, _ = lax.scan(_recomputed(block, remat), x, params["layers"])
        return _cross_entropy(_layer_norm(x, params["norm"]) @ params["embed"].astype(COMPUTE).T, targets)

    return _step(loss, params, (_tokens(rows, seq),) * 2)


def residual(remat: str, rows: int = 512, layers: int = 6) -> Made:
    """A residual network: a scan over blocks of two 3 x 3 convolutions with 512 channels at 16 x 16 pixels."""
    channels, classes = 512, 1024
    block_shapes = {"first": (3, 3, channels, channels), "second": (3, 3, channels, channels), "scale": (channels,)}
    params = {"stem": (4, 4, 3, channels), "blocks": _stacked(block_shapes, layers), "head": (channels, classes)}
    params = _arrays(params)

    def conv(x: Any, kernel: Any, stride: int = 1) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, kernel.astype(COMPUTE), (stride,) * 2, "SAME", dimension_numbers=numbers)

    def block(x: Any, w: Any) -> tuple[Any, None]:
        y = jax.nn.relu(conv(_layer_norm(x, w["scale"]), w["first"]))
        return x + conv(y, w["second"]), None

    def loss(params: Any, images: Any, labels: Any) -> Any:
        x, _ = lax.scan(_recomputed(block, remat), conv(images.astype(COMPUTE), params["stem"], 4), params["blocks"])
        return _cross_entropy(x.mean((1, 2)) @ params["head"].astype(COMPUTE), labels)

    images = jax.ShapeDtypeStruct((rows, 64, 64, 3), jnp.float32)
    return _step(loss, params, (images, jax.ShapeDtypeStruct((rows,), jnp.int32)))


def perceptron(
    remat: str, rows: int = 131_072, layers: int = 4, *, act: Callable[[Any], Any] = jax.nn.relu, gated: bool = False
) -> Made:
    """Residual layers of two products with an activation, or of three with a gate; the layers are a Python loop."""
    width, hidden = 1024, 4096
    layer = {"norm": (width,), "up": (width, hidden), "down": (hidden, width)}
    layer |= {"gate": (width, hidden)} if gated else {}

    def block(x: Any, w: Any) -> Any:
        w = jax.tree.map(lambda a: a.astype(COMPUTE), w)
        y = _layer_norm(x, w["norm"])
        h = act(y @ w["up"])
        h = h * (y @ w["gate"]) if gated else h
        return x + h @ w["down"]

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = (jax.checkpoint(block) if remat == "full" else block)(x, w)
        return (x.astype(jnp.float32) ** 2).mean()

    return _step(loss, _arrays([layer] * layers), (jax.ShapeDtypeStruct((rows, width), COMPUTE),))


PLAIN: Mapping[str, Callable[..., Made]] = {f.__name__: f for f in (llama, gpt, vit, moe, residual)} | {
    "relu": perceptron,
    "gelu": functools.partial(perceptron, act=jax.nn.gelu),
    "erf": functools.partial(perceptron, act=functools.partial(jax.nn.gelu, approximate=False)),
    "silu": functools.partial(perceptron, act=jax.nn.silu),
    "swiglu": functools.partial(perceptron, act=jax.nn.silu, gated=True),
}


def _step(loss: Callable[..., Any], params: Any, batch: tuple[Any, ...]) -> Made:
    def step(state: Any, *batch: Any) -> Any:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, moments = OPTIMIZER.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step, (params, jax.eval_shape(OPTIMIZER.init, params)), batch


def _arrays(shapes: Any) -> Any:
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=lambda s: isinstance(s, tuple))


def _stacked(shapes: Mapping[str, tuple[int, ...]], layers: int) -> dict[str, tuple[int, ...]]:
    return {name: (layers, *shape) for name, shape in shapes.items()}


def _tokens(rows: int, seq: int) -> Any:
    return jax.ShapeDtypeStruct((rows, seq), jnp.int32)


def _recomputed(block: Callable[..., Any], remat: str) -> Callable[..., Any]:
    if remat == "none":
        return block
    policies = {"full": None, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
    return jax.checkpoint(block, policy=policies[remat], prevent_cse=False)


def _layer_norm(x: Any, scale: Any) -> Any:
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    return (centred * lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) * scale).astype(COMPUTE)


def _rotated(x: Any) -> Any:
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * 1e4 ** (-jnp.arange(half) / half)
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    turned = [first * jnp.cos(angle) - second * jnp.sin(angle), first * jnp.sin(angle) + second * jnp.cos(angle)]
    return jnp.concatenate(turned, -1).astype(COMPUTE)


def _attention(y: Any, w: Any, causal: bool, kernel: bool) -> Any:
    if kernel:
        q, k, v = jnp.einsum("bse,enhd->nbshd", y, w["qkv"])
        return jnp.einsum("bqhd,hde->bqe", attention(q, k, v, causal=causal, impl="splash"), w["out"])
    q, k, v = jnp.einsum("bse,enhd->nbhsd", y, w["qkv"])
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum("bhqk,bhkd,hde->bqe", jax.nn.softmax(scores).astype(COMPUTE), v, w["out"])


def _attention_block(x: Any, w: Any, causal: bool, kernel: bool) -> Any:
    w = jax.tree.map(lambda a: a.astype(COMPUTE), w)
    x = x + _attention(_layer_norm(x, w["norm1"]), w, causal, kernel)
    return x + jax.nn.gelu(_layer_norm(x, w["norm2"]) @ w["up"]) @ w["down"]


def _cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()
