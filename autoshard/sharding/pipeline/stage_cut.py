"""Cuts the computation of one microbatch at its stack of layers: what comes before, between and after the two scans.

The stack is a scan over stacked parameters, with the scan that computes its gradients from its residuals. All else is
computed where it is needed. A value that is cheap to compute from the microbatch's rows is computed again; any other
value travels from stage to stage, with the microbatch that it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.microbatches.flow import HEAVY
from autoshard.sharding.microbatches.operator_steps import place_of
from autoshard.sharding.pipeline.layers.forward_layers import find_layers
from autoshard.sharding.pipeline.layers.layer_runs import find_runs
from autoshard.sharding.program.array_sizes import nbytes


class NotStaged(Exception):
    """The program cannot be cut into stages. The text gives the reason."""


class TooManyStages(NotStaged):
    """The program has fewer layers than stages.

    Attributes:
        most: the largest number of stages.
    """

    def __init__(self, reason: str = "", most: int = 0):  # copies pass the reason alone
        super().__init__(reason)
        self.most = most


@shown
@dataclass(eq=False)
class Stack:
    """One scan over the layers.

    Attributes:
        eqn: the scan; None if there is none, as for the gradients of a function without gradients.
        consts, carry, slices: its operands.
        carried: its final carry.
        stacked: what it stacks.
    """

    eqn: Any
    consts: list[Any] = field(init=False)
    carry: list[Any] = field(init=False)
    slices: list[Any] = field(init=False)
    carried: list[Any] = field(init=False)
    stacked: list[Any] = field(init=False)

    def __post_init__(self):
        n_consts, n_carry = _compat.scan_arity(self.eqn.params) if self.eqn else (0, 0)
        operands, results = ([*self.eqn.invars], [*self.eqn.outvars]) if self.eqn else ([], [])
        self.consts, self.carry = operands[:n_consts], operands[n_consts : n_consts + n_carry]
        self.slices = operands[n_consts + n_carry :]
        self.carried, self.stacked = results[:n_carry], results[n_carry:]

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.eqn.params["length"]

    @property
    def reverse(self) -> bool:
        """Whether the last layer runs first."""
        return self.eqn.params["reverse"]

    @property
    def place(self) -> str:
        """The place of the scan in the user's program, for messages."""
        return _place(self.eqn)


