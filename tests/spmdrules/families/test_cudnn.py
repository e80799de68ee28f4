"""The table of cuDNN kernels, which no CPU can run: their maps are checked on JAX functions that compute the same."""

import jax
import jax.numpy as jnp
import pytest

from autoshard import check_rule, operator
from autoshard.sharding.program.flops import flops_of, inner_program
from autoshard.spmdrules.families.cudnn import kernel_flops
from tests.spmdrules.rows import Row, bind, f32, of

_GPU = "it runs on NVIDIA GPUs only"
_NOTHING = of(jnp.int32, 0)
_PLAIN = {"scale": 0.5, "layout": 0, "seed": 3, "dropout_rate": 0.0, "mask_type": 0, "sliding_window_length": None}
_NARROW = {"scale": 0.5, "layout": 0, "use_causal_mask": False}

Q, KV, STATISTICS, BIAS = f32(4, 6, 8, 2), f32(4, 10, 4, 2), f32(4, 8, 6), f32(1, 8, 6, 10)
FLAT = (_NOTHING,) * 6  # no lengths, offsets or page tables
LENGTHS = (of(jnp.int32, 4), of(jnp.int32, 4), *FLAT[2:])
PACKED = (of(jnp.int32, 4, 3), of(jnp.int32, 4, 3), of(jnp.int32, 4, 4), of(jnp.int32, 4, 4), *FLAT[4:])
PAGES = (*FLAT[:4], of(jnp.int32, 4, 1, 2, 1), of(jnp.int32, 4, 1, 2, 1))
ONES = (f32(1),) * 12

_QKV = "b t (h g) d, b s h d, b s h d1"


def scores(q, k, bias):
    """The scaled scores, with the bias if there is one; shape (batch, heads, queries, keys)."""
    batch, length, _, depth = q.shape
    grouped = q.reshape(batch, length, k.shape[2], -1, depth)
    scaled_scores = jnp.einsum("bthgd,bshd->bhgts", grouped, k) * 0.5
    scaled_scores = scaled_scores.reshape(batch, q.shape[2], length, k.shape[1])
    return scaled_scores + bias if bias.ndim == 4 else scaled_scores


def attention(q, k, v, bias):
    """What cuDNN's kernel computes: attention, and the log-sum-exp of each row of scores."""
    row_scores = scores(q, k, bias)
    grouped = jax.nn.softmax(row_scores).reshape(q.shape[0], k.shape[2], -1, *row_scores.shape[2:])
    out = jnp.einsum("bhgts,bshd->bthgd", grouped, v)
    return out.reshape(*q.shape[:3], v.shape[3]), jax.nn.logsumexp(row_scores, -1)


def forward(q, k, v, bias, *rows):
    return attention(q, k, v, bias)


def heads_first(q, k, v, *others):
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    return jnp.swapaxes(attention(q, k, v, others[0])[0], 1, 2)


def backward(q, k, v, bias, *others):
    return jax.vjp(lambda q, k, v, bias: attention(q, k, v, bias)[0], q, k, v, bias)[1](others[-1])


def narrow_forward(q, k, v, *scales):
    out, statistics = attention(q, k, v, jnp.zeros(0))
    largest = [jnp.max(jnp.abs(x)).reshape(1, 1, 1, 1) for x in (scores(q, k, jnp.zeros(0)), out)]
    return out, *largest, statistics


def narrow_backward(q, k, v, forward, cotangent, *others):
    gradients = jax.vjp(lambda q, k, v: attention(q, k, v, jnp.zeros(0))[0], q, k, v)[1](cotangent)
    return *gradients, *(jnp.max(jnp.abs(x)).reshape(1, 1, 1, 1) for x in (*gradients, scores(q, k, jnp.zeros(0))))


