"""Operators on windows that slide over dimensions, such as pooling."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from jax import lax

from autoshard._compat import primitive, primitives
from autoshard.spmdrules.core.registry import rule
from autoshard.spmdrules.core.rule import Dims, Rule
from autoshard.spmdrules.core.rule_builder import Dim, RuleBuilder


def window_count(
    size: int, window: int, stride: int = 1, padding: Sequence[int] = (0, 0), base: int = 1, dilation: int = 1
) -> int:
    """Returns how many windows fit into a dimension of `size`, which is the size of the result."""
    padded = ((size - 1) * base + 1 if size else 0) + sum(padding)
    extent = (window - 1) * dilation + 1
    return 0 if padded < extent else (padded - extent) // stride + 1


def window_dims(
    build: RuleBuilder,
    size: int,
    window: int,
    stride: int,
    padding: Sequence[int],
    base: int,
    dilation: int,
    stem: str = "w",
) -> tuple[Dim, Dim, Dim]:
    """Returns the dimension that windows slide over, the window's own dimension, and the result's dimension.

    The dimension passes if it splits into equal blocks such that no window reads elements of two blocks: patches,
    ``(t x) -> t``, and their gradient, ``t -> (t x)``. Otherwise it is whole.

    Args:
        build: names the factors.
        size: the size of the dimension.
        window: the size of a window.
        stride: the distance between windows, in elements of the dilated dimension.
        padding: elements added before and after.
        base: the dilation of the dimension.
        dilation: the dilation of the window.
        stem: the name of the dimension's factor if it is whole.
    """
    counted = window_count(size, window, stride, padding, base, dilation)
    block = math.lcm(stride, base)  # the size of a block, in elements of the dilated dimension
    elements, windows = block // base, block // stride
    starts = [step * stride - padding[0] for step in range(windows)]
    if size * base != counted * stride or not size or not _stays_in_block(starts, window, dilation, block, base):
        return build.whole(size, stem), build.whole(window, "x"), build.whole(counted, "t")
    blocks = build.next(size) if elements == windows else build.dim("t", size // elements)
    inner_elements, inner_windows = build.whole(elements, "x"), build.whole(windows, "x")
    patches = (window, dilation, base, padding[0]) == (elements, 1, 1, 0)
    return blocks + inner_elements, inner_elements if patches else build.whole(window, "x"), blocks + inner_windows


def _stays_in_block(starts: Iterable[int], window: int, dilation: int, end: int, base: int) -> bool:
    """Whether windows that begin at `starts` read only elements at positions from 0 to below `end`.

    Elements are at the multiples of `base`; the positions between them are empty.
    """
    read = (start + step * dilation for start in starts for step in range(window))
    return all(0 <= position < end for position in read if position % base == 0)


def _windows(
    shape: Sequence[int],
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[Sequence[int]],
    base_dilation: Sequence[int] | None = None,
    window_dilation: Sequence[int] | None = None,
) -> tuple[RuleBuilder, Dims, Dims]:
    """Returns a builder, the dimensions that the windows slide over, and those that count the windows."""
    ones = (1,) * len(shape)
    build = RuleBuilder()
    slid = [
        window_dims(build, *each)
        for each in zip(
            shape, window_dimensions, window_strides, padding, base_dilation or ones, window_dilation or ones,
            strict=True,
        )
    ]  # fmt: skip
    return build, tuple(full for full, _, _ in slid), tuple(counted for _, _, counted in slid)


@rule(primitive("reduce_window_sum"))
def reduce_window_sum(x: Any, **params: Any) -> Rule:
    """``a w b -> a t b; whole w t; linear 0``: sums over windows.

    https://openxla.org/stablehlo/spec#reduce_window
    """
    build, dims, counted = _windows(x.shape, **params)
    return build.rule([dims], [counted], ((0,),))


@rule(*primitives("reduce_window_max", "reduce_window_min"))
def reduce_window_extreme(x: Any, **params: Any) -> Rule:
    """``a w b -> a t b; whole w t``: the largest or smallest element of each window.

    https://openxla.org/stablehlo/spec#reduce_window
    """
    build, dims, counted = _windows(x.shape, **params)
    return build.rule([dims], [counted])


@rule(lax.reduce_window_p)
def reduce_window(*avals: Any, jaxpr: Any = None, consts: Any = (), **params: Any) -> Rule:
    """``a w b, [] -> a t b; whole w t``: reductions of windows by a user-defined function.

    https://openxla.org/stablehlo/spec#reduce_window
    """
    arrays = len(avals) // 2
    build, dims, counted = _windows(avals[0].shape, **params)
    return build.rule([dims] * arrays + [()] * arrays, [counted] * arrays)


@rule(primitive("select_and_scatter"))
def select_and_scatter(
    operand: Any,
    source: Any,
    init: Any,
    *,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[Sequence[int]],
    **_: Any,
) -> Rule:
    """``a w b, a t b, [] -> a w b; whole w t``: each window selects an element, which gets the window's source value.

    Source values for the same element are combined by a user-defined function.

    https://openxla.org/stablehlo/spec#select_and_scatter
    """
    build, dims, counted = _windows(operand.shape, window_dimensions, window_strides, padding)
    return build.rule([dims, counted, ()], [dims])


@rule(primitive("select_and_scatter_add"))
def select_and_scatter_add(source: Any, operand: Any, *, select_prim: Any = None, **params: Any) -> Rule:
    """``a t b, a w b -> a w b; whole t w; linear 0``: the gradient of max pooling.

    https://openxla.org/stablehlo/spec#select_and_scatter
    """
    build, dims, counted = _windows(operand.shape, **params)
    return build.rule([counted, dims], [dims], ((0,),))


@rule(primitive("select_and_gather_add"))
def select_and_gather_add(tangents: Any, operand: Any, *, select_prim: Any = None, **params: Any) -> Rule:
    """``a w b, a w b -> a t b; whole w t; linear 0``: the tangent of max pooling.

    https://openxla.org/stablehlo/spec#select_and_scatter
    """
    build, dims, counted = _windows(operand.shape, **params)
    return build.rule([dims, dims], [counted], ((0,),))
