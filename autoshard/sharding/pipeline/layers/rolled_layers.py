"""Writes layers that a program repeats one after another as a scan, with the scan of their gradients.

The stack of layers is then as in a program that scans its layers. Weights are stacked once a step, outside of the loop
over microbatches, and the gradients of the stack become those of each layer again after the loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard import _compat
from autoshard._shown import shown
from autoshard.sharding.pipeline.layers.completed_layers import complete_layers
from autoshard.sharding.pipeline.layers.forward_layers import layers_alone
from autoshard.sharding.pipeline.layers.layer_runs import Operand, Run, atom_key, find_runs, in_blocks, part_of
from autoshard.sharding.program.array_sizes import nbytes

Atoms = tuple[Any, ...]  # for each layer, in the order of the forward pass


@shown
@dataclass(frozen=True, eq=False)
class Rolled:
    """A program of one microbatch whose layers are a scan.

    Attributes:
        jaxpr: the program, as an open jaxpr. Its inputs are the constants, those that all microbatches share, the
            stacks, the number of the microbatch, and its rows. Its results are the sums, of which some are stacks now,
            and the rows.
        constants: the values of its first inputs.
        stacks: for each stack among its inputs, the positions of the shared inputs that it stacks.
        sums: for each of its sums, the positions of the sums before; several if it is a stack.
    """

    jaxpr: Any
    constants: list[Any]
    stacks: list[tuple[int, ...]]
    sums: list[tuple[int, ...]]


def roll_layers(jaxpr: Any, whole: int, ops: Sequence[str]) -> Rolled | None:
    """Write the layers of a program as scans. Returns None if no layers are alike.

    Layers with gradients take precedence over layers without.

    Args:
        jaxpr: the program of one microbatch, as an open jaxpr without constants, with calls inlined.
        whole: the number of inputs that all microbatches share.
        ops: the operations that combine the terms of its first results.
    """
    programs = [jaxpr, *complete_layers(jaxpr)]
    found = [(*pair, program) for program in programs for pair in _pairs(program, whole)]
    if not found:
        found = [(*each, jaxpr) for each in _alone(jaxpr, whole)]
    if not found:
        return None
    _, forward, backward, program = max(found, key=lambda each: each[0])
    return _Roller(program, whole, ops, forward, backward).rolled()


def _pairs(jaxpr: Any, whole: int) -> list[tuple[int, Run, Run]]:
    """The runs of layers and of their gradients, each with the bytes of its weights."""
    runs, found = find_runs(jaxpr.eqns), []
    shared = {*jaxpr.invars[:whole]}
    for n, backward_cuts in enumerate(runs):
        for forward_cuts in runs[:n]:
            pair = _pair(forward_cuts, backward_cuts)
            if pair:
                of_layers = (o.atoms for o in pair[0].of_kind("slices"))
                weights = (atoms[0] for atoms in of_layers if all(_is_in(atom, shared) for atom in atoms))
                size = sum(nbytes(v.aval) for v in weights if jnp.issubdtype(v.aval.dtype, jnp.inexact))
                size *= pair[0].count
                found += [(size, *pair)] if size else []
    return found


def _alone(jaxpr: Any, whole: int) -> list[tuple[int, Run, Run]]:
    """The runs of layers of a program without gradients, each with the bytes of its weights."""
    shared, nothing = {*jaxpr.invars[:whole]}, Run(jaxpr.eqns, np.zeros(0, np.int32), len(jaxpr.eqns), 0, 0, [])
    cuts = [run for runs in find_runs(jaxpr.eqns) for run in runs]
    return [(size, run, nothing) for run in cuts if (size := layers_alone(run, shared))]


def _pair(forward_cuts: Sequence[Run], backward_cuts: Sequence[Run]) -> tuple[Run, Run] | None:
    """Cuts of two runs of which one has the gradients of the other."""
    for forward, backward in itertools.product(forward_cuts, backward_cuts):
        count = min(forward.count, backward.count)
        layers, gradients = in_blocks(forward, count), in_blocks(backward, count)
        if layers is not None and gradients is not None and _is_gradient(layers, gradients):
            return layers, gradients
        layers = _layers_of(forward, backward)
        if layers is not None and _is_gradient(layers, backward):
            return layers, backward
    return None


def _layers_of(forward: Run, backward: Run) -> Run | None:
    """Return the forward blocks whose results the backward run takes.

    These are the trained layers if the lower ones are frozen: all layers have equal operators in the forward pass, but
    only the trained ones have operators in the backward pass. Returns None if all layers are trained, or if the results
    come from other blocks than as many consecutive ones.
    """
    taken = {forward.made[a][0] for o in backward.of_kind("slices") for a in o.atoms if _is_in(a, forward.made)}
    first = min(taken, default=0)
    if len(taken) == forward.count or taken != {*range(first, first + backward.count)}:
        return None
    return part_of(forward, first, backward.count)


def _is_gradient(forward: Run, backward: Run) -> bool:
    """Whether the blocks of a run take residuals of those of an earlier run, the last block first."""
    if forward.count != backward.count or forward.end > backward.first:
        return False
    residuals = 0
    for operand in backward.of_kind("slices"):
        if any(_is_in(atom, forward.made) for atom in operand.atoms):
            if _stacked_by(forward, operand.atoms[::-1]) is None:
                return False
            residuals += 1
    return residuals > 0


def _stacked_by(run: Run, atoms: Atoms) -> Operand | tuple[int, int] | None:
    """What of each block these atoms are: a carry that it takes, or one of its results; None if neither."""
    at = next((run.made[a] for a in atoms if _is_in(a, run.made)), None)
    if at is None:
        return None
    result = run.variables(at[1])
    if result == atoms:
        return at[1]
    for carry in run.of_kind("carry"):
        if carry.made == at[1] and [*map(atom_key, atoms)] == [*map(atom_key, (*carry.atoms, *result[:-1]))]:
            return carry
    return None


class _Roller:
    """Writes one program."""

    def __init__(self, jaxpr: Any, whole: int, ops: Sequence[str], forward: Run, backward: Run):
        self.jaxpr, self.whole, self.ops = jaxpr, whole, ops
        self.forward, self.backward = forward, backward
        self.positions = {var: n for n, var in enumerate(jaxpr.invars[:whole])}
        self.outer = [
            *jaxpr.eqns[: forward.first], *jaxpr.eqns[forward.end : backward.first], *jaxpr.eqns[backward.end :]
        ]  # fmt: skip
        taken = [a for run in (forward, backward) for kind in ("const", "carry") for o in run.of_kind(kind)
                 for a in o.atoms]  # fmt: skip
        taken += [a for o in (*forward.of_kind("slices"), *self.new_slices()) for a in o.atoms]
        taken += [a for eqn in self.outer for a in eqn.invars]
        self.taken = {a for a in taken if not isinstance(a, _compat.Literal)}
        self.outvars = {a for a in jaxpr.outvars if not isinstance(a, _compat.Literal)}
        self.stacked_sums = self.find_stacked_sums()
        self.packed: dict[Hashable, tuple[int, ...]] = {}  # stack -> the positions of its layers among the inputs
        for operand in (*forward.of_kind("slices"), *self.new_slices(reverse=True)):
            if all(_is_in(atom, self.positions) for atom in operand.atoms):
                self.packed[_key(operand.atoms)] = tuple(self.positions[atom] for atom in operand.atoms)

    def new_slices(self, reverse: bool = False) -> Iterator[Operand]:
        """The slices of the gradients' blocks that are no residuals of the forward run.

        Args:
            reverse: whether to order the atoms as the forward pass orders the layers.
        """
        for operand in self.backward.of_kind("slices"):
            if _stacked_by(self.forward, operand.atoms[::-1]) is None:
                yield Operand("slices", atoms=operand.atoms[::-1]) if reverse else operand

    def find_stacked_sums(self) -> dict[tuple[bool, tuple[int, int]], tuple[int, ...]]:
        """Result of a run -> the positions of the program's sums that are this result of each layer."""
        sums = self.jaxpr.outvars[: len(self.ops)]
        once = {v: n for n, v in enumerate(sums) if not isinstance(v, _compat.Literal) and sums.count(v) == 1}
        found = {}
        for run in (self.forward, self.backward):
            for j, eqn in enumerate(run.block):
                for k in range(len(eqn.outvars)):
                    layers = self.by_layer(run, (j, k))
                    if all(v in once for v in layers) and len({self.ops[once[v]] for v in layers}) == 1:
                        found[run is self.backward, (j, k)] = tuple(once[v] for v in layers)
        return found

    def by_layer(self, run: Run, result: tuple[int, int]) -> Atoms:
        """The variables of a result, in the order of the forward pass."""
        found = run.variables(result)
        return found[::-1] if run is self.backward else found

    def rolled(self) -> Rolled:
        """Return the program with scans."""
        outvars: list[Any] = self.jaxpr.outvars
        grouped: dict[int, tuple[int, ...]] = {n: layers for layers in self.stacked_sums.values() for n in layers}
        groups: list[tuple[int, ...]] = [grouped.get(n, (n,)) for n in range(len(self.ops))]
        sums = [*dict.fromkeys(groups)]
        shared, rows = self.jaxpr.invars[: self.whole], self.jaxpr.invars[self.whole :]
        stacks = [*self.packed.values()]
        shapes = [*map(_compat.shape_dtype_of, shared)]
        shapes += [jax.ShapeDtypeStruct((len(g), *shapes[g[0]].shape), shapes[g[0]].dtype) for g in stacks]

        def run(shared: list[Any], rows: list[Any]) -> list[Any]:
            env = dict(zip((*self.jaxpr.invars[: self.whole], *self.packed, *self.jaxpr.invars[self.whole :]),
                           (*shared, *rows), strict=True))  # fmt: skip
            self.evaluate(env)
            results = [env[group] if group in env else _read(env, outvars[group[0]]) for group in sums]
            return results + [_read(env, a) for a in self.jaxpr.outvars[len(self.ops) :]]

        closed = jax.make_jaxpr(run)(shapes, [*map(_compat.shape_dtype_of, rows)])
        jaxpr, held = _compat.split_constants(_compat.dce(closed))
        return Rolled(jaxpr, held, stacks, sums)

    def evaluate(self, env: dict[Any, Any]) -> None:
        """Compute all variables that are used outside of the runs."""
        runs = {self.forward.first: self.forward, self.backward.first: self.backward}
        position = 0
        while position < len(self.jaxpr.eqns):
            if position in runs:
                self.scan(runs[position], env)
                position = runs[position].end
                continue
            eqn = self.jaxpr.eqns[position]
            with _compat.source_of(eqn):
                env |= zip(
                    eqn.outvars, _compat.bind(eqn, eqn.params, *(_read(env, a) for a in eqn.invars)), strict=True
                )
            position += 1

    def scan(self, run: Run, env: dict[Any, Any]) -> None:
        """Compute the blocks of a run as a scan; write what is used outside of it."""
        is_backward = run is self.backward
        carries, slices = run.of_kind("carry"), run.of_kind("slices")
        exits = [
            (j, k) for j, eqn in enumerate(run.block) for k in range(len(eqn.outvars)) if self.is_stacked(run, (j, k))
        ]
        entries = [] if is_backward else [c for c in carries if self.is_entry_taken(c)]

        def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
            known: dict[Hashable, Any] = {c.key: x for c, x in zip(carries, carry, strict=True)}
            known |= {s.key: x for s, x in zip(slices, xs, strict=True)}
            for j, (eqn, operands) in enumerate(zip(run.block, run.operands, strict=True)):
                values = [self.value(o, known, env) for o in operands]
                with _compat.source_of(eqn):
                    made = _compat.bind(eqn, eqn.params, *values)
                known |= {(j, k): x for k, x in enumerate(made)}
            return [known[c.made] for c in carries], ([known[e] for e in exits], [known[c.key] for c in entries])

        heavy = max(run.block, key=lambda eqn: sum(nbytes(v.aval) for v in eqn.outvars))
        with _compat.source_of(heavy):
            start = [_typed(env, c.atoms[0]) for c in carries]
            stacks = [self.stack_of(s.atoms[::-1] if is_backward else s.atoms, env) for s in slices]
            last, (stacked, entered) = lax.scan(body, start, stacks, length=run.count, reverse=is_backward)
        for c, x in zip(carries, last, strict=True):
            env[run.variables(c.made)[-1]] = x
        for c, x in zip(entries, entered, strict=True):
            env["entry", c.made] = x
        for result, x in zip(exits, stacked, strict=True):
            env["exit", is_backward, result] = x
            if (is_backward, result) in self.stacked_sums:
                env[self.stacked_sums[is_backward, result]] = x
            for layer, var in enumerate(self.by_layer(run, result)):
                if var in self.taken | self.outvars and var not in env:
                    env[var] = x[layer]

    def is_stacked(self, run: Run, result: tuple[int, int]) -> bool:
        """Whether a result is used outside of its run, other than as the final carry."""
        variables = run.variables(result)
        used = {v for v in variables if v in self.taken | self.outvars}
        if run is self.forward and any(
            _stacked_by(run, o.atoms[::-1]) == result for o in self.backward.of_kind("slices")
        ):
            return True
        return bool(used - {variables[-1]}) or (bool(used) and all(c.made != result for c in run.of_kind("carry")))

    def is_entry_taken(self, carry: Operand) -> bool:
        """Whether the gradients' blocks take what each block of the forward run takes as this carry."""
        return any(_stacked_by(self.forward, o.atoms[::-1]) == carry for o in self.backward.of_kind("slices"))

    def value(self, operand: Operand, known: dict[Hashable, Any], env: dict[Any, Any]) -> Any:
        """The operand of an equation in a block."""
        if operand.kind == "const":
            return _read(env, operand.atoms[0])
        return known[operand.made if operand.kind == "own" else operand.key]

    def stack_of(self, atoms: Atoms, env: dict[Any, Any]) -> Any:
        """The stack of a value of each layer."""
        if _key(atoms) in self.packed:
            return env[_key(atoms)]
        of_blocks = _stacked_by(self.forward, atoms)
        if isinstance(of_blocks, Operand):
            return env["entry", of_blocks.made]
        if of_blocks is not None:
            return env["exit", False, of_blocks]
        if all(isinstance(a, _compat.Literal) for a in atoms):
            return np.stack([_literal(a) for a in atoms])
        return jnp.stack([_typed(env, a) for a in atoms])


def _is_in(atom: Any, variables: Collection[Any]) -> bool:
    return not isinstance(atom, _compat.Literal) and atom in variables


def _key(atoms: Atoms) -> Hashable:
    return ("stack", *map(atom_key, atoms))


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, _compat.Literal) else env[atom]


def _typed(env: dict[Any, Any], atom: Any) -> Any:
    return jnp.asarray(_literal(atom)) if isinstance(atom, _compat.Literal) else env[atom]


def _literal(atom: Any) -> np.ndarray:
    """The value of a literal, in its type."""
    return np.asarray(atom.val, atom.aval.dtype)
