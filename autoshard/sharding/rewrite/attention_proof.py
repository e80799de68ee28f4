"""Reads scale, cap and mask of a recognised attention, and proves that a kernel computes the same.

The scores' function is read by evaluation: of two keys with the raw scores x and 0, the weights have the ratio
exp(g(x) - g(0)), so `scale = g(1)` without a cap, and `cap = g(large)` where that is finite. Then the forward pass, and
the backward pass composed with it across the residuals, are evaluated on small arrays in float64 and compared with the
reference, which is written out here: the result and the gradients of q, k and v. The arrays of a mask are random. If
a row may see no key, some rows see none, and what the program computes there must be known too (`unseen_rows`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard._shown import shown
from autoshard.kernels.blockwise_attention import Softmax
from autoshard.kernels.two_passes import Kernel, Passes
from autoshard.kernels.unseen_rows import Unseen
from autoshard.kernels.visibility import Visibility
from autoshard.sharding.rewrite.attention_forward import Candidate
from autoshard.sharding.rewrite.attention_gradient import Gradients
from autoshard.sharding.rewrite.attention_region import Region, SmallRows
from autoshard.sharding.rewrite.attention_roles import Fold
from autoshard.sharding.rewrite.constants import LARGE_SCORE, MOST_DRAWS, PROBE_SCALES, PROOF_TOLERANCE
from autoshard.sharding.rewrite.masks.segment_ids import SegmentMask
from autoshard.sharding.rewrite.slices import Refused, Slice, cut_out
from autoshard.sharding.rewrite.values import Value


@shown
@dataclass(frozen=True, eq=False)
class Proof:
    """That a kernel computes what a matched region does.

    Attributes:
        softmax: the static part of the kernel's call.
        unseen: how rows without a visible key are computed.
        differences: what was compared -> the largest relative difference, in float64.
    """

    softmax: Softmax
    unseen: Unseen
    differences: Mapping[str, float]


@shown
@dataclass(frozen=True, eq=False)
class Attention:
    """A recognised attention whose replacement is proven.

    Attributes:
        found: where it is.
        out: its result.
        forward: what computes the result.
        gradients: its gradients, if the program has them.
        folds: name of an array -> how it is brought to the kernel's order.
        segments: the mask that is made of arrays, or None.
        proof: the proof.
    """

    found: Candidate
    out: Value
    forward: Slice
    gradients: Gradients | None
    folds: Mapping[str, Fold]
    segments: SegmentMask | None
    proof: Proof

    def passes(self, kernel: Kernel) -> Passes:
        """Return the static part of a kernel's two functions."""
        return Passes(kernel, self.proof.softmax, self.proof.unseen)


def softmax_of(region: Region) -> Softmax:
    """Read scale, cap and mask.

    Raises:
        Refused: the weights are not a softmax of the scores, or no kernel has the mask.
    """
    visibility, found, shapes = region.visibility, region.found, region.shapes
    part = cut_out([found.weights], [found.scores])
    between = {*region.evaluated} - {*region.inner}
    inner = sorted({*part.inner, *between}, key=lambda v: v.number)
    leaves = {**region.small_static(None), **region.small_tops(region.small_rows(None))}
    shape, dim = shapes.shape(found.scores), _key_dim(region, found.scores)
    first = tuple(slice(0, 1) if d == dim else slice(None) for d in range(len(shape)))
    weight_dim = _key_dim(region, found.weights)

    def log_ratio(x: float) -> float:
        raw = np.zeros(shape)
        raw[first] = x
        weights = shapes.evaluate(inner, {found.scores: raw, **leaves})[found.weights]
        one, other = (float(np.ravel(_log(np.take(weights, n, weight_dim)))[0]) for n in range(2))
        return one - other

    one, large = log_ratio(1.0), log_ratio(LARGE_SCORE)
    cap = large if math.isfinite(large) else None
    scale = one if cap is None else cap * math.atanh(one / cap) if abs(one) < abs(cap) else math.nan
    if not math.isfinite(scale) or scale <= 0:
        raise Refused("the weights are not a softmax of the scores over the keys")
    return Softmax(visibility, _rounded(scale), None if cap is None else _rounded(cap))


def _key_dim(region: Region, value: Value) -> int:
    axes = region.shapes.axes[value]
    if region.roles.keys[0] not in axes:
        raise Refused("the keys cannot be told apart from other dimensions")
    return axes.index(region.roles.keys[0])


