"""Reads scale, cap and mask of a recognised attention, and proves that a kernel computes the same.

The scores' function is read by evaluation: of two keys with the raw scores x and 0, the weights have the ratio
exp(g(x) - g(0)), so `scale = g(1)` without a cap, and `cap = g(large)` where that is finite. Then the forward pass, and
the backward pass composed with it across the residuals, are evaluated on small arrays in float64 and compared with the
reference, which is written out here: the result and the gradients of q, k and v.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard._shown import shown
from autoshard.kernels.blockwise_attention import Softmax
from autoshard.kernels.visibility import Visibility
from autoshard.sharding.rewrite.attention_forward import Candidate
from autoshard.sharding.rewrite.attention_gradient import Gradients
from autoshard.sharding.rewrite.attention_roles import Fold, Roles, mask_dims, roles_of
from autoshard.sharding.rewrite.constants import LARGE_SCORE, PROBE_SCALES, PROOF_TOLERANCE
from autoshard.sharding.rewrite.numpy_operators import wide
from autoshard.sharding.rewrite.shrinking import SmallShapes
from autoshard.sharding.rewrite.slices import Refused, Slice, cut_out
from autoshard.sharding.rewrite.static_masks import StaticArray, static_array
from autoshard.sharding.rewrite.values import Value


@shown
@dataclass(frozen=True, eq=False)
class Proof:
    """That a kernel computes what a matched region does.

    Attributes:
        softmax: the static part of the kernel's call.
        differences: what was compared -> the largest relative difference, in float64.
    """

    softmax: Softmax
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
        proof: the proof.
    """

    found: Candidate
    out: Value
    forward: Slice
    gradients: Gradients | None
    folds: Mapping[str, Fold]
    proof: Proof


