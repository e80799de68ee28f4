"""Runs a program shard by shard on simulated devices, with the placements and reshards that propagation finds.

Each device holds its own array. A reshard reduces partials and concatenates shards to the global array (copies must
agree), then splits it again. An operator runs on the shards that its rule declares.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard import _compat
from autoshard.sharding.oracle.shards import join_positions
from autoshard.spmdrules import Shard
from autoshard.spmdrules.core.conflict_resolution import Resolution
from autoshard.spmdrules.core.factor_projection import project
from autoshard.spmdrules.core.placement import Placement, Spec
from autoshard.spmdrules.core.rule import POSITIONS
from autoshard.spmdrules.ir.program import Block, Op, build
from autoshard.spmdrules.propagation import control_flow
from autoshard.spmdrules.propagation.walk import Walk

Device = tuple[int, ...]
Shards = dict[Device, Any]
_COMBINE = {"sum": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "or": np.logical_or,
            "and": np.logical_and}  # fmt: skip
_UNEVEN = (0.75, -1.5, 2.25, -0.5, 1.25, 0.25, -2.0, 0.5)


class Simulation(Walk):
    """A walk that also computes the values of the arrays that it places, while it records."""

    def prepare(self, arrays: Sequence[Any]) -> None:
        """Sets the global arguments, which `reset` splits. A partial argument becomes uneven terms of mixed signs."""
        self.env: dict[int, Shards] = {}
        self.used: dict[tuple[int, int], Shards] = {}
        self.loops = {
            id(op.blocks[-1]): (op, control_flow.Loop.of(op)) for op in self.program.ops() if op.name == "scan"
        }
        self.devices = list(itertools.product(*(range(n) for n in self.mesh.values())))
        self.arrays = [np.asarray(x) for x in arrays]

    def reset(self) -> None:
        super().reset()
        for v, x in zip(self.program.inputs, self.arrays, strict=True):
            placement = self.placement(v)
            self.env[v] = {d: self._term(self._split(x, placement, d), placement, d) for d in self.devices}
        self._place_constants(self.program.block)

    def _place_constants(self, block: Block) -> None:
        values = dict(zip(_compat.open_jaxpr(block.jaxpr).constvars, _compat.constants(block.jaxpr), strict=False))
        for op in block.ops:
            for var, v in zip(op.eqn.invars, op.operands, strict=True):
                if v >= 0 and var in values:
                    self.env[v] = {d: self._split(np.asarray(values[var]), self.placement(v), d) for d in self.devices}
            for inner in op.blocks:
                self._place_constants(inner)

    def _at(self, device: Device, axes: Sequence[str]) -> int:
        coordinates = dict(zip(self.mesh, device, strict=True))
        return functools.reduce(lambda at, a: at * self.mesh[a] + coordinates[a], axes, 0)

    def _split(self, x: Any, placement: Placement, device: Device) -> Any:
        for d, axes in enumerate(placement.spec):
            size = x.shape[d] // math.prod(self.mesh[a] for a in axes)
            x = np.take(x, range(self._at(device, axes) * size, (self._at(device, axes) + 1) * size), d)
        return x

    def _term(self, x: Any, placement: Placement, device: Device) -> Any:
        for axis, op in placement.partial:
            at, n = self._at(device, (axis,)), self.mesh[axis]
            if op == "sum":
                x = x * (_UNEVEN[at] if at < n - 1 else 1 - sum(_UNEVEN[: n - 1]))
            elif op in ("max", "min"):
                x = x - {"max": 1.0, "min": -1.0}[op] * (at != x.size % n)
        return x

    def join(self, shards: Shards, placement: Placement) -> Any:
        """Returns the global array."""
        joined = dict(shards)
        for axis, op in placement.partial:
            joined = self._over(joined, axis, lambda pieces, op=op: functools.reduce(_COMBINE[op], pieces))
        for d in range(len(placement.spec)):
            for axis in reversed(placement.spec[d]):
                joined = self._over(joined, axis, lambda pieces, d=d: np.concatenate(pieces, d))
        first = next(iter(joined.values()))
        for other in joined.values():
            np.testing.assert_allclose(other, first, rtol=1e-4, atol=1e-5, err_msg="copies differ")
        return first

    def _over(self, shards: Shards, axis: str, combine: Any) -> Shards:
        k = list(self.mesh).index(axis)
        lines = {
            (*d[:k], *d[k + 1 :]): [shards[(*d[:k], i, *d[k + 1 :])] for i in range(self.mesh[axis])] for d in shards
        }
        joined = {line: combine(pieces) for line, pieces in lines.items()}
        return {d: joined[(*d[:k], *d[k + 1 :])] for d in shards}

    def reshard(self, shards: Shards, old: Placement, new: Placement) -> Shards:
        """Returns the shards after a reshard.

        Along axes over which the array stays partial, each term is resharded alone.
        """
        if old == new:
            return shards
        stays = [axis for axis, _ in new.partial]
        if set(new.partial) - set(old.partial):
            assert not any(np.any(x) for x in shards.values()), "only zeros may become partial"
        after: Shards = {}
        for at in itertools.product(*(range(self.mesh[a]) for a in stays)):
            fixed = dict(zip(stays, at, strict=True))
            same = {d: shards[tuple(fixed.get(a, i) for a, i in zip(self.mesh, d, strict=True))] for d in self.devices}
            whole = self.join(same, Placement(old.spec, tuple(p for p in old.partial if p[0] not in stays)))
            for d in self.devices:
                if all(self._at(d, (a,)) == i for a, i in fixed.items()):
                    after[d] = self._split(whole, new, d)
        return after

    def move(self, op: Op, operand: int, value: int, target: Placement, times: float | None = None) -> None:
        before = self.placement(value)
        super().move(op, operand, value, target, times)
        if not self.recording or value < 0:
            return
        if value not in self.env:
            assert operand < 0, "only a result that is reduced immediately has no value yet"
            return
        here = self.env[value]
        self.used[id(op), operand] = self.reshard(here, before, target)
        self.env[value] = self.reshard(here, before, self.placement(value))

    def apply(self, op: Op) -> Resolution:
        resolution = super().apply(op)
        if not self.recording:
            return resolution
        shards = [self._shard(op, resolution, d) for d in self.devices]
        results: list[Shards] = [{} for _ in op.results]
        for device, shard in zip(self.devices, shards, strict=True):
            for r, value in enumerate(self._run(op, shard, device)):
                results[r][device] = np.asarray(value) if not _is_key(value) else value
        for v, value, placement in zip(op.results, results, resolution.results, strict=True):
            if any(how in POSITIONS for _, how in placement.partial):
                value, placement = self._reduce_positions(op, resolution, value, placement)
            self.env[v] = self.reshard(value, placement, self.placement(v))
        return resolution

    def _reduce_positions(
        self, op: Op, resolution: Resolution, positions: Shards, placement: Placement
    ) -> tuple[Shards, Placement]:
        """Reduces the positions that shards found, by comparing the values at them."""
        assert op.rule is not None
        operand, dims = self.join(self.used[id(op), 0], resolution.operands[0]), op.rule.operands[0]
        factors = project(op.rule, dims, resolution.operands[0].spec, self.mesh)
        for d, axes in enumerate(placement.spec):
            for axis in reversed(axes):
                positions = self._over(positions, axis, lambda pieces, d=d: np.concatenate(pieces, d))
        for axis, how in placement.partial:
            join = functools.partial(join_positions, op=how, operand=operand, dims=dims, name=factors[axis])
            positions = self._over(positions, axis, join)
        after = Placement(placement.spec)
        return {d: self._split(x, after, d) for d, x in positions.items()}, after

    def _shard(self, op: Op, resolution: Resolution, device: Device) -> Shard:
        rule = op.rule
        assert rule is not None
        axes: dict[str, list[str]] = {}
        placements = (*resolution.operands, *resolution.results)
        for dims, placement in zip((*rule.operands, *rule.results), placements, strict=True):
            projected = project(rule, dims, placement.spec, self.mesh)
            assert list(projected) == [a for dim in placement.spec for a in dim], (
                "every axis of a placement shards a factor"
            )
            for axis, factor in projected.items():
                if axis not in axes.setdefault(factor, []):
                    axes[factor].append(axis)
        counts = {f: math.prod(self.mesh[a] for a in over) for f, over in axes.items()}
        return Shard(rule, counts, {f: self._at(device, over) for f, over in axes.items()})

    def _run(self, op: Op, shard: Shard, device: Device) -> list[Any]:
        atoms = enumerate(zip(op.eqn.invars, op.operands, strict=True))
        args = [atom.val if v < 0 else self.used[id(op), i][device] for i, (atom, v) in atoms]
        args = [x if _is_key(x) else jnp.asarray(x, a.aval.dtype) for x, a in zip(args, op.eqn.invars, strict=True)]
        if shard.rule.body is not None:
            out = shard.rule.body(shard, *args)
            return list(out) if isinstance(out, (list, tuple)) else [out]
        params = shard.rule.local(op.eqn.params, shard) if shard.rule.local else op.eqn.params
        return _compat.bind(op.eqn, params, *args)

    def enter(self, op: Op, block: Block, first: int = 0) -> None:
        super().enter(op, block, first)
        for i, inner in enumerate(block.inputs, first):
            if i < len(op.operands) and op.operands[i] < 0:
                self.env[inner] = dict.fromkeys(self.devices, np.asarray(op.eqn.invars[i].val))

    def forward(self, block: Block) -> None:
        if self.recording and id(block) in self.loops:
            self._iterate(block)
            return
        super().forward(block)
        for v, atom in zip(block.outputs, _compat.open_jaxpr(block.jaxpr).outvars, strict=True):
            if self.recording and isinstance(atom, _compat.Literal):
                self.env[v] = dict.fromkeys(self.devices, np.asarray(atom.val))

    def _iterate(self, block: Block) -> None:
        op, loop = self.loops[id(block)]
        for carry in loop.carries:
            value = self.used.get((id(op), carry.operand))
            literal = op.eqn.invars[carry.operand]
            self.env[carry.inner] = value or dict.fromkeys(self.devices, np.asarray(getattr(literal, "val", 0)))
        slices = {inner: self.used[id(op), i] for i, _, inner in loop.xs}
        fixed = [self.placement(c.inner) for c in loop.carries]
        sliced = {inner: self.placement(inner) for inner in slices}
        steps = range(op.eqn.params["length"])
        stacked: dict[int, dict[int, Shards]] = {outer: {} for outer, _ in loop.ys}
        for t in reversed(steps) if op.eqn.params["reverse"] else steps:
            for inner, value in slices.items():
                self.env[inner], self.placements[inner] = {d: x[t] for d, x in value.items()}, sliced[inner]
            super().forward(block)
            outs = []
            for carry, placement in zip(loop.carries, fixed, strict=True):
                outs.append(self.reshard(self.env[carry.out], self.placement(carry.out), placement))
            for (outer, inner), _ in zip(loop.ys, range(len(loop.ys)), strict=True):
                stacked[outer][t] = self.env[inner]
            for carry, value, placement in zip(loop.carries, outs, fixed, strict=True):
                self.env[carry.inner] = self.env[carry.result] = value
                self.placements[carry.inner] = placement
        for outer, by_step in stacked.items():
            self.env[outer] = {d: np.stack([by_step[t][d] for t in steps]) for d in self.devices}


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and _compat.is_extended(x.dtype)


def simulate(
    fn: Any,
    args: Sequence[Any],
    inputs: Sequence[Placement],
    mesh: dict[str, int],
    goals: Sequence[Spec | None] | None = None,
    open_args: Sequence[int] = (),
) -> list[Any]:
    """Runs `fn` on simulated shards and returns its global results.

    Args:
        fn: the function.
        args: its arguments.
        inputs: the placements of the arguments.
        mesh: mesh axis -> size.
        goals: the spec requested for each result, None where none is.
        open_args: numbers of the arguments whose placement the walk may choose.
    """
    program = build(jax.make_jaxpr(fn)(*args))
    walk = Simulation(program, mesh, inputs, {program.inputs[i] for i in open_args})
    walk.prepare(args)
    outs = walk.run(goals or [None] * len(program.outputs))
    ends = [
        (walk.reshard(walk.env[v], walk.placement(v), out), out) for v, out in zip(program.outputs, outs, strict=True)
    ]
    return [walk.join(shards, placement) for shards, placement in ends]