def scaled(x, y, x_scale, y_scale):
    x, y = (a * jnp.repeat(s, a.shape[2] // s.shape[2], 2) for a, s in ((x, x_scale), (y, y_scale)))
    return jnp.einsum("bmk,bnk->bmn", x, y)


def _ones(count, rank=1):
    return ", ".join([" ".join("1" * rank)] * count)


def _forward_text(rows, clauses, bias="w", statistics=""):
    return f"{_QKV}, {bias}, {rows} -> b t (h g) d1{statistics}; {clauses}; where h=4 g=2"


# For each kernel: name, parameters, operands, map, a JAX function that computes the same (or None), note.
KERNELS = [
    ("dot_product_attention_fwd", {**_PLAIN, "variadic_args": (True, False), "is_training": True},
     (Q, KV, KV, BIAS, *FLAT),
     _forward_text("w, w1, w2, w3, w4, w5", "whole t g d s d1 w w1 w2 w3 w4 w5", "1 (h g) t s", ", b (h g) t"),
     forward, "with a bias"),
    ("dot_product_attention_fwd", {**_PLAIN, "variadic_args": (False, False), "is_training": False},
     (Q, KV, KV, _NOTHING, *FLAT),
     _forward_text("w1, w2, w3, w4, w5, w6", "whole t g d s d1 w w1 w2 w3 w4 w5 w6"),
     lambda *args: forward(*args)[0], ""),
    ("dot_product_attention_fwd", {**_PLAIN, "variadic_args": (False, False), "is_training": False},
     (Q, KV, KV, _NOTHING, *LENGTHS),
     _forward_text("b, b, w1, w2, w3, w4", "whole t g d s d1 w w1 w2 w3 w4"),
     lambda *args: forward(*args)[0], "with lengths"),
    ("dot_product_attention_fwd", {**_PLAIN, "layout": 1, "variadic_args": (False, False), "is_training": False},
     (f32(4, 8, 6, 2), f32(4, 4, 10, 2), f32(4, 4, 10, 2), _NOTHING, *FLAT),
     "b (h g) t d, b h s d, b h s d1, w, w1, w2, w3, w4, w5, w6 -> b (h g) t d1; "
     "whole g t d s d1 w w1 w2 w3 w4 w5 w6; where h=4 g=2",
     heads_first,
     "heads first"),
    ("dot_product_attention_fwd",
     {**_PLAIN, "dropout_rate": 0.1, "variadic_args": (False, False), "is_training": False},
     (Q, KV, KV, _NOTHING, *FLAT),
     _forward_text("w1, w2, w3, w4, w5, w6", "whole b t h g d s d1 w w1 w2 w3 w4 w5 w6"),
     None, "with dropout"),
    ("dot_product_attention_fwd", {**_PLAIN, "variadic_args": (False, False), "is_training": True},
     (Q, KV, KV, _NOTHING, *PACKED),
     f"{_QKV}, w1, b w2, b w3, b w4, b w5, w6, w7 -> b t (h g) d1, (b w) (h g) t; "
     "whole b t h g d s d1 w1 w2 w3 w4 w5 w6 w7 w; where b=4 h=4 g=2 w=3",
     None, "of packed sequences"),
    ("dot_product_attention_fwd", {**_PLAIN, "variadic_args": (False, False), "is_training": False},
     (Q, f32(8, 5, 4, 2), f32(8, 5, 4, 2), _NOTHING, *PAGES),
     "b t (h g) d, w s h d, w s h d1, w1, w2, w3, w4, w5, b 1 w6 1, b 1 w7 1 -> b t (h g) d1; "
     "whole t g d w s d1 w1 w2 w3 w4 w5 w6 w7; where h=4 g=2",
     None, "of pages"),
    ("dot_product_attention_bwd", {**_PLAIN, "variadic_args": (True, True)},
     (Q, KV, KV, BIAS, *FLAT, STATISTICS, Q, Q),
     f"{_QKV}, 1 (h g) t s, w, w1, w2, w3, w4, w5, b (h g) t, b t (h g) d1, b t (h g) d1 -> {_QKV}, 1 (h g) t s; "
     "reduce b h; whole t g d s d1 w w1 w2 w3 w4 w5; linear 12; where h=4 g=2",
     backward, "with a bias"),
    ("dot_product_attention_bwd", {**_PLAIN, "variadic_args": (False, False)},
     (Q, KV, KV, _NOTHING, *FLAT, STATISTICS, Q, Q),
     f"{_QKV}, w, w1, w2, w3, w4, w5, w6, b (h g) t, b t (h g) d1, b t (h g) d1 -> {_QKV}; "
     "whole t g d s d1 w w1 w2 w3 w4 w5 w6; linear 12; where h=4 g=2",
     lambda *args: backward(*args)[:3], ""),
    ("dot_product_attention_fp8_fwd", {**_NARROW, "is_training": True}, (Q, KV, KV, *ONES[:6]),
     f"{_QKV}, {_ones(6)} -> b t (h g) d1, {_ones(2, 4)}, b (h g) t; reduce b:max h:max; whole t g d s d1; "
     "where h=4 g=2",
     narrow_forward, ""),
    ("dot_product_attention_fp8_bwd", _NARROW, (Q, KV, KV, Q, Q, STATISTICS, *ONES),
     f"{_QKV}, b t (h g) d1, b t (h g) d1, b (h g) t, {_ones(12)} -> {_QKV}, {_ones(4, 4)}; "
     "reduce b:max h:max; whole t g d s d1; where h=4 g=2",
     narrow_backward, ""),
    ("scaled_matmul", {"preferred_element_type": jnp.float32},
     (f32(4, 8, 64), f32(4, 6, 64), f32(4, 8, 2), f32(4, 6, 2)),
     "b m (k x), b n (k x), b m k, b n k -> b m n; reduce k x; where k=2 x=32", scaled, ""),
]  # fmt: skip


def _row(name, params, args, expected, note):
    return Row(name, lambda *xs: bind(name)(*xs, **params), args, expected, note, unchecked=_GPU)


ROWS = [
    _row(name + ending, params, args, expected, note)
    for name, params, args, expected, _, note in KERNELS
    for ending in ("", "_wrapper")
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_expected_map(row):
    assert row.rule().text == row.expected


COMPUTED = [k for k in KERNELS if k[4] is not None]


def _marked(kernel):
    """The gradient without a bias runs in `make test`; the other kernels take as long and are marked."""
    marks = () if kernel[0].endswith("bwd") and not kernel[5] and "fp8" not in kernel[0] else pytest.mark.slow
    return pytest.param(kernel, marks=marks, id=f"{kernel[0]}-{kernel[5]}")


@pytest.mark.parametrize("kernel", [_marked(kernel) for kernel in COMPUTED])
def test_the_map_holds_for_what_the_kernel_computes(kernel):
    _, _, args, text, computes, _ = kernel
    errors = [str(f) for f in check_rule(operator(text)(computes), *args, partitioner=False) if f.kind == "wrong"]
    assert not errors, "\n".join(errors)


@pytest.mark.slow
def test_a_wrong_map_is_found():
    _, _, args, text, computes, _ = KERNELS[0]
    wrong = text.replace("whole t g d s d1", "whole t g d d1")
    findings = check_rule(operator(wrong)(computes), *args, partitioner=False)
    assert {f.factors[0] for f in findings if f.kind == "wrong"} == {"s"}


def test_kernel_flops_equal_those_of_the_jax_function():
    def counted(fn, *operands):
        program = inner_program(fn, tuple((a.shape, a.dtype) for a in operands))
        assert program is not None
        return sum(flops_of(op) for op in program.ops() if op.name == "dot_general")

    q, k, v = Q, KV, f32(*KV.shape[:3], 3)

    def plain(q, k, v):
        return attention(q, k, v, jnp.zeros(0))

    forward_flops = kernel_flops("dot_product_attention_fwd_wrapper", (q, k, v), _PLAIN)
    assert forward_flops == counted(plain, q, k, v)
    both = counted(jax.grad(lambda *qkv: plain(*qkv)[0].sum(), (0, 1, 2)), q, k, v)
    assert kernel_flops("dot_product_attention_bwd", (q, k, v), _PLAIN) == both
    causal = kernel_flops("dot_product_attention_fwd", (q, k, v), _PLAIN | {"mask_type": 2})
    window = kernel_flops("dot_product_attention_fwd", (q, k, v), _PLAIN | {"sliding_window_length": 2})
    assert (causal, window) == (forward_flops / 2, forward_flops / 5)
    x, y = f32(2, 6, 8), f32(2, 5, 8)
    assert kernel_flops("scaled_matmul", (x, y), {}) == counted(lambda x, y: jnp.einsum("bmk,bnk->bmn", x, y), x, y)
    assert kernel_flops("dot_general", (x, y), {}) == 0