class Region:
    """One matched region with its axes, static arrays and roles."""

    def __init__(self, found: Candidate, out: Value, forward: Slice, gradients: Gradients | None):
        self.found, self.out, self.forward, self.gradients = found, out, forward, gradients
        inner = [*forward.inner, *(gradients.slice.inner if gradients else [])]
        self.inner = sorted(dict.fromkeys(inner), key=lambda v: v.number)
        static: list[Value] = list(dict.fromkeys([*forward.static, *(gradients.slice.static if gradients else [])]))
        self.shapes = SmallShapes(self.inner, static)
        self.masks = [v for v in static if v.aval.size > 1]
        self.roles: Roles = roles_of(found, self.shapes, self.masks)
        self.static: dict[Value, StaticArray] = {
            v: static_array(v, *(mask_dims(self.roles, self.shapes, v) if v.aval.size > 1 else (None, None)))
            for v in static
        }
        kinds = {"q": (found.q, "q"), "k": (found.k, "k"), "v": (found.v, "v"), "out": (out, "out")}
        if gradients:
            kinds |= {"d_out": (gradients.d_out, "out"), "d_q": (gradients.d_q, "q"), "d_k": (gradients.d_k, "k"),
                      "d_v": (gradients.d_v, "v")}  # fmt: skip
        self.arrays: dict[str, Value] = {name: value for name, (value, _) in kinds.items() if value is not None}
        self.folds = {name: self.roles.fold_of(self.shapes, v, kinds[name][1]) for name, v in self.arrays.items()}

        if self.visibility != Visibility():
            self._equal_small_sizes()

    def _equal_small_sizes(self) -> None:
        """Give queries and keys the same small size: in a window, each query has to see a key."""
        sides = [role[0] for role in (self.roles.queries, self.roles.keys)]
        if any(len(axes) != 1 for axes in sides):
            raise Refused("the keys cannot be told apart from other dimensions")
        size = max(self.shapes.small[axes[0]] for axes in sides)
        self.shapes.small |= {axes[0]: size for axes in sides}

    @property
    def visibility(self) -> Visibility:
        """Which keys a query sees.

        Raises:
            Refused: the masks differ.
        """
        found = {one.visibility for one in self.static.values() if one.hidden is not None}
        if len(found) > 1:
            raise Refused("it has several masks that differ")
        return next(iter(found), Visibility())

    def small_static(self, visibility: Visibility | None) -> dict[Value, Any]:
        """Return the static arrays in small shapes, with another mask; None hides nothing."""
        made = {}
        for value, one in self.static.items():
            shape = self.shapes.shape(value)
            if one.hidden is None or visibility is None:
                made[value] = wide(np.full(shape, one.shown))
                continue
            query, key = mask_dims(self.roles, self.shapes, value)
            index = [
                np.arange(n).reshape([-1 if d == e else 1 for e in range(len(shape))]) for d, n in enumerate(shape)
            ]
            zero = np.zeros((1,) * len(shape), int)
            seen = visibility(zero if query is None else index[query], zero if key is None else index[key])
            made[value] = wide(np.broadcast_to(np.where(seen, one.shown, one.hidden), shape))
        return made

    def small(self, value: Value, rng: np.random.Generator, scale: float) -> np.ndarray:
        """Return random numbers in the small shape of a value."""
        return rng.standard_normal(self.shapes.shape(value)) * scale

    def softmax(self) -> Softmax:
        """Read scale, cap and mask.

        Raises:
            Refused: the weights are not a softmax of the scores, or no kernel has the mask.
        """
        visibility, found = self.visibility, self.found
        inner = cut_out([found.weights], [found.scores]).inner
        static = self.small_static(None)
        shape, dim = self.shapes.shape(found.scores), self._key_dim(found.scores)
        first = tuple(slice(0, 1) if d == dim else slice(None) for d in range(len(shape)))
        weight_dim = self._key_dim(found.weights)

        def log_ratio(x: float) -> float:
            raw = np.zeros(shape)
            raw[first] = x
            weights = self.shapes.evaluate(inner, {found.scores: raw, **static})[found.weights]
            return float(np.ravel(_log(np.take(weights, 0, weight_dim)) - _log(np.take(weights, 1, weight_dim)))[0])

        one, large = log_ratio(1.0), log_ratio(LARGE_SCORE)
        cap = large if math.isfinite(large) else None
        scale = one if cap is None else cap * math.atanh(one / cap) if abs(one) < abs(cap) else math.nan
        if not math.isfinite(scale) or scale <= 0:
            raise Refused("the weights are not a softmax of the scores over the keys")
        return Softmax(visibility, _rounded(scale), None if cap is None else _rounded(cap))

    def _key_dim(self, value: Value) -> int:
        axes = self.shapes.axes[value]
        if self.roles.keys[0] not in axes:
            raise Refused("the keys cannot be told apart from other dimensions")
        return axes.index(self.roles.keys[0])


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
    softmax = region.softmax()
    seen = softmax.visibility
    # The region depends on positions only through its masks, so a short window stands for one of any length.
    proxy = Visibility(seen.causal, 2 if seen.window is not None else None)
    static = region.small_static(proxy)
    names = [name for name in ("q", "k", "v", "d_out") if name in region.arrays]
    compared = [name for name in region.arrays if name not in names]
    if min(region.shapes.small[a] for role in (region.roles.queries, region.roles.keys) for a in role[0]) < 2:
        raise Refused("there is one query or one key, so nothing can be proven")
    operands = list(dict.fromkeys(region.arrays[name] for name in names))  # keys may be the values too

    worst = dict.fromkeys(compared, 0.0)
    rng = np.random.default_rng(0)
    for scale in PROBE_SCALES:
        small = {value: region.small(value, rng, scale) for value in operands}
        env = region.shapes.evaluate(region.inner, {**small, **static})
        expected = _reference(softmax, proxy, **{n: region.folds[n].fold(small[region.arrays[n]], np) for n in names})
        for name in compared:
            x, y = region.folds[name].fold(env[region.arrays[name]], np), expected[name]
            difference = float(np.max(np.abs(x - y)) / (np.max(np.abs(y)) + 1e-30)) if x.shape == y.shape else math.inf
            worst[name] = max(worst[name], difference if math.isfinite(difference) else math.inf)
    if wrong := [f"{name} by {worst[name]:.1e}" for name in compared if worst[name] > PROOF_TOLERANCE]:
        raise Refused(f"the proof failed: on small arrays the program differs from attention in {', '.join(wrong)}")
    return Proof(softmax, worst)


def _reference(
    softmax: Softmax, visibility: Visibility, q: np.ndarray, k: np.ndarray, v: np.ndarray, d_out: Any = None
) -> dict[str, np.ndarray]:
    """Attention and its gradients by definition, in the kernel's order of dimensions."""
    raw = np.einsum("bskgd,btkd->bkgst", q, k) * softmax.scale
    scores, slope = raw, np.full_like(raw, softmax.scale)
    if softmax.soft_cap is not None:
        scores = softmax.soft_cap * np.tanh(raw / softmax.soft_cap)
        slope = softmax.scale * (1.0 - np.square(scores / softmax.soft_cap))
    seen = visibility(np.arange(q.shape[1])[:, None], np.arange(k.shape[1])[None])
    weights = np.where(seen, np.exp(np.where(seen, scores, -np.inf) - np.max(scores, axis=-1, keepdims=True)), 0.0)
    weights /= np.sum(weights, axis=-1, keepdims=True)
    out = np.einsum("bkgst,btke->bskge", weights, v)
    if d_out is None:
        return {"out": out}
    d_weights = np.einsum("bskge,btke->bkgst", d_out, v)
    d_scores = weights * (d_weights - np.sum(weights * d_weights, axis=-1, keepdims=True)) * slope
    return {
        "out": out,
        "d_q": np.einsum("bkgst,btkd->bskgd", d_scores, k),
        "d_k": np.einsum("bkgst,bskgd->btkd", d_scores, q),
        "d_v": np.einsum("bkgst,bskge->btke", weights, d_out),
    }
