"""A function under examination: its arrays, its types, sets of values and what it makes of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard import _compat
from autoshard.errors import AutoshardError
from autoshard.sharding.discover.value_sets import rounded, value_sets
from autoshard.sharding.oracle.cases import brief, example, plain, typed
from autoshard.sharding.oracle.missing_strategies import tells
from autoshard.sharding.oracle.probe_values import difference, relative_error
from autoshard.sharding.oracle.shard_runner import QUICK

_ROUNDINGS = 8  # of the operands: a difference that these make is none
_MOST_SLACK = 0.01


class DiscoveryError(AutoshardError):
    """A function that nothing can be learned of."""


class Refused(DiscoveryError):
    """The function does not take some operands; the cause is what it raised."""


@contextlib.contextmanager
def asked() -> Iterator[None]:
    """Around a call of the function. It is the user's, so whatever it raises is its answer to these operands.

    Raises:
        Refused: in place of any error.
    """
    try:
        yield
    except Exception as error:  # the user's function may raise anything, and does so to refuse
        raise Refused(brief(error)) from error


@dataclass(frozen=True, eq=False)
class Sample:
    """A set of operands, the results on them, and the relative error in each that is rounding."""

    operands: list[np.ndarray]
    whole: list[np.ndarray]
    slack: tuple[float, ...]

    @property
    def loudness(self) -> float:
        """The largest error that is rounding."""
        return max(self.slack, default=0.0)


class Subject:
    """A function of arrays under examination, with the sets of values and its results on them."""

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any]):
        self.name = getattr(fn, "__name__", type(fn).__name__)
        leaves, tree = jax.tree.flatten(tuple(args))
        self.places = [i for i, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")]
        if not self.places:
            raise DiscoveryError(
                f"discover({self.name}): it has no array arguments. Give arrays or jax.ShapeDtypeStructs; what is "
                "neither stays as it is."
            )
        given = [not isinstance(leaves[i], jax.ShapeDtypeStruct) for i in self.places]
        self.examples = [jnp.asarray(example(leaves[i])) for i in self.places]
        self.shapes = [tuple(x.shape) for x in self.examples]

        def flat(*arrays: Any) -> list[Any]:
            whole = list(leaves)
            for i, x in zip(self.places, arrays, strict=True):
                whole[i] = x
            return [jnp.asarray(x) for x in jax.tree.leaves(fn(*tree.unflatten(whole)))]

        self.fn = flat
        self.compiled = jax.jit(flat, compiler_options=QUICK)
        self.results, self.steady = self._traced()
        boolean = any(x.dtype == np.bool_ for x in (*self.examples, *self.results))  # which say little
        sets = value_sets(self.examples, given, 2 if boolean else 1)
        self.drawn = len(sets)
        self.samples = self._told(sets)

    def _traced(self) -> tuple[list[Any], list[bool]]:
        """The results' types, and which of them depend on no operand."""
        try:
            with asked():
                closed = jax.make_jaxpr(self.fn)(*self.examples)
        except Refused as error:
            raise DiscoveryError(
                f"discover({self.name}): it cannot be traced with the whole arguments: {error}. It must be a "
                "function that jax.jit takes; code of the host stands in a jax.pure_callback."
            ) from error.__cause__
        jaxpr = _compat.open_jaxpr(closed)
        if not jaxpr.outvars:
            raise DiscoveryError(f"discover({self.name}): it returns no arrays, so that nothing can be compared.")
        moved = set(jaxpr.invars)
        for eqn in jaxpr.eqns:
            if any(not isinstance(v, _compat.Literal) and v in moved for v in eqn.invars):
                moved.update(eqn.outvars)
        results = [v.aval for v in jaxpr.outvars]
        return results, [isinstance(v, _compat.Literal) or v not in moved for v in jaxpr.outvars]

    def _told(self, sets: list[list[np.ndarray]]) -> list[Sample]:
        """The sets of values on which the function runs and says something."""
        kept: list[Sample] = []
        failed = None
        for operands in sets:
            try:
                sample = self.sample(operands)
            except Refused as error:
                failed = failed or error
                continue
            if not kept:
                self._check_repeats(sample)
            if tells([x for x, steady in zip(sample.whole, self.steady, strict=True) if not steady] or sample.whole):
                kept.append(sample)
        if failed is not None and not kept:
            raise DiscoveryError(f"discover({self.name}): it fails on whole arguments: {failed}") from failed.__cause__
        return kept

    def sample(self, operands: list[np.ndarray]) -> Sample:
        """A set of operands with its results."""
        whole, near = self.run(operands), self.run(rounded(operands))
        pairs = zip(whole, near, strict=True)
        noise = [relative_error(a, b) if jnp.issubdtype(a.dtype, jnp.inexact) else 0.0 for a, b in pairs]
        return Sample(operands, whole, tuple(min(_ROUNDINGS * n, _MOST_SLACK) for n in noise))

    def _check_repeats(self, sample: Sample) -> None:
        """Runs it again, and once traced anew: what the host draws while tracing is a constant in each trace."""
        again = jax.jit(lambda *arrays: self.fn(*arrays), compiler_options=QUICK)
        for other in (self.run(sample.operands), self.run(sample.operands, again)):
            for r, (a, b) in enumerate(zip(sample.whole, other, strict=True)):
                if wrong := difference(a, b) and difference(a, b, sample.slack[r]):
                    raise DiscoveryError(
                        f"discover({self.name}): two runs on the same values differ in result {r} ({wrong}), so that "
                        "nothing can be learned from comparing runs. Make what it draws or counts an argument."
                    )

    def run(self, operands: Sequence[np.ndarray], compiled: Any = None) -> list[np.ndarray]:
        """The results on these operands, all of them plain arrays (see `plain`).

        Raises:
            Refused: it does not take them.
        """
        arrays = [typed(x, like) for x, like in zip(operands, self.examples, strict=True)]
        with asked():
            return [plain(x) for x in (compiled or self.compiled)(*arrays)]

    def shapes_of(self, operands: Sequence[Any]) -> Sequence[Any]:
        """The results' shapes and types for operands of these.

        Raises:
            Refused: it does not take them.
        """
        with asked():
            return jax.eval_shape(self.compiled, *operands)

    def stays(self, result: int) -> bool:
        """Whether a result is the same on all sets of values."""
        first, *others = (sample.whole[result] for sample in self.samples)
        return all(np.array_equal(first, other, equal_nan=first.dtype.kind == "f") for other in others)
