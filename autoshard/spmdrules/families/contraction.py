"""Contractions: matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax

from autoshard._compat import primitive
from autoshard.spmdrules.core.registry import rule
from autoshard.spmdrules.core.rule import Dims, Rule, Shard
from autoshard.spmdrules.core.rule_builder import Dim, RuleBuilder, drops_sharding, without_sharding
from autoshard.spmdrules.families.window import window_dims

EITHER = ((0,), (1,))


@rule(lax.dot_general_p)
def dot_general(x: Any, y: Any, *, dimension_numbers: Any, out_sharding: Any = None, **_: Any) -> Rule:
    """``b m k, b k n -> b m n; reduce k; linear 0; linear 1``: batched matrix products.

    https://openxla.org/stablehlo/spec#dot_general
    """
    (x_contract, y_contract), (x_batch, y_batch) = dimension_numbers
    build = RuleBuilder()
    batch = [build.dim("b", x.shape[d]) for d in x_batch]
    summed = [build.dim("k", x.shape[d], "reduce", "sum") for d in x_contract]
    lhs, x_free = place_dims(build, "m", x.shape, [(x_batch, batch), (x_contract, summed)])
    rhs, y_free = place_dims(build, "n", y.shape, [(y_batch, batch), (y_contract, summed)])
    return build.rule([lhs, rhs], [(*batch, *x_free, *y_free)], EITHER, local=drops_sharding(out_sharding))


def place_dims(
    build: RuleBuilder, stem: str, shape: Sequence[int], placed: Sequence[tuple[Sequence[int], Sequence[Dim]]]
) -> tuple[Dims, list[Dim]]:
    """Returns all dimensions of an operand, and the newly created ones.

    Args:
        build: names the factors.
        stem: the name of a created dimension.
        shape: the operand's shape.
        placed: pairs (positions, dimensions) of the dimensions that are given; all others are created.
    """
    known = {d: dim for where, dims in placed for d, dim in zip(where, dims, strict=True)}
    free = {d: build.dim(stem, size) for d, size in enumerate(shape) if d not in known}
    return tuple(known[d] if d in known else free[d] for d in range(len(shape))), list(free.values())


@rule(primitive("scaled_dot"))
def scaled_dot(x: Any, y: Any, x_scale: Any, y_scale: Any, *, dimension_numbers: Any, **_: Any) -> Rule:
    """``b m (k x), b (k x) n, b m k, b k n -> b m n; reduce k x``: block-scaled matrix products in narrow types.

    A contracted dimension consists of blocks, each with its own scale; a single scale means one block.

    https://docs.jax.dev/en/latest/_autosummary/jax.lax.scaled_dot.html
    """
    (x_contract, y_contract), (x_batch, y_batch) = dimension_numbers
    build = RuleBuilder()
    batch = [build.dim("b", x.shape[d]) for d in x_batch]
    blocks = [
        _blocks(build, x.shape[i], x_scale.shape[i], y_scale.shape[j])
        for i, j in zip(x_contract, y_contract, strict=True)
    ]
    lhs, x_free = place_dims(build, "m", x.shape, [(x_batch, batch), (x_contract, [full for full, _, _ in blocks])])
    rhs, y_free = place_dims(build, "n", y.shape, [(y_batch, batch), (y_contract, [full for full, _, _ in blocks])])
    x_scales = _replaced(lhs, dict(zip(x_contract, (first for _, first, _ in blocks), strict=True)))
    y_scales = _replaced(rhs, dict(zip(y_contract, (second for _, _, second in blocks), strict=True)))
    return build.rule([lhs, rhs, x_scales, y_scales], [(*batch, *x_free, *y_free)])


def _blocks(build: RuleBuilder, size: int, first: int, second: int) -> tuple[Dim, Dim, Dim]:
    """Returns a contracted dimension and the dimensions of its two scales, which have one element per block of it.

    Args:
        build: names the factors.
        size: the size of the contracted dimension.
        first: the number of blocks of the first scale.
        second: the number of blocks of the second scale.
    """
    few, many = sorted((first, second))
    if many % few:
        return build.whole(size), build.whole(first), build.whole(second)
    outer = build.dim("k", few, "reduce", "sum")
    inner = outer + build.dim("k", many // few, "reduce", "sum")
    full = inner + build.dim("x", size // many, "reduce", "sum")
    return full, outer if first == few else inner, outer if second == few else inner


def _replaced(dims: Dims, others: Mapping[int, Dim]) -> Dims:
    return tuple(others.get(d, dim) for d, dim in enumerate(dims))


@rule(lax.conv_general_dilated_p)
def conv_general_dilated(
    x: Any,
    kernel: Any,
    *,
    dimension_numbers: Any,
    window_strides: Sequence[int],
    padding: Sequence[Sequence[int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    out_sharding: Any = None,
    **_: Any,
) -> Rule:
    """``n c s, o c x -> n o t; reduce c; whole s x t; linear 0; linear 1``: convolutions.

    With feature groups it is ``n (g c) s, (g o) c x -> n (g o) t``, with batch groups
    ``(g n) c s, (g o) c x -> n (g o) t``. Spatial dimensions are whole, with these exceptions:

    - patches that do not overlap: ``n c (t x), o c x -> n o t``
    - the gradient of such patches: ``n c t, o c x1 -> n o (t x)``
    - a kernel as large as the image: ``n c r, o c r -> n o 1; reduce r``
    - a dilated kernel with one element for each patch: ``n c (r x), o c r -> n o x; reduce r``

    https://openxla.org/stablehlo/spec#convolution
    """
    lhs, rhs, out = dimension_numbers
    build = RuleBuilder()
    features, batches = feature_group_count, batch_group_count
    group = build.dim("g", max(features, batches))
    n = build.dim("n", x.shape[lhs[0]] // batches)
    c = build.dim("c", kernel.shape[rhs[1]], "reduce", "sum")
    o = build.dim("o", kernel.shape[rhs[0]] // max(features, batches))
    in_batch, in_feature = (group + n, c) if batches > 1 else (n, group + c)
    spatial = [
        _spatial(build, x.shape[d], kernel.shape[k], *slid)
        for d, k, *slid in zip(lhs[2:], rhs[2:], window_strides, padding, lhs_dilation, rhs_dilation, strict=True)
    ]
    x_dims = _arrange(lhs, [in_batch, in_feature, *(s[0] for s in spatial)])
    kernel_dims = _arrange(rhs, [group + o, c, *(s[1] for s in spatial)])
    result = _arrange(out, [n, group + o, *(s[2] for s in spatial)])

    def local(params: Mapping[str, Any], shard: Shard) -> Mapping[str, Any]:
        count = shard.count(group[0]) if group else 1
        return {
            **without_sharding(params, shard),
            "feature_group_count": features // count if features > 1 else 1,
            "batch_group_count": batches // count if batches > 1 else 1,
        }

    needs_local = group or out_sharding is not None
    return build.rule([x_dims, kernel_dims], [result], EITHER, local=local if needs_local else None)


def _spatial(
    build: RuleBuilder, size: int, window: int, stride: int, padding: Sequence[int], base: int, dilation: int
) -> tuple[Dim, Dim, Dim]:
    """Returns a spatial dimension of the image, of the kernel and of the result.

    The dimension is reduced if the kernel is as large as the image, or if it has one element for each patch (the
    gradient of a convolution over patches).
    """
    if window > 1 and window * dilation == size and (*padding, base) == (0, 0, 1) and (stride == 1 or dilation == 1):
        summed, rest = build.dim("r", window, "reduce", "sum"), build.whole(dilation, "x")
        return summed + rest, summed, rest
    return window_dims(build, size, window, stride, padding, base, dilation, stem="s")


def _arrange(spec: Sequence[int], dims: Sequence[Dim]) -> Dims:
    """Orders dimensions by a convolution's dimension numbers."""
    placed: list[Dim] = [()] * len(spec)
    for where, dim in zip(spec, dims, strict=True):
        placed[where] = dim
    return tuple(placed)