@shown
@dataclass(eq=False)
class StageCut:
    """A microbatch's program, cut at its layers.

    Attributes:
        jaxpr: the program.
        rows: its inputs that belong to the microbatch. The first one is its number.
        whole: its other inputs.
        sums: its results that are terms of a sum.
        forward: the stack of layers.
        backward: the stack of their gradients; empty if the program has none.
        forth: values that travel with the forward pass, from before the layers to the middle.
        back: values that travel with the backward pass, from the middle to what follows the gradients.
        in_middle: results of the program that the middle computes.
        in_after: results that are known after the gradients of the layers.
        middle_stacks: stacked results of the forward scan that the middle takes.
        after_stacks: stacked results of the backward scan that the operators after it take.
    """

    jaxpr: Any
    rows: list[Any]
    whole: list[Any]
    sums: set[Any]
    forward: Stack
    backward: Stack
    forth: list[Any] = field(default_factory=list)
    back: list[Any] = field(default_factory=list)
    in_middle: list[Any] = field(default_factory=list)
    in_after: list[Any] = field(default_factory=list)
    middle_stacks: list[Any] = field(default_factory=list)
    after_stacks: list[Any] = field(default_factory=list)

    def __post_init__(self):
        self.made = {var: eqn for eqn in self.jaxpr.eqns for var in eqn.outvars}
        self.own = {*self.rows}  # values that depend on the microbatch
        for eqn in self.jaxpr.eqns:
            if self.own.intersection(_variables(eqn.invars)):
                self.own |= {*eqn.outvars}
        self.after_forward = self.dependents(self.forward)
        self.after_backward = self.dependents(self.backward)
        self.inputs_of_forward = self.ancestors(self.forward.eqn.invars)
        self._cheap: dict[Any, bool] = {}

    def dependents(self, stack: Stack) -> set[Any]:
        """The results of a stack, and all variables that are computed from them."""
        found = {*stack.carried, *stack.stacked}
        for eqn in self.jaxpr.eqns:
            if found.intersection(_variables(eqn.invars)):
                found |= {*eqn.outvars}
        return found

    def ancestors(self, atoms: Iterable[Any]) -> set[Any]:
        """These variables, and all variables from which they are computed."""
        found, todo = set(), [*_variables(atoms)]
        while todo:
            var = todo.pop()
            if var not in found:
                found.add(var)
                todo += _variables(self.made[var].invars) if var in self.made else ()
        return found

    def is_cheap(self, var: Any) -> bool:
        """Whether a variable is an input, or computed by cheap operators from inputs and from what all rows share."""
        if var not in self._cheap:
            eqn = self.made.get(var)
            self._cheap[var] = eqn is None or (
                eqn.primitive.name not in HEAVY
                and not eqn.effects
                and all(self.is_cheap(v) or (var in self.own and v not in self.own) for v in _variables(eqn.invars))
            )
        return self._cheap[var]

    @property
    def shared(self) -> list[Any]:
        """The variables that do not depend on the microbatch and are not cheap. They are computed once."""
        return [v for v in self.made if v not in self.own and not self.is_cheap(v)]

    @property
    def input_bytes(self) -> int:
        """The bytes of what enters a stage: the carry of the layers, and what travels with it."""
        return sum(nbytes(v.aval) for v in (*self.forward.carry, *self.forth))

    @property
    def residual_bytes(self) -> int:
        """The bytes of the residuals of all layers."""
        return sum(nbytes(v.aval) for v in {*self.forward.stacked}.intersection(_variables(self.backward.slices)))

    def sliced(self, stack: Stack, var: Any) -> str:
        """Say which array of the microbatch the layers take slices of, and what to do."""
        made, to_do = self.made.get(var), ". Compute it in the layers, or request a plan without pp"
        source = "an argument with the batch" if made is None else f"the result of {place_of(made)}"
        if made is None:
            to_do = ". Let each layer index the whole array by the layer's number"
        if stack is self.backward:  # the gradient of what the layers stack
            to_do = ". It comes from rows that all layers return. Add up in the carry what is needed of them"
        elif made is not None and made.primitive.name == "scan":  # weights that the layers index, or another stack
            to_do = ". Request a plan without pp"
        return (f"{stack.place} take slices of an array that differs between microbatches: {var.aval.str_short()}, "
                f"{source}{to_do}")  # fmt: skip

    def find_travellers(self) -> None:
        """Find which values travel, and where each result is computed.

        Raises:
            NotStaged: the layers take slices of an array that differs between microbatches, or pass on a typed key.
        """
        forward, backward = self.forward, self.backward
        residuals = {*forward.stacked}
        for stack in (forward, backward):
            for var in _variables(stack.slices):
                if var in self.own and not (stack is backward and var in residuals):
                    raise NotStaged(self.sliced(stack, var))
        results = [*dict.fromkeys(_variables(self.jaxpr.outvars))]
        staged = self.sums.intersection((*forward.stacked, *backward.stacked))
        self.in_after = [v for v in results if v in self.after_backward and v not in staged]
        self.in_middle = [v for v in results if v not in self.after_backward and v not in staged]
        after_needs = self.boundary(self.in_after, self.after_backward)
        self.after_stacks = [v for v in backward.stacked if v in after_needs]
        crossing = [v for v in (*_variables(backward.consts), *after_needs)
                    if v in self.own and not self.is_cheap(v) and v not in self.after_backward]  # fmt: skip
        self.back = [*dict.fromkeys(crossing)]
        middle_wants = [*self.in_middle, *self.back, *_variables(backward.carry)]
        middle_needs = self.boundary(middle_wants, self.after_forward)
        self.middle_stacks = [v for v in forward.stacked if v in middle_needs]
        sources = [*_variables(forward.consts), *middle_needs]
        self.forth = [*dict.fromkeys(v for v in sources if self.travels_forth(v))]
        carried = _variables([*forward.carry, *backward.carry, *forward.stacked, *self.forth, *self.back])
        if any(_compat.is_extended(v.aval.dtype) for v in carried):
            raise NotStaged(f"{forward.place} pass on a typed random key; pass its jax.random.key_data instead")

    def travels_forth(self, var: Any) -> bool:
        """Whether a value is computed before the layers and is too expensive to be computed again."""
        return var in self.own and not self.is_cheap(var) and var in self.inputs_of_forward

    def boundary(self, wanted: Iterable[Any], inside: set[Any]) -> list[Any]:
        """The variables that a part takes from outside to compute the wanted variables.

        Args:
            wanted: the variables that the part computes.
            inside: the variables that the part may compute. It takes all others from outside. The middle also computes
                those that do not travel forth.
        """
        found: dict[Any, None] = {}
        seen, todo = set(), [*wanted]
        stacks = {v for stack in (self.forward, self.backward) for v in (*stack.carried, *stack.stacked)}
        while todo:
            var = todo.pop()
            if var in seen:
                continue
            seen.add(var)
            free = inside is self.after_forward and not self.travels_forth(var)
            if var in stacks or var not in self.made or not (var in inside or free):
                found[var] = None
                continue
            todo += _variables(self.made[var].invars)
        return [*found]


