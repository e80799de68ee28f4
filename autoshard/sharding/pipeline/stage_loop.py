"""Writes the loop over the ticks of a schedule.

A value on stages has a leading dimension of N stages, which a mesh axis shards. The layers of all stages are one
`jax.vmap` over it. The loop carries what each stage has computed for the next one, the slots of waiting values, and the
sums. What is not on stages, such as the head, is computed by all devices together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard import _compat
from autoshard.sharding.microbatches.accumulation import COMBINE, neutral, wide
from autoshard.sharding.pipeline import slots
from autoshard.sharding.pipeline.loop_state import USED_BY, WAITING, StageMoves, at_stage
from autoshard.sharding.pipeline.microbatch_values import Env, MicrobatchValues
from autoshard.sharding.pipeline.schedules import (
    AFTER,
    BACKWARD,
    BEFORE,
    FORWARD,
    IDLE,
    MIDDLE,
    RECOMPUTE,
    WEIGHTS,
    Schedule,
)
from autoshard.sharding.pipeline.split_backward import split_backward
from autoshard.sharding.pipeline.stage_cut import NotStaged, StageCut
from autoshard.sharding.pipeline.stage_inputs import StageInputs
from autoshard.sharding.pipeline.stage_layers import StageLayers
from autoshard.sharding.pipeline.stage_stacks import StageStacks
from autoshard.sharding.pipeline.tick_tables import always_write, tick_tables
from autoshard.spmdrules.families.stacked.stages import read_layer, read_slots, write_one, write_slots

State = dict[str, Any]


class StageLoop:
    """Runs the microbatches of a program through its stages.

    Args:
        cut: the program of one microbatch, cut.
        schedule: the ticks.
        ops: result of the program -> the operation that combines its terms. Results that are not in it are rows.
        rows: for each of the microbatch's inputs after the first, which is its number, the rows of all microbatches
            `[M, ...]`.
        whole: the program's other inputs.
        separate: stack of layers among these inputs -> the separate values of its layers.
        gathers_once: whether the layers of each stage are gathered before the loop, see `StageLayers`.
    """

    def __init__(
        self,
        cut: StageCut,
        schedule: Schedule,
        ops: Mapping[Any, str],
        rows: Sequence[Any],
        whole: Sequence[Any],
        separate: Mapping[Any, Sequence[Any]],
        *,
        gathers_once: bool = False,
    ):
        self.cut, self.schedule, self.ops = cut, schedule, ops
        self.values = MicrobatchValues(cut, rows, whole)
        self.stages = schedule.stages
        self.first, self.last = 0, schedule.stages - 1
        self.stacks = StageStacks(cut.forward.layers, schedule.stages, schedule.chunks)
        self.chunked = schedule.chunks > 1
        self.reverse = cut.forward.reverse  # the first stage has the last layers
        if self.reverse:
            self.first, self.last = self.last, self.first
        self.moves = StageMoves(schedule, self.reverse)
        self.early, self.late = bool(schedule.lead(BEFORE)), bool(schedule.lead(AFTER))
        forward_done = schedule.ticks[FORWARD][schedule.chunks - 1 :: schedule.chunks, -1:]
        self.inputs = StageInputs(cut, schedule)
        slots.check_moves(cut, waits=not self.inputs.recompute)
        later = bool((schedule.ticks[MIDDLE] != forward_done).any())
        self.waits = later and not self.inputs.recompute  # the middle takes what left the last stage in an earlier tick
        residuals = {*cut.backward.slices}
        self.residuals = [v for v in cut.forward.stacked if v in residuals]
        self.waiting_residuals = [] if self.inputs.recompute else self.residuals
        self.layers = StageLayers(
            cut, self.values, self.stacks, self.residuals, separate, gathers_once=gathers_once
        ).run
        self.always: set[str] = set()  # the waiting values of which every stage writes a slot in each tick
        self.halves = split_backward(cut) if WEIGHTS in schedule.ticks else None
        if self.halves and cut.after_stacks:
            raise NotStaged(
                f"schedule {schedule.name!r} computes gradients of weights last, but another operator takes those of "
                f"{cut.backward.place} in each microbatch; use '1f1b'"
            )
        self.waiting = {
            name: (made, [p for p in taken if p in schedule.ticks]) for name, (made, taken) in WAITING.items()
        }
        self.slots = {name: schedule.slots(made, taken) for name, (made, taken) in self.waiting.items() if taken}

    def run(self, apart: Collection[Any]) -> Env:
        """Return the results of the program, over all microbatches: sums, and rows `[M, ...]`.

        Args:
            apart: the sums whose layers are wanted as L arrays `[...]` in place of a stack.
        """
        state: State = {}
        tables = tick_tables(self.schedule, self.waiting, self.slots, self.reverse)
        self.always = always_write(self.schedule, self.waiting, tables)
        for count, phases in self.schedule.periods:
            parts = [part for _, _, of_phase in phases for part in of_phase]
            state |= self.initial(parts, state)
            start, end = phases[0][0], phases[-1][1]
            within = [(a - start, b - start, of_phase) for a, b, of_phase in phases]
            ticks = {name: table[start : start + count * (end - start)] for name, table in tables.items()}
            if count == 1:
                state = self.run_phases(state, ticks, within)
                continue
            of_period = {name: table.reshape(count, end - start, *table.shape[1:]) for name, table in ticks.items()}
            used = [name for name in state if self.uses(name, parts)]

            def period(carry: State, ticks: Env, within: Sequence[Any] = within) -> tuple[State, None]:
                return self.run_phases(carry, ticks, within), None

            carried, _ = lax.scan(period, {name: state[name] for name in used}, jax.tree.map(jnp.asarray, of_period))
            state |= carried
        found: Env = {}
        for name in ("forward_sums", "middle", "backward_sums", "after"):
            found |= zip(self.results_of(name), state.get(name, ()), strict=True)
        found = {var: x.astype(var.aval.dtype) if var in self.ops else x for var, x in found.items()}
        for var in (*self.results_of("forward_sums"), *self.results_of("backward_sums")):
            found[var] = (self.stacks.collect_separate if var in apart else self.stacks.collect)(found[var])
        return found

    def run_phases(self, state: State, ticks: Env, phases: Sequence[tuple[int, int, Sequence[str]]]) -> State:
        """Run phases one after another; return the new state.

        Args:
            state: what the loop carries, with all that these phases use.
            ticks: the tables of these phases, see `tick_tables`.
            phases: the first tick, the end and the parts of each.
        """
        for start, end, parts in phases:

            def tick(carry: State, row: Env, parts: Sequence[str] = parts) -> tuple[State, None]:
                return self.tick(carry, row, parts), None

            used = {name: x for name, x in state.items() if self.uses(name, parts)}
            carried, _ = lax.scan(tick, used, {name: jnp.asarray(table[start:end]) for name, table in ticks.items()})
            state = state | carried
        return state

    # --- what the loop carries ---

    def results_of(self, name: str) -> list[Any]:
        """The results of the program that are accumulated in an entry of the state."""
        results = [*dict.fromkeys(v for v in self.cut.jaxpr.outvars if not isinstance(v, _compat.Literal))]
        if name == "forward_sums":
            return [v for v in self.cut.forward.stacked if v in self.ops and v in results]
        if name == "backward_sums":
            return [v for v in self.cut.backward.stacked if v in self.ops and v in results]
        return self.cut.in_middle if name == "middle" else self.cut.in_after

    def uses(self, name: str, parts: Sequence[str]) -> bool:
        """Whether parts read or write an entry of the state."""
        return any(part in parts for part in USED_BY[name])

    def initial(self, parts: Sequence[str], state: State) -> State:
        """Return the entries of the state that parts need and that do not exist yet."""
        cut = self.cut
        made: dict[str, Callable[[], Any]] = {
            "inlet": lambda: [self.zeros(v) for v in (*cut.forward.carry, *cut.forth) if self.early],
            "forward": lambda: [self.zeros(v, staged=True) for v in (*cut.forward.carry, *cut.forth)],
            "backward": lambda: [self.zeros(v, staged=True) for v in (*cut.backward.carry, *cut.back)],
            "residuals": lambda: self.empty_slots("residuals", self.waiting_residuals),
            "inputs": lambda: self.inputs.empty(self.slots, self.stages),
            "middle_stacks": lambda: self.empty_slots("middle_stacks", cut.middle_stacks),
            "after_stacks": lambda: self.empty_slots("after_stacks", cut.after_stacks),
            "for_weights": lambda: self.empty_slots("for_weights", self.halves.waiting) if self.halves else [],
            "outlet": lambda: [
                jnp.zeros((self.slots["outlet"].count, *v.aval.shape), v.aval.dtype)
                for v in (*cut.forward.carried, *cut.forth) if self.waits
            ],
        }  # fmt: skip
        for name in ("forward_sums", "middle", "backward_sums", "after"):
            made[name] = lambda name=name: [self.start(v, name) for v in self.results_of(name)]
        return {name: make() for name, make in made.items() if name not in state and self.uses(name, parts)}

    def zeros(self, atom: Any, staged: bool = False) -> Any:
        """Return zeros for a value, `[N, ...]` if it is on stages."""
        return jnp.zeros((*([self.stages] if staged else []), *atom.aval.shape), atom.aval.dtype)

    def empty_slots(self, name: str, variables: Sequence[Any]) -> list[Any]:
        """Return zeros `[S, N, layers of a stage, ...]`.

        The variables are stacks of layers. Those of `for_weights` are values of one layer.
        """
        if not variables:
            return []
        count, layers = self.slots[name].count, (self.cut.forward.layers,) * (name == "for_weights")
        shapes = [self.stacks.shape((*layers, *v.aval.shape)) for v in variables]
        always = name in self.always
        return [slots.empty_slots(count, shape, v, always) for v, shape in zip(variables, shapes, strict=True)]

    def start(self, var: Any, name: str) -> Any:
        """Return the identity element that a sum starts from, or zeros for the rows of all microbatches."""
        shape = self.stacks.shape_of_sums(var.aval.shape) if name.endswith("_sums") else var.aval.shape
        if var in self.ops:
            return neutral(self.ops[var], shape, wide(var.aval.dtype))
        return jnp.zeros((self.schedule.microbatches, *shape), var.aval.dtype)

    # --- one tick ---

    def tick(self, state: State, row: Env, parts: Sequence[str]) -> State:
        """Run some parts; return the new state."""
        state = dict(state)
        at_end: Env = {}
        if AFTER in parts and self.late:  # it takes what the tick before left
            self.after_part(state, row)
        first = self.before_part(row) if BEFORE in parts else []
        if FORWARD in parts:
            at_end = self.forward_part(state, row, first)
        if first and self.early:
            state["inlet"] = first
        start: list[Any] = []
        recomputed: Env = {}
        if RECOMPUTE in parts:
            recomputed, leaving = self.inputs.run_again(state["inputs"], row, self.layers)
            at_end = self.at_end(leaving)
        if MIDDLE in parts:
            start = self.middle_part(state, row, at_end)
        with _compat.line_of(self.cut.backward.eqn):
            if BACKWARD in parts:
                self.backward_part(state, row, start, recomputed)
            at_start = self.after_part(state, row) if AFTER in parts and not self.late else []
        if self.moves.at_end:
            state |= {
                name: self.moves.sent(state[name], name, at_start) for name in (FORWARD, BACKWARD) if name in parts
            }
        if WEIGHTS in parts:
            self.weights_part(state, row)
        return state

    def before_part(self, row: Env) -> list[Any]:
        """Compute what the first stage begins with."""
        return self.values.computed([*self.cut.forward.carry, *self.cut.forth], self.values.inputs_of(row[BEFORE][0]))

    def forward_part(self, state: State, row: Env, first: Sequence[Any]) -> Env:
        """Run a forward part on each stage; the first one begins with `first`. Return the results of the last one."""
        cut, stack = self.cut, self.cut.forward
        moved = self.moves.received(state["forward"], state["inlet"] if self.early else first, row, FORWARD)
        known = dict(zip(cut.forth, moved[len(stack.carry) :], strict=True))
        chunk = row.get(f"{FORWARD} chunk")
        carried, stacked = self.layers(stack, row[FORWARD], known, moved[: len(stack.carry)], {}, chunk=chunk)
        state["forward"] = [*carried, *moved[len(stack.carry) :]]
        made = dict(zip(stack.stacked, stacked, strict=True))
        state["inputs"] = self.inputs.kept(state["inputs"], moved, row)
        for name, kept in (("residuals", self.waiting_residuals), ("middle_stacks", cut.middle_stacks)):
            if name not in self.slots:
                continue
            index = row[f"{name} {FORWARD}"]
            always = name in self.always
            state[name] = [slots.write(s, made[v], index, always) for s, v in zip(state[name], kept, strict=True)]
        self.add_on_stages(state, "forward_sums", made, row, FORWARD)
        at_end = self.at_end(state["forward"])
        if self.waits:
            index = row[f"outlet {FORWARD}"][self.last]
            state["outlet"] = [write_one(s, x, index) for s, x in zip(state["outlet"], at_end.values(), strict=True)]
        return at_end

    def at_end(self, leaving: Sequence[Any]) -> Env:
        """Return what leaves the last stage, of what leaves each stage."""
        variables = (*self.cut.forward.carried, *self.cut.forth)
        return {v: self.of_stage(x, self.last) for v, x in zip(variables, leaving, strict=True)}

    def middle_part(self, state: State, row: Env, at_end: Env) -> list[Any]:
        """Run the head and its gradient; return what the gradients of the last stage start from.

        Args:
            state: what the loop carries.
            row: the tick's numbers.
            at_end: what left the last stage in this tick. If the middle waits, it takes what left earlier instead.
        """
        cut, number = self.cut, row[MIDDLE][0]
        if self.waits:
            index = row[f"outlet {MIDDLE}"][self.last]
            taken = [lax.dynamic_index_in_dim(s, jnp.maximum(index, 0), 0, keepdims=False) for s in state["outlet"]]
            at_end = dict(zip((*cut.forward.carried, *cut.forth), taken, strict=True))
        known = {**self.values.inputs_of(number), **at_end}
        known |= self.gathered(state, "middle_stacks", cut.middle_stacks, row[f"middle_stacks {MIDDLE}"])
        wanted = [*cut.backward.carry, *cut.back, *cut.in_middle]
        made = self.values.computed(wanted, known)
        starts = len(cut.backward.carry) + len(cut.back)
        self.add(state, "middle", made[starts:], number)
        return made[:starts]

    def backward_part(self, state: State, row: Env, start: Sequence[Any], recomputed: Env) -> None:
        """Run a backward part on each stage; the last one begins with `start`. `recomputed` contains residuals."""
        cut, stack = self.cut, self.cut.backward
        moved = self.moves.received(state["backward"], start, row, BACKWARD)
        index = row[f"residuals {BACKWARD}"]
        waited = zip(self.waiting_residuals, state["residuals"], strict=True)
        slices = {**recomputed, **{v: slots.read(s, index) for v, s in waited}}
        known = dict(zip(cut.back, moved[len(stack.carry) :], strict=True))
        half = self.halves.inputs if self.halves else None
        chunk = row.get(f"{BACKWARD} chunk")
        carried, stacked = self.layers(
            stack, row[BACKWARD], known, moved[: len(stack.carry)], slices, half, chunk=chunk
        )
        state["backward"] = [*carried, *moved[len(stack.carry) :]]
        if self.halves:
            index = row[f"for_weights {BACKWARD}"]
            always = "for_weights" in self.always
            state["for_weights"] = [
                slots.write(s, x, index, always) for s, x in zip(state["for_weights"], stacked, strict=True)
            ]
            return
        made = dict(zip(stack.stacked, stacked, strict=True))
        written = row[f"after_stacks {BACKWARD}"]
        state["after_stacks"] = [
            write_slots(s, made[v], written) for s, v in zip(state["after_stacks"], cut.after_stacks, strict=True)
        ]
        self.add_on_stages(state, "backward_sums", made, row, BACKWARD)

    def weights_part(self, state: State, row: Env) -> None:
        """Compute the gradients of each stage's weights, where the backward part has left them out."""
        assert self.halves is not None
        stack, index = self.cut.backward, row[f"residuals {WEIGHTS}"]
        slices = {v: slots.read(s, index) for v, s in zip(self.residuals, state["residuals"], strict=True)}
        waited = [read_slots(s, row[f"for_weights {WEIGHTS}"]) for s in state["for_weights"]]
        chunk = row.get(f"{WEIGHTS} chunk")
        stacked = self.layers(stack, row[WEIGHTS], {}, [], slices, self.halves.weights, waited, chunk)[1]
        self.add_on_stages(state, "backward_sums", dict(zip(stack.stacked, stacked, strict=True)), row, WEIGHTS)

    def after_part(self, state: State, row: Env) -> list[Any]:
        """Compute what needs the gradient of the first stage's input; return this gradient."""
        cut, number = self.cut, row[AFTER][0]
        at_start = [self.of_stage(x, self.first) for x in state["backward"]]
        known = self.values.inputs_of(number) | dict(zip((*cut.backward.carried, *cut.back), at_start, strict=True))
        known |= self.gathered(state, "after_stacks", cut.after_stacks, row[f"after_stacks {AFTER}"])
        self.add(state, "after", self.values.computed(cut.in_after, known), number)
        return at_start

    # --- stages ---

    def of_stage(self, x: Any, stage: int) -> Any:
        """Return the value of one stage: the sum over all stages after the others are set to zero."""
        mine = at_stage(x, stage)
        if x.dtype == jnp.bool_:
            return (x & mine).any(axis=0)
        return jnp.where(mine, x, jnp.zeros_like(x)).sum(axis=0, dtype=x.dtype)

    def gathered(self, state: State, name: str, variables: Sequence[Any], index: Any) -> Env:
        """Return stacks over all layers of one microbatch, from the slots of all stages."""

        def read(slots: Any) -> Any:
            return jnp.stack([read_slots(slots, each) for each in index]) if self.chunked else read_slots(slots, index)

        return {v: self.stacks.collect(read(s)) for v, s in zip(variables, state[name], strict=True)}

    # --- sums and rows ---

    def add(self, state: State, name: str, terms: Sequence[Any], number: Any) -> None:
        """Add a microbatch's terms to sums, and put its rows among those of all. Idle parts change nothing."""
        variables, active = self.results_of(name), number != IDLE
        new = []
        for var, total, x in zip(variables, state[name], terms, strict=True):
            if var in self.ops:
                op = self.ops[var]
                new.append(COMBINE[op](total, jnp.where(active, x, neutral(op, x.shape, x.dtype)).astype(total.dtype)))
            else:
                new.append(write_one(total, x, number))
        state[name] = new

    def add_on_stages(self, state: State, name: str, made: Env, row: Env, part: str) -> None:
        """Add the terms of each stage's layers to sums `[N, layers of a stage, ...]`, `[V, N, ...]` with chunks."""
        new, numbers = [], row[part]
        for var, total, x in ((v, total, made[v]) for v, total in zip(self.results_of(name), state[name], strict=True)):
            op = COMBINE[self.ops[var]]
            if self.chunked:
                chunk = row[f"{part} chunk"]
                new.append(write_slots(total, op(read_layer(total, chunk), x.astype(total.dtype)), chunk))
                continue
            active = (numbers != IDLE).reshape(-1, *[1] * (x.ndim - 1))
            new.append(op(total, jnp.where(active, x, neutral(self.ops[var], x.shape, x.dtype)).astype(total.dtype)))
        state[name] = new
