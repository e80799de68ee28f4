"""The function that `discover` examines, with its operands, its result types, and sample values with their results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard import _compat
from autoshard._shown import shown
from autoshard.errors import AutoshardError
from autoshard.sharding.discover.constants import MAX_SLACK, SLACK_FACTOR
from autoshard.sharding.discover.value_sets import rounded, value_sets
from autoshard.sharding.oracle.cases import error_summary, example, from_numpy, to_numpy
from autoshard.sharding.oracle.missing_strategies import is_informative
from autoshard.sharding.oracle.probe_values import difference, relative_error
from autoshard.sharding.oracle.shard_runner import FAST_COMPILE


class DiscoveryError(AutoshardError):
    """No rule for the function can be discovered."""


class Refused(DiscoveryError):
    """The function rejected some operands. The cause is the exception that it raised."""


@contextlib.contextmanager
def as_refused() -> Iterator[None]:
    """Replaces any exception of the user's function by `Refused`.

    Raises:
        Refused: in place of any exception inside the `with` block.
    """
    try:
        yield
    except Exception as error:  # the user's function may reject operands with any exception
        raise Refused(error_summary(error)) from error


@shown
@dataclass(frozen=True, eq=False)
class Sample:
    """A set of operands with its results.

    Attributes:
        operands: the operands.
        whole: the results for the whole operands.
        slack: for each result, the relative error that counts as rounding.
    """

    operands: list[np.ndarray]
    whole: list[np.ndarray]
    slack: tuple[float, ...]

    @property
    def noise(self) -> float:
        """The largest slack of a result."""
        return max(self.slack, default=0.0)


class Subject:
    """A function of arrays with its samples.

    Attributes:
        name: the function's name, for messages.
        array_positions: the positions of the array leaves among all leaves of the arguments.
        examples: an example of each array operand.
        shapes: the shapes of the operands.
        fn: the function of the array operands alone; it returns a list of arrays.
        compiled: `fn` under `jax.jit`.
        results: the types of the results.
        independent: for each result, whether it depends on no operand.
        set_count: the number of sets of values on which the function was tried.
        samples: the sets on which the function runs and has informative results.
    """

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any]):
        self.name = getattr(fn, "__name__", type(fn).__name__)
        leaves, tree = jax.tree.flatten(tuple(args))
        self.array_positions = [i for i, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")]
        if not self.array_positions:
            raise DiscoveryError(
                f"discover({self.name}): it has no array arguments. Pass arrays or jax.ShapeDtypeStructs. Other "
                "arguments are kept as they are."
            )
        given = [not isinstance(leaves[i], jax.ShapeDtypeStruct) for i in self.array_positions]
        self.examples = [jnp.asarray(example(leaves[i])) for i in self.array_positions]
        self.shapes = [tuple(x.shape) for x in self.examples]

        def flat(*arrays: Any) -> list[Any]:
            whole = list(leaves)
            for i, x in zip(self.array_positions, arrays, strict=True):
                whole[i] = x
            return [jnp.asarray(x) for x in jax.tree.leaves(fn(*tree.unflatten(whole)))]

        self.fn = flat
        self.compiled = jax.jit(flat, compiler_options=FAST_COMPILE)
        self.results, self.independent = self._traced()
        boolean = any(x.dtype == np.bool_ for x in (*self.examples, *self.results))  # carry little information
        sets = value_sets(self.examples, given, 2 if boolean else 1)
        self.set_count = len(sets)
        self.samples = self._informative_samples(sets)

    def _traced(self) -> tuple[list[Any], list[bool]]:
        """Traces the function: the types of its results, and for each whether it depends on no operand."""
        try:
            with as_refused():
                closed = jax.make_jaxpr(self.fn)(*self.examples)
        except Refused as error:
            raise DiscoveryError(
                f"discover({self.name}): it cannot be traced with the whole arguments: {error}. Pass a function that "
                "jax.jit accepts; wrap host code in jax.pure_callback."
            ) from error.__cause__
        jaxpr = _compat.open_jaxpr(closed)
        if not jaxpr.outvars:
            raise DiscoveryError(
                f"discover({self.name}): it returns no arrays, so there is nothing to compare. Return the arrays."
            )
        dependent = set(jaxpr.invars)
        for eqn in jaxpr.eqns:
            if any(not isinstance(v, _compat.Literal) and v in dependent for v in eqn.invars):
                dependent.update(eqn.outvars)
        results = [v.aval for v in jaxpr.outvars]
        return results, [isinstance(v, _compat.Literal) or v not in dependent for v in jaxpr.outvars]

    def _informative_samples(self, sets: list[list[np.ndarray]]) -> list[Sample]:
        """Returns samples for the sets of values on which the function runs and has informative results."""
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
            dependent = [x for x, fixed in zip(sample.whole, self.independent, strict=True) if not fixed]
            if is_informative(dependent or sample.whole):
                kept.append(sample)
        if failed is not None and not kept:
            raise DiscoveryError(
                f"discover({self.name}): it fails on the whole arguments: {failed}"
            ) from failed.__cause__
        return kept

    def sample(self, operands: list[np.ndarray]) -> Sample:
        """Runs the function on a set of operands, and on slightly perturbed ones to measure the rounding error."""
        whole, perturbed = self.run(operands), self.run(rounded(operands))
        pairs = zip(whole, perturbed, strict=True)
        noise = [relative_error(a, b) if jnp.issubdtype(a.dtype, jnp.inexact) else 0.0 for a, b in pairs]
        return Sample(operands, whole, tuple(min(SLACK_FACTOR * n, MAX_SLACK) for n in noise))

    def _check_repeats(self, sample: Sample) -> None:
        """Checks that two runs agree, also after tracing again, since host random numbers are constants of a trace."""
        again = jax.jit(lambda *arrays: self.fn(*arrays), compiler_options=FAST_COMPILE)
        for other in (self.run(sample.operands), self.run(sample.operands, again)):
            for r, (a, b) in enumerate(zip(sample.whole, other, strict=True)):
                if wrong := difference(a, b) and difference(a, b, sample.slack[r]):
                    raise DiscoveryError(
                        f"discover({self.name}): two runs on the same values differ in result {r} ({wrong}), so runs "
                        "cannot be compared. Pass random numbers and counters as arguments."
                    )

    def run(self, operands: Sequence[np.ndarray], compiled: Any = None) -> list[np.ndarray]:
        """Returns the results for these operands as NumPy arrays (see `to_numpy`).

        Raises:
            Refused: the function rejects the operands.
        """
        arrays = [from_numpy(x, like) for x, like in zip(operands, self.examples, strict=True)]
        with as_refused():
            return [to_numpy(x) for x in (compiled or self.compiled)(*arrays)]

    def shapes_of(self, operands: Sequence[Any]) -> Sequence[Any]:
        """Returns the shapes and dtypes of the results for operands of these shapes and dtypes.

        Raises:
            Refused: the function rejects the operands.
        """
        with as_refused():
            return jax.eval_shape(self.compiled, *operands)

    def is_constant(self, result: int) -> bool:
        """Whether a result is the same in all samples."""
        first, *others = (sample.whole[result] for sample in self.samples)
        return all(np.array_equal(first, other, equal_nan=first.dtype.kind == "f") for other in others)