def cut_stages(jaxpr: Any, whole: int, sums: int, stages: int, chunks: int = 1) -> StageCut:
    """Cut the program of one microbatch at its layers.

    Args:
        jaxpr: the program, as an open jaxpr without constants, with calls inlined. Its inputs are those that all
            microbatches share, the number of the microbatch, and its rows.
        whole: the number of inputs that all microbatches share.
        sums: the number of its first results that are terms of a sum.
        stages: number of stages.
        chunks: number of chunks of layers of each stage.

    Raises:
        NotStaged: it has no stack of layers that can be cut, or fewer layers than stages, or than chunks of all stages.
    """
    stacks = find_stacks(jaxpr, whole)
    if not stacks:
        if (text := _indexed_weights(jaxpr, whole)) is not None:
            raise NotStaged(text)
        layers, reason = find_layers(jaxpr, whole)
        if layers is None:
            raise NotStaged(_no_stack(jaxpr, reason))
        stacks = Stack(layers), Stack(None)
    forward, backward = stacks
    if stages > forward.layers:
        text = f"{stages} stages are more than {forward.place}, whose number is {forward.layers}"
        raise TooManyStages(text, forward.layers)
    if stages * chunks > forward.layers:
        most = forward.layers // stages
        use = "'1f1b'" if most < 2 else f"'interleaved:{most}'" + ", or fewer chunks" * (most > 2)
        raise NotStaged(
            f"{chunks} chunks of layers on each of {stages} stages are more than {forward.place}, whose number is "
            f"{forward.layers}. Use schedule={use}"
        )
    terms = {*_variables(jaxpr.outvars[:sums])}
    found = StageCut(jaxpr, jaxpr.invars[whole:], jaxpr.invars[:whole], terms, forward, backward)
    found.find_travellers()
    return found


def find_stacks(jaxpr: Any, whole: int) -> tuple[Stack, Stack] | None:
    """Return the stack of layers with most weights and that of its gradients; None if there is no such pair.

    Args:
        jaxpr: the program of one microbatch, see `cut_stages`.
        whole: the number of inputs that all microbatches share.
    """
    found = _stacks_with_weights(jaxpr, whole)
    return max(found, key=lambda each: each[0])[1:] if found else None


