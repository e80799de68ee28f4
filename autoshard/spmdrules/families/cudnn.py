"""cuDNN kernels that JAX calls: attention, and block-scaled matrix products.

They run on NVIDIA GPUs only, so tests on CPUs cannot run them. The tests check their rules on JAX functions that
compute the same values. JAX binds the primitives named `..._wrapper`; inside these it binds the others, on shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoshard._compat import primitives
from autoshard.spmdrules.core.registry import rule
from autoshard.spmdrules.core.rule import Dims, Kind, Reduction, Rule
from autoshard.spmdrules.core.rule_builder import Dim, RuleBuilder

_CAUSAL, _PADDED_CAUSAL = 2, 3  # of JAX's `MaskType`
_HEADS_FIRST = 1  # the layout `batch heads sequence features`; the other is `batch sequence heads features`

KERNELS = frozenset(
    f"{kernel}{end}"
    for kernel in ("scaled_matmul", *(f"dot_product_attention_{kind}" for kind in ("fwd", "bwd", "fp8_fwd", "fp8_bwd")))
    for end in ("", "_wrapper")
)
"""The names of the kernels' primitives."""


@rule(*primitives("scaled_matmul", "scaled_matmul_wrapper"))
def scaled_matmul(x: Any, y: Any, x_scale: Any, y_scale: Any, **_: Any) -> Rule:
    """``b m (k x), b n (k x), b m k, b n k -> b m n; reduce k x``: block-scaled matrix products.

    https://docs.jax.dev/en/latest/_autosummary/jax.nn.scaled_matmul.html
    """
    build = RuleBuilder()
    batch, m, n = build.dim("b", x.shape[0]), build.dim("m", x.shape[1]), build.dim("n", y.shape[1])
    blocks = build.dim("k", x_scale.shape[2], "reduce", "sum")
    full = blocks + build.dim("x", x.shape[2] // x_scale.shape[2], "reduce", "sum")
    operands = [(batch, m, full), (batch, n, full), (batch, m, blocks), (batch, n, blocks)]
    return build.rule(operands, [(batch, m, n)])


class _AttentionDims:
    """The dimensions of one attention call: batch and key heads pass; query heads that share a key head are whole."""

    def __init__(self, query: Any, key: Any, value: Any, layout: int, kind: Kind = "pass", op: Reduction | None = None):
        self.build = build = RuleBuilder()
        self.layout = layout
        heads, seq = (1, 2) if layout == _HEADS_FIRST else (2, 1)
        self.size = query.shape[0]
        self.batch = build.dim("b", self.size, kind, op)
        self.heads = build.dim("h", key.shape[heads], kind, op)
        self.grouped = self.heads + build.whole(query.shape[heads] // key.shape[heads], "g")
        self.seq, self.keys = build.whole(query.shape[seq], "t"), build.whole(key.shape[seq], "s")
        self.features, self.value_features = build.whole(key.shape[3], "d"), build.whole(value.shape[3], "d")
        paged = key.shape[0] != self.size  # all sequences share one pool of pages, which has no batch dimension
        self.key_batch = build.whole(key.shape[0]) if paged else self.batch

    def array(self, batch: Dim, heads: Dim, seq: Dim, features: Dim) -> Dims:
        """Returns these dimensions in the order of the layout."""
        return (batch, heads, seq, features) if self.layout == _HEADS_FIRST else (batch, seq, heads, features)

    @property
    def operands(self) -> list[Dims]:
        """The dimensions of query, key and value."""
        query = self.array(self.batch, self.grouped, self.seq, self.features)
        return [
            query,
            self.array(self.key_batch, self.heads, self.keys, self.features),
            self.array(self.key_batch, self.heads, self.keys, self.value_features),
        ]

    @property
    def result(self) -> Dims:
        """The dimensions of the result."""
        return self.array(self.batch, self.grouped, self.seq, self.value_features)

    def statistics(self, segments: int = 1) -> Dims:
        """Returns the dimensions of the statistics: one number for each softmax row, per segment if packed."""
        return (self.batch + self.build.whole(segments), self.grouped, self.seq)

    def bias(self, bias: Any) -> Dims:
        """Returns the dimensions of the bias: broadcast where its size is 1; if there is no bias, it is empty."""
        if len(bias.shape) != 4:
            return tuple(map(self.build.whole, bias.shape))
        full = (self.batch, self.grouped, self.seq, self.keys)
        return tuple(dim if n > 1 else () for n, dim in zip(bias.shape, full, strict=True))

    def by_row(self, array: Any) -> Dims:
        """Returns the dimensions of lengths, offsets and page tables: a row for each sequence, or empty if unused."""
        first, *rest = array.shape
        return (self.batch if first == self.size else self.build.whole(first), *map(self.build.whole, rest))


def _segments(q_offsets: Any) -> int:
    return q_offsets.shape[1] - 1 if len(q_offsets.shape) == 2 else 1


def _is_shardable(q_offsets: Any, dropout_rate: float) -> bool:
    """Whether batch and heads can be sharded: not for packed sequences, nor with dropout, which depends on position."""
    return _segments(q_offsets) == 1 and not dropout_rate


@rule(*primitives("dot_product_attention_fwd", "dot_product_attention_fwd_wrapper"))
def attention(
    query: Any, key: Any, value: Any, bias: Any, *rows: Any,
    layout: int, dropout_rate: float, is_training: bool, **_: Any,
) -> Rule:  # fmt: skip
    """``b t (h g) d, b s h d, b s h d1, w, w1, w2, w3, w4, w5, w6 -> b t (h g) d1;
    whole t g d s d1 w w1 w2 w3 w4 w5 w6``: batch and heads pass.

    https://docs.jax.dev/en/latest/_autosummary/jax.nn.dot_product_attention.html
    """  # noqa: D205  the map takes two lines
    offsets = rows[2]
    dims = _AttentionDims(query, key, value, layout, "pass" if _is_shardable(offsets, dropout_rate) else "whole")
    results = [dims.result, *([dims.statistics(_segments(offsets))] if is_training else [])]
    return dims.build.rule([*dims.operands, dims.bias(bias), *map(dims.by_row, rows)], results)


@rule(*primitives("dot_product_attention_bwd", "dot_product_attention_bwd_wrapper"))
def attention_gradient(
    query: Any, key: Any, value: Any, bias: Any, *others: Any,
    layout: int, dropout_rate: float, variadic_args: Sequence[bool], **_: Any,
) -> Rule:  # fmt: skip
    """``b t (h g) d, b s h d, b s h d1, w, w1, w2, w3, w4, w5, w6, b (h g) t, b t (h g) d1, b t (h g) d1 ->
    b t (h g) d, b s h d, b s h d1; whole t g d s d1 w w1 w2 w3 w4 w5 w6; linear 12``: batch and heads pass.

    The gradient of a broadcast bias is a partial sum over the dimensions that it is broadcast along.

    https://docs.jax.dev/en/latest/_autosummary/jax.nn.dot_product_attention.html
    """  # noqa: D205  the map takes two lines
    *rows, _statistics, _forward, _cotangent = others
    offsets, has_bias_gradient = rows[2], variadic_args[1]
    if not _is_shardable(offsets, dropout_rate):
        dims = _AttentionDims(query, key, value, layout, "whole")
    else:
        dims = _AttentionDims(query, key, value, layout, *(("reduce", "sum") if has_bias_gradient else ("pass", None)))
    q, k, v = dims.operands
    bias_dims = dims.bias(bias)
    statistics = dims.statistics(_segments(offsets))
    operands = [q, k, v, bias_dims, *map(dims.by_row, rows), statistics, dims.result, dims.result]
    return dims.build.rule(operands, [q, k, v, *([bias_dims] if has_bias_gradient else [])], ((len(operands) - 1,),))


@rule(*primitives("dot_product_attention_fp8_fwd", "dot_product_attention_fp8_fwd_wrapper"))
def fp8_attention(query: Any, key: Any, value: Any, *scales: Any, layout: int, is_training: bool, **_: Any) -> Rule:
    """``b t (h g) d, b s h d, b s h d1, 1, 1, 1, 1, 1, 1 -> b t (h g) d1, 1 1 1 1, 1 1 1 1, b (h g) t;
    reduce b:max h:max; whole t g d s d1``: attention in fp8, and the largest scores and results of a shard.

    https://docs.jax.dev/en/latest/_autosummary/jax.nn.dot_product_attention.html
    """  # noqa: D205  the map takes two lines
    dims = _AttentionDims(query, key, value, layout, "reduce", "max")
    largest = [((),) * 4] * 2
    results = [dims.result, *largest, *([dims.statistics()] if is_training else [])]
    return dims.build.rule([*dims.operands, *_ones(scales)], results)


@rule(*primitives("dot_product_attention_fp8_bwd", "dot_product_attention_fp8_bwd_wrapper"))
def fp8_attention_gradient(
    query: Any, key: Any, value: Any, forward: Any, cotangent: Any, statistics: Any, *scales: Any, layout: int, **_: Any
) -> Rule:
    """``b t (h g) d, b s h d, b s h d1, b t (h g) d1, b t (h g) d1, b (h g) t, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 ->
    b t (h g) d, b s h d, b s h d1, 1 1 1 1, 1 1 1 1, 1 1 1 1, 1 1 1 1; reduce b:max h:max; whole t g d s d1``: the
    gradient of attention in fp8, and the largest elements of each result.

    https://docs.jax.dev/en/latest/_autosummary/jax.nn.dot_product_attention.html
    """  # noqa: D205  the map takes two lines
    dims = _AttentionDims(query, key, value, layout, "reduce", "max")
    q, k, v = dims.operands
    operands = [q, k, v, dims.result, dims.result, dims.statistics(), *_ones(scales)]
    return dims.build.rule(operands, [q, k, v, *[((),) * 4] * 4])


def _ones(scales: Sequence[Any]) -> list[Dims]:
    """Returns the dimensions of arrays with one element, of any rank."""
    return [((),) * len(scale.shape) for scale in scales]


def kernel_flops(name: str, operands: Sequence[Any], params: Mapping[str, Any]) -> float:
    """Returns the floating-point operations of a kernel's matrix products; 0 for any other primitive.

    Forward attention has two products over pairs of a query and a key. Its gradient has five, one of which recomputes
    the scores. A causal mask halves the pairs; a sliding window keeps only those inside it.

    Args:
        name: the primitive's name.
        operands: anything with a `shape`, one for each operand.
        params: the equation's parameters.
    """
    if name.startswith("scaled_matmul"):
        x, y = operands[:2]
        return 2.0 * x.shape[0] * x.shape[1] * y.shape[1] * x.shape[2]
    if not name.startswith("dot_product_attention"):
        return 0.0
    query, key, value = operands[:3]
    heads, seq = (1, 2) if params["layout"] == _HEADS_FIRST else (2, 1)
    length, keys = query.shape[seq], key.shape[seq]
    mask = params.get("mask_type", _CAUSAL if params.get("use_causal_mask") else 0)
    attended = keys / 2 if getattr(mask, "value", mask) in (_CAUSAL, _PADDED_CAUSAL) else keys  # keys for each query
    attended = min(attended, params.get("sliding_window_length") or attended)
    key_products, value_products = (3, 2) if "_bwd" in name else (1, 1)
    return (
        2.0
        * query.shape[0]
        * query.shape[heads]
        * length
        * attended
        * (key_products * query.shape[3] + value_products * value.shape[3])
    )
