"""Rewrites a traced step so that chosen values wait in host memory. The user's code does not change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax

from autoshard import _compat
from autoshard._shown import shown
from autoshard.errors import PlanError
from autoshard.sharding.offload.constants import SHOWN
from autoshard.sharding.offload.crossings import Crossings, find_crossings
from autoshard.sharding.offload.layer_words import LayerWord, read_layer_word
from autoshard.sharding.offload.optimizer_state import optimizer_state, update_order
from autoshard.sharding.offload.replay import inlined, replay
from autoshard.sharding.offload.words import NONE, OPTIMIZER, RESIDUAL, Words
from autoshard.sharding.program.array_sizes import nbytes
from autoshard.sharding.program.tracing import Traced


@shown
@dataclass(eq=False)
class Offloader:
    """A traced step, and the values of it that can be moved to the host.

    Attributes:
        traced: the step as the user wrote it.
        problems: after `rewritten`: why words that were given move nothing.
    """

    traced: Traced
    problems: list[str] = field(default_factory=list)

    @cached_property
    def closed(self) -> Any:
        """The step's jaxpr with its calls inlined."""
        with _compat.auto_axes():
            return inlined(_compat.dce(self.traced.closed))

    @cached_property
    def crossings(self) -> Crossings:
        """All values that can be moved between the forward and the backward pass."""
        return find_crossings(self.closed)

    @cached_property
    def optimizer_state(self) -> list[tuple[int, int]]:
        """The pairs (input, result) of the optimizer's state."""
        return optimizer_state(self.closed, self.traced.state)

    @cached_property
    def sizes(self) -> Mapping[str, float]:
        """Word -> bytes that it moves to the host in one step, before sharding. Words that move nothing are absent."""
        sizes = dict(self.crossings.nbytes)
        state = sum(nbytes(self.traced.in_avals[i]) for i, _ in self.optimizer_state)
        return {**sizes, OPTIMIZER: float(state) + sizes.get(OPTIMIZER, 0.0)} if state else sizes

    def rewritten(self, words: Words) -> Traced:
        """Return the step with the values of these words in host memory.

        Raises:
            PlanError: the step has no value of a word.
        """
        self.check_known(words)
        read = [self.read(word) for word in words]
        found = find_crossings(self.closed, read)
        sizes = {**found.nbytes, OPTIMIZER: self.sizes.get(OPTIMIZER, 0.0)}
        moved = {word: size for word in words if (size := sizes.get(word, 0.0))}
        self.problems = [self.problem_text(word, found) for word in words if word not in moved]
        self.problems += [self.partly_text(word, found) for word in moved if found.in_scans.get(word)]
        if not moved:
            return self.traced
        edits = found.edits
        traced, state = self.traced, self.optimizer_state if OPTIMIZER in moved else []
        on_host = {i for i, _ in state}
        if state:
            jaxpr = _compat.open_jaxpr(self.closed)
            edits.inputs = frozenset(jaxpr.invars[i] for i in on_host)
            edits.outputs = frozenset(o for _, o in state)
            edits.order = update_order(self.closed, state)
        avals = [
            _compat.abstract_array(a.shape, a.dtype, a.weak_type, on_host=True) if i in on_host else a
            for i, a in enumerate(map(_compat.shape_dtype_of, _compat.open_jaxpr(self.closed).invars))
        ]
        with _compat.auto_axes():
            closed = jax.make_jaxpr(replay(self.closed, edits))(*avals)
        jaxpr = _compat.open_jaxpr(closed)
        return replace(
            traced,
            closed=closed,
            in_avals=[v.aval for v in jaxpr.invars],
            out_avals=[v.aval for v in jaxpr.outvars],
            offloaded=moved,
            moved_inputs=frozenset(on_host),
        )

    def read(self, word: str) -> LayerWord:
        """Read a word. If it equals a name of the step, it is that name, not a pattern."""
        return LayerWord(word, word, None) if word in self.crossings.names else read_layer_word(word)

    def check_known(self, words: Words) -> None:
        """Check that the step has values of these words.

        Raises:
            PlanError: it has none of one of them.
        """
        names = sorted(self.crossings.names)
        carry = [RESIDUAL] if RESIDUAL in {*self.crossings.nbytes, *self.crossings.reasons} else []
        there = list(dict.fromkeys([*names, *carry, OPTIMIZER]))
        unknown = [
            word for word in words if word not in there and not any(map(self.read(word).names, [*names, *carry]))
        ]
        if unknown:
            more = f", and {len(there) - SHOWN} more" if len(there) > SHOWN else ""
            why = "" if names else " The step has no value that checkpoint_name names."
            if RESIDUAL in unknown:
                why += f" '{RESIDUAL}' is the carry of a scan over stacked parameters, and no such carry is kept here."
            raise PlanError(
                f"auto_shard({self.traced.name}): offload names '{unknown[0]}', which the step does not have. "
                f"It has {', '.join(there[:SHOWN])}{more}.{why} Use one of them, or '{NONE}'"
            )

    def partly_text(self, word: str, found: Crossings) -> str:
        """Why a word leaves some of its values on the device."""
        return f"offload names '{word}', which leaves some values on the device: {'; '.join(found.in_scans[word])}"

    def problem_text(self, word: str, found: Crossings) -> str:
        """Why a word moves nothing, and what to do."""
        carry = f"'{RESIDUAL}'" if RESIDUAL not in found.names else "which needs a name of its own here"
        if not found.has_backward:
            why = "the function has no backward pass. Offload in a function that computes gradients"
        elif word == OPTIMIZER and word not in found.names:
            why = (
                "no state has the shape of a parameter and is read by the update alone. Give the optimizer's state as "
                "an argument, and return its new value"
            )
        elif found.reasons.get(word):
            why = f"{'; '.join(found.reasons[word])}. Leave it out of offload"
        elif found.in_scans.get(word):
            why = "; ".join(found.in_scans[word])
        elif any(map(self.read(word).names, found.recomputed)):
            why = (
                "jax.checkpoint computes it again in the backward pass, so it is not kept. Offload what the "
                f"checkpointed function takes (the carry of scanned layers, {carry}), or keep this value with "
                f"policy=jax.checkpoint_policies.save_only_these_names('{word}')"
            )
        else:
            why = (
                "the backward pass reads no value of that name. Name a value that it reads, such as the input of a "
                f"layer; the result of a scanned layer is the next one's input, {carry}"
            )
        return f"offload names '{word}', which moves nothing to the host: {why}"