def _log(x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.log(x)


def _rounded(x: float) -> float:
    return float(f"{x:.14g}")


def prove(region: Region) -> Proof:
    """Prove that the kernel's reference computes what a region does.

    Raises:
        Refused: it does not.
    """
    softmax = softmax_of(region)
    if min(region.shapes.small[a] for role in (region.roles.queries, region.roles.keys) for a in role[0]) < 2:
        raise Refused("there is one query or one key, so nothing can be proven")
    ways: tuple[Unseen, ...] = ("none",)
    if region.segments is not None and not region.segments.is_reflexive:
        ways = ("blocked", "passing")
    wrong = ""
    for unseen in ways:
        worst = _differences(region, softmax, unseen)
        failed = [f"{name} by {x:.1e}" for name, x in worst.items() if x > PROOF_TOLERANCE]
        if not failed:
            return Proof(softmax, unseen, worst)
        wrong = wrong or ", ".join(failed)
    rows = "" if ways == ("none",) else ". A row that sees no key must be the mean of all values, as with finfo.min"
    raise Refused(f"the proof failed: on small arrays the program differs from attention in {wrong}{rows}")


def _differences(region: Region, softmax: Softmax, unseen: Unseen) -> dict[str, float]:
    """Return the largest relative difference of each result on small arrays."""
    seen = softmax.visibility
    # The region depends on positions only through its masks, so a short window stands for one of any length.
    proxy = Visibility(seen.causal, 2 if seen.window is not None else None)
    static = region.small_static(proxy)
    names = [name for name in ("q", "k", "v", "d_out") if name in region.arrays]
    compared = [name for name in region.arrays if name not in names]
    operands = list(dict.fromkeys(region.arrays[name] for name in names))  # keys may be the values too
    worst = dict.fromkeys(compared, 0.0)
    rng = np.random.default_rng(0)
    for scale in PROBE_SCALES:
        small = {value: region.small(value, rng, scale) for value in operands}
        arrays = {name: region.folds[name].fold(small[region.arrays[name]], np) for name in names}
        for rows, visible in _masks(region, proxy, rng, some_unseen=unseen != "none"):
            env = region.shapes.evaluate(region.evaluated, {**small, **static, **region.small_tops(rows)})
            expected = _reference(softmax, unseen, visible, **arrays)
            for name in compared:
                x, y = region.folds[name].fold(env[region.arrays[name]], np), expected[name]
                difference = (
                    float(np.max(np.abs(x - y)) / (np.max(np.abs(y)) + 1e-30)) if x.shape == y.shape else math.inf
                )
                worst[name] = max(worst[name], difference if math.isfinite(difference) else math.inf)
    return worst


def _masks(
    region: Region, proxy: Visibility, rng: np.random.Generator, *, some_unseen: bool
) -> list[tuple[SmallRows, np.ndarray]]:
    """Draw the arrays of a mask; return them, and which pairs are visible, `[batch or 1, queries, keys]`.

    In one draw or another, some rows see a key, each term hides a key that all others let see, and, if `some_unseen`,
    some rows see no key.

    Raises:
        Refused: no such draws were found.
    """
    sizes = [region.shapes.small[role[0][0]] for role in (region.roles.queries, region.roles.keys)]
    by_position = proxy(np.arange(sizes[0])[:, None], np.arange(sizes[1])[None])[None]
    found: list[tuple[SmallRows, np.ndarray]] = []
    missing: set[Any] = {"seen", *(["unseen"] if some_unseen else [])}
    missing |= {*range(len(region.segments.terms) if region.segments is not None else 0)}
    for _ in range(MOST_DRAWS):
        rows = region.small_rows(rng)
        terms = region.seen(rows)
        visible = functools.reduce(np.logical_and, terms, by_position)
        sees = np.any(visible, axis=-1)
        if not (some_unseen or np.all(sees)):
            continue
        cases: set[Any] = {name for name, is_there in (("seen", sees), ("unseen", ~sees)) if np.any(is_there)}
        for n, term in enumerate(terms):
            others = functools.reduce(np.logical_and, (*terms[:n], *terms[n + 1 :]), by_position)
            cases |= {n} if np.any(others & ~term) else set()
        if missing & cases:
            found.append((rows, visible))
            missing -= cases
        if not missing:
            return found
    raise Refused("no small arrays were found for its mask, so nothing can be proven")


def _reference(
    softmax: Softmax, unseen: Unseen, visible: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray,
    d_out: Any = None,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Attention and its gradients by definition, in the kernel's order of dimensions."""
    raw = np.einsum("bskgd,btkd->bkgst", q, k) * softmax.scale
    scores, slope = raw, np.full_like(raw, softmax.scale)
    if softmax.soft_cap is not None:
        scores = softmax.soft_cap * np.tanh(raw / softmax.soft_cap)
        slope = softmax.scale * (1.0 - np.square(scores / softmax.soft_cap))
    seen = np.broadcast_to(visible[:, None, None], scores.shape)
    some = np.any(seen, axis=-1, keepdims=True)
    top = np.max(np.where(seen, scores, -np.inf), axis=-1, keepdims=True, initial=-1e300)
    weights = np.where(seen, np.exp(np.where(seen, scores - top, -np.inf)), 0.0)
    weights = np.where(some, weights / np.where(some, np.sum(weights, axis=-1, keepdims=True), 1.0), 1.0 / k.shape[1])
    out = np.einsum("bkgst,btke->bskge", weights, v)
    if d_out is None:
        return {"out": out}
    d_weights = np.einsum("bskge,btke->bkgst", d_out, v)
    slope = np.where(some, slope, softmax.scale if unseen == "passing" else 0.0)
    d_scores = weights * (d_weights - np.sum(weights * d_weights, axis=-1, keepdims=True)) * slope
    return {
        "out": out,
        "d_q": np.einsum("bkgst,btkd->bskgd", d_scores, k),
        "d_k": np.einsum("bkgst,bskgd->btkd", d_scores, q),
        "d_v": np.einsum("bkgst,bskge->btke", weights, d_out),
    }
