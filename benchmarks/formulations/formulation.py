"""What a program of the corpus consists of: its step, its sizes, and what an expert knows about its arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax

Sizes = Mapping[str, int]


class Notes(Protocol):
    """The sharding constraints that an expert adds to a program. `Unannotated` adds none.

    The dimensions of an array are words, one for each dimension; `.` is a dimension that stays whole:

        batch       rows of the batch
        stream      positions of the residual stream between the products
        width       the residual stream's width
        heads, hidden, vocab, channels      what tensor parallelism shards
        experts, groups     experts, and the groups of tokens that they take their rows from
        rows        rows of a large table
    """

    def __call__(self, x: jax.Array, dims: str) -> jax.Array:
        """Constrain an activation."""
        ...

    def weights(self, weights: Any) -> Any:
        """Gather weights for their use. `weights` is a part of the parameters, or all of them."""
        ...


class Unannotated:
    """No annotations: every value is returned as it is."""

    def __call__(self, x: jax.Array, dims: str) -> jax.Array:
        """Return the activation."""
        return x

    def weights(self, weights: Any) -> Any:
        """Return the weights."""
        return weights


UNANNOTATED = Unannotated()


@dataclass(frozen=True)
class Program:
    """A train step and its values.

    Attributes:
        step: `step(state, *batch) -> (state, loss)`, without annotations if the notes are `UNANNOTATED`.
        state: makes the state from a key.
        batch: makes the batch from a key: a tuple of arrays.
    """

    step: Callable[..., Any]
    state: Callable[[jax.Array], Any]
    batch: Callable[[jax.Array], tuple[Any, ...]]

    def shapes(self) -> tuple[Any, tuple[Any, ...]]:
        """Return the shapes of the state and of the batch."""
        key = jax.random.key(0)
        return jax.eval_shape(self.state, key), jax.eval_shape(self.batch, key)


@dataclass(frozen=True)
class Formulation:
    """A program of the corpus.

    Attributes:
        name: its name.
        style: the kind of model, and what is unusual about the way it is written.
        make: `make(notes, **sizes)` builds it.
        small: sizes for eight devices of a CPU, on which parity is checked.
        targets: machine -> sizes that matter there.
        dims: the end of a parameter's path (a regular expression) -> its last dimensions, as words of `Notes`.
        ways: what an expert may use besides data and fsdp: `tensor`, `sequence`, `experts`.
        held_out: whether this program is not used to develop the planner.
    """

    name: str
    style: str
    make: Callable[..., Program] = field(repr=False)
    small: Sizes
    targets: Mapping[str, Sizes]
    dims: Mapping[str, str] = field(default_factory=dict)
    ways: frozenset[str] = frozenset()
    held_out: bool = False

    def sizes(self, target: str | None = None) -> Sizes:
        """Return the sizes for a machine, or the small ones."""
        return self.small if target is None else self.targets[target]

    def program(self, target: str | None = None, notes: Notes = UNANNOTATED) -> Program:
        """Build the program with the sizes for a machine, or the small ones."""
        return self.make(notes, **self.sizes(target))