def other_layers(jaxpr: Any, whole: int, cut: StageCut) -> list[str]:
    """Return the places of the layers that are not cut, and the lengths of loops over them. All stages run them."""
    pairs = [pair for _, *pair in _stacks_with_weights(jaxpr, whole)]
    staged = {id(stack.eqn) for stack in (cut.forward, cut.backward)}
    paired = {id(stack.eqn) for pair in pairs for stack in pair} | staged
    found = {id(a.eqn): a for a, b in pairs if staged.isdisjoint((id(a.eqn), id(b.eqn)))}
    weights = _weights(jaxpr, whole)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan" and id(eqn) not in paired and not cut.own.isdisjoint(eqn.outvars):
            stack = Stack(eqn)
            if weights.intersection(_variables(stack.slices)) and stack.carry:
                found[id(eqn)] = stack
    texts = [f"{stack.place}, {stack.layers} in number," for stack in found.values()]
    for run in (cuts[0] for cuts in find_runs(jaxpr.eqns)):
        heavy = next(eqn for eqn in run.block if eqn.primitive.name in HEAVY)
        own_weights = any(weights.issuperset(_variables(o.atoms)) for o in run.of_kind("slices"))
        if own_weights and not cut.own.isdisjoint(heavy.outvars) and not _compat.is_transposed(heavy):
            texts.append(_place(heavy, "other layers"))
    return texts


def _stacks_with_weights(jaxpr: Any, whole: int) -> list[tuple[int, Stack, Stack]]:
    """The bytes of the weights of each stack, the stack, and that of its gradients."""
    scans = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    pairs = [(Stack(a), Stack(b)) for n, b in enumerate(scans) for a in scans[:n]]
    # Gradients run through the layers in the opposite direction. A later stack in the same direction is not a gradient.
    pairs = [(a, b) for a, b in pairs if a.reverse != b.reverse and {*a.stacked}.intersection(_variables(b.slices))]
    weights = _weights(jaxpr, whole)
    sizes = [sum(nbytes(v.aval) for v in _variables(a.slices) if v in weights) for a, _ in pairs]
    return [(size, *pair) for size, pair in zip(sizes, pairs, strict=True) if size]


def _weights(jaxpr: Any, whole: int) -> set[Any]:
    """The weights, and their casts.

    A stack of integers alone, such as the numbers of the layers, does not count: each layer would index all weights.
    """
    weights = {v for v in jaxpr.invars[:whole] if jnp.issubdtype(v.aval.dtype, jnp.inexact)}
    return weights | {v for eqn in jaxpr.eqns if eqn.primitive.name == "convert_element_type"
                      for v in eqn.outvars if weights.issuperset(_variables(eqn.invars))}  # fmt: skip


def _place(eqn: Any, layers: str = "the layers") -> str:
    """The place of layers in the user's program, for messages."""
    line = _compat.program_line(eqn)
    return f"{layers}{' at ' + line if line else ''}"


def _indexed_weights(jaxpr: Any, whole: int) -> str | None:
    """Return the message for layers that index the weights of all layers, where a scan could slice them.

    Returns None if no layers do that.
    """
    weights = _weights(jaxpr, whole)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "scan":
            continue
        stack, body = Stack(eqn), _compat.open_jaxpr(eqn.params["jaxpr"])
        stacks = {b: a for a, b in zip(stack.consts, body.invars, strict=False) if not isinstance(a, _compat.Literal)
                  and a in weights and a.aval.shape[:1] == (stack.layers,)}  # fmt: skip
        for each in body.eqns:
            if each.primitive.name in ("dynamic_slice", "gather") and each.invars[0] in stacks:
                return (
                    f"{stack.place} index the weights of all layers, {stacks[each.invars[0]].aval.str_short()}. Give "
                    "them to jax.lax.scan as its xs, so that each layer takes a slice of them"
                )
    return None


def _no_stack(jaxpr: Any, reason: str) -> str:
    """Why a program has no stack of layers that can be cut; `reason` is why it has none without gradients."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "remat2":
            inner = _compat.open_jaxpr(eqn.params["jaxpr"])
            scan = next((each for each in inner.eqns if each.primitive.name == "scan"), None)
            if scan is not None:
                line = _compat.program_line(scan)
                place = f"the jax.lax.scan{' at ' + line if line else ''}"
                return f"{place} is inside a jax.checkpoint. Put jax.checkpoint around the body of the scan instead"
    return reason or (
        "it has no repeated part: no jax.lax.scan over stacked parameters of layers, and no equal layers one after "
        "another. Layers differ if only some of them have gradients: to freeze these, drop their updates instead"
    )


def _variables(atoms: Iterable[Any]) -> Sequence[Any]:
    return [atom for atom in atoms if not isinstance(atom, _compat.Literal)]
