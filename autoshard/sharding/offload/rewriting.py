"""Rewrites a traced step so that chosen values wait in host memory. The user's code does not change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax

from autoshard import _compat
from autoshard._maxtext_names import aliased_names
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

    @cached_property
    def names(self) -> list[str]:
        """The names that words can select: those of `checkpoint_name`, and `residual` if a scan keeps its carry."""
        carry = [RESIDUAL] if RESIDUAL in {*self.crossings.nbytes, *self.crossings.reasons} else []
        return list(dict.fromkeys([*sorted(self.crossings.names), *carry]))

    def read(self, word: str) -> LayerWord:
        """Read a word.

        If it equals a name of the step, it is that name, not a pattern. If it matches no name of the step, it may match
        MaxText's names of some.
        """
        if word in self.crossings.names:
            return LayerWord(word, word, None)
        found = read_layer_word(word)
        if any(map(found.names, self.names)):
            return found
        return replace(found, also=tuple(name for name in aliased_names(found.names) if name in self.names))

    def check_known(self, words: Words) -> None:
        """Check that the step has values of these words.

        Raises:
            PlanError: it has none of one of them.
        """
        given = [self.read(word) for word in words if word != OPTIMIZER or word in self.names]
        unknown = [word for word in given if not any(map(word.names, self.names))]
        if unknown:
            there = [*self.names, *([OPTIMIZER] if self.optimizer_state else [])]
            more = f", and {len(there) - SHOWN} more" if len(there) > SHOWN else ""
            has = f"It has {', '.join(there[:SHOWN])}{more}." if there else "It has nothing that can be moved."
            why = "" if self.crossings.names else " The step has no value that checkpoint_name names."
            if any(map(_is_residual, unknown)):
                why += f" '{RESIDUAL}' is the carry of a scan over stacked parameters, and no such carry is kept here."
            texts = [f"'{word.text}'" + _theirs(word) for word in unknown]
            raise PlanError(
                f"auto_shard({self.traced.name}): offload names {' and '.join(texts)}, which the step does not have. "
                f"{has}{why} Use {'one of them, or ' if there else ''}'{NONE}'"
            )

    def partly_text(self, word: str, found: Crossings) -> str:
        """Why a word leaves some of its values on the device."""
        label = self.read(word).label()
        return f"offload names {label}, which leaves some values on the device: {'; '.join(found.in_scans[word])}"

    def problem_text(self, word: str, found: Crossings) -> str:
        """Why a word moves nothing, and what to do."""
        read = self.read(word)
        counts = {name: count for name, count in found.counts.items() if read.names(name)}
        carry = f"'{RESIDUAL}'" if RESIDUAL not in found.names else "which needs a name of its own here"
        if not found.has_backward:
            why = "the function has no backward pass. Offload in a function that computes gradients"
        elif word == OPTIMIZER and word not in found.names:
            why = (
                "no state has the shape of a parameter and is read by the update alone. Give the optimizer's state as "
                "an argument, and return its new value; without moments, as in SGD, there is none"
            )
        elif found.reasons.get(word):
            why = f"{'; '.join(found.reasons[word])}. Leave it out of offload"
        elif found.in_scans.get(word):
            why = "; ".join(found.in_scans[word])
        elif read.layers is not None and counts and not any(read.selects(count) for count in counts.values()):
            why = _empty_slice_text(read, counts)
        elif any(map(read.names, found.recomputed)):
            name = next(filter(read.names, sorted(found.recomputed)))
            why = (
                "jax.checkpoint computes it again in the backward pass, so it is not kept. Offload what the "
                f"checkpointed function takes (the carry of scanned layers, {carry}), or keep this value with "
                f"policy=jax.checkpoint_policies.save_only_these_names('{name}')"
            )
        elif read.layers is not None and counts:
            selected = sum(len(read.selects(count)) for count in counts.values())
            why = (
                f"the slice selects {selected} of {sum(counts.values())} values, and the backward pass reads none of "
                "these. Select others: it does not read the result of the last layer, for example"
            )
        else:
            why = (
                "the backward pass reads no value of that name. Name a value that it reads, such as the input of a "
                f"layer; the result of a scanned layer is the next one's input, {carry}"
            )
        return f"offload names {read.label()}, which moves nothing to the host: {why}"


def _empty_slice_text(word: LayerWord, counts: Mapping[str, int]) -> str:
    """Why a slice selects no value, and what to do.

    Args:
        word: the word.
        counts: name -> the number of its values in straight code.
    """
    if len(counts) == 1:
        ((name, count),) = counts.items()
        some = f"{count} values, numbered from 0" if count > 1 else "1 value, number 0"
        return f"'{name}' has {some}, and the slice selects none of them. '{name}@:{count}' selects all"
    most = max(counts.values())
    return (
        f"the slice counts the values of one name, and none of the {len(counts)} names that match has more than "
        f"{most}. Leave the slice out, and select fewer names by another pattern, such as '{next(iter(counts))}'"
    )


def _is_residual(word: LayerWord) -> bool:
    return word.pattern == RESIDUAL or RESIDUAL in aliased_names(word.names)


def _theirs(word: LayerWord) -> str:
    ours = aliased_names(word.names)
    return f" (MaxText's name of {' and '.join(ours)})" if ours and ours != (word.pattern,) else ""
