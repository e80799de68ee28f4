"""Further ways to run an operator over a sequence that is sharded: what attention declares besides its rule.

The rule of attention shards the queries' sequence and needs all keys. Other forms:

    gathered  keys are gathered, and devices exchange queries so that all have the same causal work
    heads     the mesh axis shards heads inside the operator. Operands are exchanged by all-to-alls (Ulysses)
    ring      keys travel around a ring of devices. In a second rule, keys are sharded as queries are; `run` computes
              the results of a shard
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from autoshard._shown import shown
from autoshard.spmdrules.core.rule import Rule
from autoshard.spmdrules.custom_ops.kernel_cost import KernelCost
from autoshard.spmdrules.custom_ops.opaque_primitive import BatchedFunction, batched_text


@shown
@dataclass(frozen=True)
class SequenceCost:
    """What one device does in one run of an operator on shards of a sequence.

    Attributes:
        kernels: its kernels, those of all hops together.
        hops: the number of transfers to the next device.
        hop_bytes: bytes that a device sends in each of them.
        hidden_share: the part of the kernels' time beside which transfers run.
        exchange_bytes: bytes of the shards that devices exchange before and after, so that all have the same work.
    """

    kernels: tuple[KernelCost, ...]
    hops: int
    hop_bytes: float
    hidden_share: float
    exchange_bytes: float = 0.0

    def times(self, runs: int) -> SequenceCost:
        """Return the cost of several runs on different operands, whose transfers have the bytes of all of them."""
        return replace(
            self,
            kernels=tuple(each.times(runs) for each in self.kernels),
            hop_bytes=self.hop_bytes * runs,
            exchange_bytes=self.exchange_bytes * runs,
        )


@shown
@dataclass(frozen=True)
class SequenceForm:
    """How an operator runs on shards of a sequence.

    Attributes:
        text: the rule. On a ring, keys are sharded as queries are.
        run: `run(axes, *shards)` returns the results of a shard; the mesh axes `axes` shard the sequence.
        cost: `cost(devices, *shards)` returns a `SequenceCost`; shards are anything with a shape and a dtype.
    """

    text: str
    run: Callable[..., Any]
    cost: Callable[..., SequenceCost]


@shown
@dataclass(frozen=True)
class SequenceForms:
    """The forms of one call of an operator.

    Attributes:
        sequence: the factor of the rule that shards the queries' sequence.
        heads: the factors of heads, in order of preference.
        keys: the operands that have the keys' sequence.
        gathered: the operator over gathered keys, by its own rule, but with balanced work; None where the work of all
            shards is equal anyway.
        ring: the operator on a ring; None where it has no such form, for the reason `no_ring`.
        no_ring: why there is none.
    """

    sequence: str
    heads: tuple[str, ...]
    keys: tuple[int, ...]
    gathered: SequenceForm | None = None
    ring: SequenceForm | None = None
    no_ring: str = ""


def with_sequence_forms(forms: Callable[..., SequenceForms]) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that declares the forms of an operator's function.

    Args:
        forms: from the operands, anything with a shape and a dtype, and the options, to `SequenceForms`.
    """

    def decorate(fn: Any) -> Any:
        fn.sequence_forms = forms
        return fn

    return decorate


def sequence_forms_of(params: Any, avals: Sequence[Any]) -> SequenceForms | None:
    """Return the forms of an operator's equation; None if its function declares none.

    Args:
        params: the parameters of the equation.
        avals: its operands.
    """
    return _forms_of(params.get("fn"), avals)


def _forms_of(fn: Any, avals: Sequence[Any]) -> SequenceForms | None:
    if isinstance(fn, BatchedFunction):
        forms = _forms_of(fn.fn, fn.rows(avals))
        return forms and replace(forms, gathered=_batched(forms.gathered, fn), ring=_batched(forms.ring, fn))
    stated, options = (fn.func, fn.keywords) if isinstance(fn, functools.partial) else (fn, {})
    declared = getattr(stated, "sequence_forms", None)
    return None if declared is None else declared(*avals, **options)


def _batched(form: SequenceForm | None, fn: BatchedFunction) -> SequenceForm | None:
    """Return a form with one more leading dimension, such as the stages of a pipeline.

    Shards of that dimension are independent: collectives run over the mesh axes of the sequence alone.
    """
    if form is None:
        return None

    def run(axes: tuple[str, ...], *shards: Any) -> Any:
        return BatchedFunction(functools.partial(form.run, axes), fn.mapped)(*shards)

    def cost(devices: int, *shards: Any) -> SequenceCost:
        return form.cost(devices, *fn.rows(shards)).times(fn.size(shards))

    return SequenceForm(batched_text(form.text, fn.mapped), run, cost)


def rule_of_form(form: SequenceForm, avals: Sequence[Any]) -> Rule:
    """Return the rule of an operator on a ring, with the sizes of its operands."""
    return _parsed(form.text, tuple((tuple(x.shape), x.dtype) for x in avals))


@functools.lru_cache(maxsize=1024)
def _parsed(text: str, shapes: tuple[tuple[tuple[int, ...], Any], ...]) -> Rule:
    return Rule.parse(text, *(jax.ShapeDtypeStruct(*each) for each in shapes))
