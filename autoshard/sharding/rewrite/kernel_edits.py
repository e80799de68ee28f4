"""Edits that replace recognised attention with the two operators of a kernel.

    forward    where the program computes the result: `out, log_sum = forward(q, k, v)`
    backward   where it computes the gradients: `d_q, d_k, d_v = gradients(q, k, v, out, log_sum, d_out)`

If both are in one frame (unrolled layers), the backward operator takes the variables of the forward one. In a frame
under `remat2` the forward operator runs again, like everything else there. Otherwise the forward scan stacks `out` and
`log_sum`, and the backward scan takes them slice by slice. The operators that computed the weights are then dead code.

The segments of a mask are computed once, in the outermost frame that has the arrays that they are made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from autoshard.kernels.two_passes import Kernel, forward_pass, gradients_pass
from autoshard.sharding.rewrite.attention_proof import Attention
from autoshard.sharding.rewrite.evaluation import Edit, FrameEdits
from autoshard.sharding.rewrite.masks.array_masks import Row
from autoshard.sharding.rewrite.masks.segment_ids import SegmentMask
from autoshard.sharding.rewrite.slices import Refused
from autoshard.sharding.rewrite.values import Frame, Graph, Value


def edit_attention(edits: FrameEdits, graph: Graph, one: Attention, kernel: Kernel, number: int) -> None:
    """Add the edits of one attention to those of a program. If it raises, `edits` are unchanged.

    Raises:
        Refused: the operands are not available where the operators are inserted.
    """
    plan = _Placement(edits, graph, one, kernel, number)
    plan.place()
    for path, position, edit in plan.edits:
        edits.at(path).before.setdefault(position, []).append(edit)
    for path, position in plan.skipped:
        edits.at(path).skipped.add(position)
    for path, keys in plan.exports:
        edits.at(path).exports += keys
    for path, keys in plan.imports:
        edits.at(path).imports += keys


class _Placement:
    """Where the operators of one attention are inserted."""

    def __init__(self, edits: FrameEdits, graph: Graph, one: Attention, kernel: Kernel, number: int):
        self.known, self.graph, self.one = edits, graph, one
        self.kernel: Kernel = kernel
        self.keys = ("out", number), ("log_sum", number)
        self.carried: tuple[Any, ...] | None = None  # the keys of segments that the backward scan takes slice by slice
        self.edits: list[tuple[tuple[int, ...], int, Edit]] = []
        self.skipped: list[tuple[tuple[int, ...], int]] = []
        self.exports: list[tuple[tuple[int, ...], list[Any]]] = []
        self.imports: list[tuple[tuple[int, ...], list[Any]]] = []

    def place(self) -> None:
        one = self.one
        forward = self.graph.computing(one.out)
        if not forward:
            raise Refused("no equation computes its result")
        frames = {frame: position for frame, position in reversed(forward)}
        if any(frame.is_in_call for frame in frames):
            raise Refused("it is in a function with a derivative or shardings of its own")
        if one.gradients is None:
            for frame, position in frames.items():
                self.forward(frame, position, writes_out=True)
            return
        frame, first, positions = self.backward_place()
        recomputed = frame.kind == "remat2" or frame in frames
        for each, position in frames.items():
            if each is frame and position > first:
                raise Refused("its gradients come before its result")
            self.forward(each, position, writes_out=True)
        if recomputed and frame not in frames:
            self.forward(frame, first, writes_out=False)
        elif not recomputed:
            self.carry_over(frames, frame, first)
        self.backward(frame, first, positions)

    def backward_place(self) -> tuple[Frame, int, list[int]]:
        """Return the frame of the gradients, the position of their operator, and the equations that it replaces."""
        assert self.one.gradients is not None
        places = [self.graph.computing(value) for value in self.one.gradients.present]
        if any(len(some) != 1 for some in places) or len({some[0][0] for some in places}) != 1:
            raise Refused("its gradients are computed in several places")
        frame = places[0][0][0]
        if frame.is_in_call:
            raise Refused("its gradients are in a function with a derivative or shardings of its own")
        positions = [some[0][1] for some in places]
        return frame, min(positions), positions

    def variables(self, frame: Frame, values: Sequence[Value], before: int) -> list[Any]:
        """Return the variables of a frame that hold some values before an equation."""
        found = []
        for value in values:
            place = frame.places.get(value)
            if place is None or place[0] >= before:
                raise Refused(f"{value.aval.dtype}{list(value.shape)} is not available where the kernel has to run")
            found.append(place[1])
        return found

    def forward(self, frame: Frame, position: int, *, writes_out: bool) -> None:
        found, out = self.one.found, self.one.out
        reads = self.variables(frame, (found.q, found.k, found.v), position)
        compute = partial(_forward, self.kernel, self.one)
        eqn = frame.jaxpr.eqns[position] if writes_out else out.eqn
        writes = (*([frame.jaxpr.eqns[position].outvars[0]] if writes_out else [("unused", self.keys)]), *self.keys)
        segments = self.segments(frame, position)
        self.edits.append((frame.path, position, Edit((*reads, *segments), writes, compute, eqn)))
        if writes_out:
            self.skipped.append((frame.path, position))

    def backward(self, frame: Frame, first: int, positions: Sequence[int]) -> None:
        found, gradients = self.one.found, self.one.gradients
        assert gradients is not None
        reads = self.variables(frame, (found.q, found.k, found.v, gradients.d_out), first)
        writes = tuple(frame.jaxpr.eqns[position].outvars[0] for position in positions)
        compute = partial(_backward, self.kernel, self.one)
        segments = self.segments(frame, first) if self.carried is None else self.carried
        edit = Edit((*reads, *self.keys, *segments), writes, compute, frame.jaxpr.eqns[first])
        self.edits.append((frame.path, first, edit))
        self.skipped += [(frame.path, position) for position in positions]

    def segments(self, frame: Frame, position: int) -> tuple[Any, ...]:
        """Return the keys of the segments of queries and keys, for a use before an equation; none without segments."""
        if self.one.segments is None:
            return ()
        made, found = segments_edit(self.one.segments, frame, position)
        earlier = [(found.path, at, edit) for at, edits in self.known.at(found.path).before.items() for edit in edits]
        if not any(
            (path, edit.writes) == (found.path, made[1].writes) and at <= made[0]
            for path, at, edit in (*earlier, *self.edits)
        ):
            self.edits.append((found.path, *made))
        return made[1].writes

    def carry_over(self, forward: dict[Frame, int], backward: Frame, first: int) -> None:
        """Make the forward scan stack `out` and `log_sum`, and the backward scan take them.

        If only the forward scan has the arrays from which a mask's segments are made, it stacks the segments, too.
        """
        sources = [f for f in forward if f.kind == "scan" and f.parent is backward.parent]
        if backward.kind != "scan" or len(sources) != 1 or sources[0].path > backward.path:
            raise Refused("its forward and backward pass are not in a pair of scans")
        keys: list[Any] = [*self.keys]
        if self.one.segments is not None:
            try:
                segments_edit(self.one.segments, backward, first)
            except Refused:
                (_, edit), made_in = segments_edit(self.one.segments, sources[0], forward[sources[0]])
                if made_in is not sources[0]:
                    raise
                self.carried = edit.writes
                keys += edit.writes
        self.exports.append((sources[0].path, keys))
        self.imports.append((backward.path, keys))


def segments_edit(mask: SegmentMask, frame: Frame, position: int) -> tuple[tuple[int, Edit], Frame]:
    """Return the edit that computes the segments of a mask, with its position, and the frame in which it has to be.

    Args:
        mask: the mask.
        frame: the frame that uses them.
        position: the position of the equation before which it uses them.

    Raises:
        Refused: the arrays of the mask are not available there.
    """
    chain = [(frame, position)]
    while (parent := chain[0][0].parent) is not None:
        chain.insert(0, (parent, chain[0][0].path[-1]))
    known: dict[Value, Any] = {}
    for each, at in chain:
        for base in mask.bases:
            if base not in known and (place := each.places.get(base)) is not None and place[0] < at:
                known[base] = place[1]
        if len(known) == len(mask.bases):
            reads = tuple(known[base] for base in mask.bases)
            # Equal masks have equal keys, so layers share their segments.
            writes = tuple(("segments", side, each.path, _name(mask)) for side in ("queries", "keys"))
            return (at, Edit(reads, writes, mask.segments, each.jaxpr.eqns[at])), each
    missing = next(base for base in mask.bases if base not in known)
    raise Refused(f"its mask's {missing.aval.dtype}{list(missing.shape)} is not available where the kernel has to run")


def _name(mask: SegmentMask) -> Any:
    """Return what masks with equal segments share."""
    axes = {each: n for n, each in enumerate((*mask.batch, mask.queries, mask.keys))}

    def name(row: Row) -> Any:
        return row.base.number, tuple(axes.get(each, -1) for each in row.base_index)

    return mask.shape, tuple((term.kind, term.is_positive, *map(name, term.rows)) for term in mask.terms)


def _forward(kernel: Kernel, one: Attention, q: Any, k: Any, v: Any, *segments: Any) -> tuple[Any, ...]:
    """Return the result in the program's order of dimensions, and the two arrays that the backward operator takes."""
    folded = [one.folds[name].fold(x) for name, x in zip("qkv", (q, k, v), strict=True)]
    out, log_sum = forward_pass(one.passes(kernel), *folded, *segments)
    return one.folds["out"].unfold(out, one.out.shape).astype(one.out.aval.dtype), out, log_sum


def _backward(kernel: Kernel, one: Attention, *arrays: Any) -> list[Any]:
    q, k, v, d_out = (one.folds[n].fold(x) for n, x in zip(("q", "k", "v", "d_out"), arrays[:4], strict=True))
    out, log_sum, *segments = arrays[4:]
    made = gradients_pass(one.passes(kernel), q, k, v, out, log_sum, d_out, *segments)
    assert one.gradients is not None
    wanted = zip(("d_q", "d_k", "d_v"), (one.gradients.d_q, one.gradients.d_k, one.gradients.d_v), made, strict=True)
    return [
        one.folds[name].unfold(x, value.shape).astype(value.aval.dtype)
        for name, value, x in wanted
        if value is not None
    ]
