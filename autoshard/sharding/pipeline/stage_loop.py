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
import numpy as np
from jax import lax

from autoshard import _compat
from autoshard.sharding.microbatches.accumulation import COMBINE, neutral, wide
from autoshard.sharding.pipeline.hoisted_casts import CAST
from autoshard.sharding.pipeline.microbatch_values import Env, MicrobatchValues
from autoshard.sharding.pipeline.schedules import AFTER, BACKWARD, BEFORE, FORWARD, IDLE, MIDDLE, WEIGHTS, Schedule
from autoshard.sharding.pipeline.split_backward import Body, split_backward
from autoshard.sharding.pipeline.stage_cut import NotStaged, Stack, StageCut
from autoshard.sharding.pipeline.stage_stacks import StageStacks
from autoshard.sharding.rewrite.evaluation import scan_layers
from autoshard.spmdrules.families.stages import read_slots, shift_stages, write_one, write_slots

WAITING = {
    "residuals": (FORWARD, (BACKWARD, WEIGHTS)),
    "middle_stacks": (FORWARD, (MIDDLE,)),
    "outlet": (FORWARD, (MIDDLE,)),
    "for_weights": (BACKWARD, (WEIGHTS,)),
    "after_stacks": (BACKWARD, (AFTER,)),
}
"""Values that wait in slots: the part that makes them, and the parts that take them."""
USED_BY = {
    **{name: (made, *taken) for name, (made, taken) in WAITING.items()},
    "forward": (FORWARD,), "backward": (BACKWARD,), "forward_sums": (FORWARD,), "middle": (MIDDLE,),
    "backward_sums": (BACKWARD, WEIGHTS), "after": (AFTER,),
}  # fmt: skip
"""What the loop carries, and the parts that read or write it."""

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
    """

    def __init__(
        self,
        cut: StageCut,
        schedule: Schedule,
        ops: Mapping[Any, str],
        rows: Sequence[Any],
        whole: Sequence[Any],
        separate: Mapping[Any, Sequence[Any]],
    ):
        self.cut, self.schedule, self.ops = cut, schedule, ops
        self.values = MicrobatchValues(cut, rows, whole)
        self.stages = schedule.stages
        self.first, self.last = 0, schedule.stages - 1
        self.stacks = StageStacks(cut.forward.layers, schedule.stages)
        self.reverse = cut.forward.reverse  # the first stage has the last layers
        if self.reverse:
            self.first, self.last = self.last, self.first
        forward_done = schedule.ticks[FORWARD][:, -1:]
        self.waits = bool((schedule.ticks[MIDDLE] != forward_done).any())  # the middle runs in a later tick
        residuals = {*cut.backward.slices}
        self.residuals = [v for v in cut.forward.stacked if v in residuals]
        given = [v for stack in (cut.forward, cut.backward) for v in stack.slices if v not in self.residuals]
        # If the layers do not divide, stages exchange them. They do so once, not in each tick. Casts run once, too.
        once = [v for v in dict.fromkeys(given) if not self.stacks.even or v in cut.made]
        self.given: Env = {v: self.layers_of(v, separate) for v in once}
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
        tables = self.tables()
        for start, end, parts in self.schedule.phases:
            state |= self.initial(parts, state)
            used = [name for name in state if self.uses(name, parts)]

            def tick(carry: State, row: Env, parts: Sequence[str] = parts) -> tuple[State, None]:
                return self.tick(carry, row, parts), None

            ticks = {name: jnp.asarray(table[start:end]) for name, table in tables.items()}
            carried, _ = lax.scan(tick, {name: state[name] for name in used}, ticks)
            state |= carried
        found: Env = {}
        for name in ("forward_sums", "middle", "backward_sums", "after"):
            found |= zip(self.results_of(name), state.get(name, ()), strict=True)
        found = {var: x.astype(var.aval.dtype) if var in self.ops else x for var, x in found.items()}
        for var in (*self.results_of("forward_sums"), *self.results_of("backward_sums")):
            found[var] = (self.stacks.collect_separate if var in apart else self.stacks.collect)(found[var])
        return found

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
            "forward": lambda: [self.zeros(v, staged=True) for v in (*cut.forward.carry, *cut.forth)],
            "backward": lambda: [self.zeros(v, staged=True) for v in (*cut.backward.carry, *cut.back)],
            "residuals": lambda: self.empty_slots("residuals", self.residuals),
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
        count, layers = self.slots[name].count, (self.cut.backward.layers,) * (name == "for_weights")
        shapes = [self.stacks.shape((*layers, *v.aval.shape)) for v in variables]
        return [jnp.zeros((count, *shape), v.aval.dtype) for v, shape in zip(variables, shapes, strict=True)]

    def start(self, var: Any, name: str) -> Any:
        """Return the identity element that a sum starts from, or zeros for the rows of all microbatches."""
        shape = self.stacks.shape(var.aval.shape) if name.endswith("_sums") else var.aval.shape
        if var in self.ops:
            return neutral(self.ops[var], shape, wide(var.aval.dtype))
        return jnp.zeros((self.schedule.microbatches, *shape), var.aval.dtype)

    # --- one tick ---

    def tables(self) -> dict[str, np.ndarray]:
        """For each tick: the microbatch of each part, and the slots that each part reads or writes in the state.

        The columns are the stages, in the order of their layers, as in arrays.
        """
        schedule, found = self.schedule, {}
        for part in schedule.ticks:
            found[part] = schedule.working(part)
        for name, (made, taken) in self.waiting.items():
            for part in (made, *taken) if taken else ():
                found[f"{name} {part}"] = schedule.slot_table(self.slots[name], made, part)
        return {name: table[:, ::-1] for name, table in found.items()} if self.reverse else found

    def tick(self, state: State, row: Env, parts: Sequence[str]) -> State:
        """Run some parts; return the new state."""
        state = dict(state)
        at_end: Env = {}
        if FORWARD in parts:
            at_end = self.forward_part(state, row)
        start: list[Any] = []
        if MIDDLE in parts:
            start = self.middle_part(state, row, at_end)
        if BACKWARD in parts:
            self.backward_part(state, row, start)
            self.after_part(state, row)
        if WEIGHTS in parts:
            self.weights_part(state, row)
        return state

    def forward_part(self, state: State, row: Env) -> Env:
        """Run a forward part on each stage; return what leaves the last one."""
        cut, stack = self.cut, self.cut.forward
        variables = [*stack.carry, *cut.forth]
        first = self.values.computed(variables, self.values.inputs_of(row[BEFORE][0]))
        moved = [shift_stages(x, edge, backward=self.reverse) for x, edge in zip(state["forward"], first, strict=True)]
        known = dict(zip(cut.forth, moved[len(stack.carry) :], strict=True))
        carried, stacked = self.layers(stack, row[FORWARD], known, moved[: len(stack.carry)], {})
        state["forward"] = [*carried, *moved[len(stack.carry) :]]
        made = dict(zip(stack.stacked, stacked, strict=True))
        for name, kept in (("residuals", self.residuals), ("middle_stacks", cut.middle_stacks)):
            index = row[f"{name} {FORWARD}"]
            state[name] = [write_slots(s, made[v], index) for s, v in zip(state[name], kept, strict=True)]
        self.add_on_stages(state, "forward_sums", made, row[FORWARD])
        at_end = dict(zip((*stack.carried, *cut.forth), (self.of_stage(x, self.last) for x in state["forward"]),
                          strict=True))  # fmt: skip
        if self.waits:
            index = row[f"outlet {FORWARD}"][self.last]
            state["outlet"] = [write_one(s, x, index) for s, x in zip(state["outlet"], at_end.values(), strict=True)]
        return at_end

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

    def backward_part(self, state: State, row: Env, start: Sequence[Any]) -> None:
        """Run a backward part on each stage; the last one begins with `start`."""
        cut, stack = self.cut, self.cut.backward
        variables = [*stack.carry, *cut.back]
        edges = start or [self.zeros(v) for v in variables]
        on = not self.reverse
        moved = [shift_stages(x, edge, backward=on) for x, edge in zip(state["backward"], edges, strict=True)]
        index = row[f"residuals {BACKWARD}"]
        slices = {v: read_slots(s, index) for v, s in zip(self.residuals, state["residuals"], strict=True)}
        known = dict(zip(cut.back, moved[len(stack.carry) :], strict=True))
        half = self.halves.inputs if self.halves else None
        carried, stacked = self.layers(stack, row[BACKWARD], known, moved[: len(stack.carry)], slices, half)
        state["backward"] = [*carried, *moved[len(stack.carry) :]]
        if self.halves:
            index = row[f"for_weights {BACKWARD}"]
            state["for_weights"] = [
                write_slots(s, x, index) for s, x in zip(state["for_weights"], stacked, strict=True)
            ]
            return
        made = dict(zip(stack.stacked, stacked, strict=True))
        written = row[f"after_stacks {BACKWARD}"]
        state["after_stacks"] = [
            write_slots(s, made[v], written) for s, v in zip(state["after_stacks"], cut.after_stacks, strict=True)
        ]
        self.add_on_stages(state, "backward_sums", made, row[BACKWARD])

    def weights_part(self, state: State, row: Env) -> None:
        """Compute the gradients of each stage's weights, where the backward part has left them out."""
        assert self.halves is not None
        stack, index = self.cut.backward, row[f"residuals {WEIGHTS}"]
        slices = {v: read_slots(s, index) for v, s in zip(self.residuals, state["residuals"], strict=True)}
        waited = [read_slots(s, row[f"for_weights {WEIGHTS}"]) for s in state["for_weights"]]
        stacked = self.layers(stack, row[WEIGHTS], {}, [], slices, self.halves.weights, waited)[1]
        self.add_on_stages(state, "backward_sums", dict(zip(stack.stacked, stacked, strict=True)), row[WEIGHTS])

    def after_part(self, state: State, row: Env) -> None:
        """Compute what needs the gradient of the first stage's input."""
        cut, number = self.cut, row[AFTER][0]
        at_start = [self.of_stage(x, self.first) for x in state["backward"]]
        known = self.values.inputs_of(number) | dict(zip((*cut.backward.carried, *cut.back), at_start, strict=True))
        known |= self.gathered(state, "after_stacks", cut.after_stacks, row[f"after_stacks {AFTER}"])
        self.add(state, "after", self.values.computed(cut.in_after, known), number)

    # --- stages ---

    def layers(
        self,
        stack: Stack,
        numbers: Any,
        known: Env,
        carry: Sequence[Any],
        slices: Env,
        body: Body | None = None,
        waited: Sequence[Any] = (),
    ) -> tuple[list[Any], list[Any]]:
        """Run each stage's layers.

        Args:
            stack: the scan over all layers.
            numbers: the microbatch of each stage, `[N]`.
            known: values on stages that the layers take, besides those that are computed from the microbatch's rows.
            carry: the carry of each stage, `[N, ...]`.
            slices: variable -> the array of which each stage's layers take slices, `[N, layers of a stage, ...]`. It
                has those arrays that differ between microbatches.
            body: what runs instead of the scan's body.
            waited: further slices that it takes.

        Returns:
            The final carry `[N, ...]`, and what each stage stacks, `[N, layers of a stage, ...]`.
        """
        eqn, own = stack.eqn, self.cut.own
        varying = [v for v in stack.consts if v in own and v not in known]
        sides = {**known, **dict(zip(varying, self.values.on_stages(varying, numbers), strict=True))}
        whole = [v for v in stack.slices if v not in slices]
        slices = {
            **slices,
            **{v: self.given[v] if v in self.given else self.layers_of(v, {}) for v in whole},
        }
        names = [*dict.fromkeys(v for v in stack.consts if v in sides)]
        shared = {
            v: self.values.of_shared(v) for v in stack.consts if v not in sides and not isinstance(v, _compat.Literal)
        }
        options = {name: eqn.params[name] for name in ("reverse", "unroll")}
        run = body or _compat.jaxpr_as_function(eqn.params["jaxpr"])
        n_carry, own_slots = len(carry), self.stacks.own_slots()

        def stage(of_stage: Sequence[Any], carry: Sequence[Any], xs: Sequence[Any]) -> tuple[Any, Any]:
            known = {**shared, **dict(zip(names, of_stage, strict=True))}
            consts = [v.val if isinstance(v, _compat.Literal) else known[v] for v in stack.consts]

            def layer(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
                x, own = x[: len(x) - len(own_slots)], x[len(x) - len(own_slots) :]
                results = run(*consts, *carry, *x)
                return self.stacks.carried(own, results[:n_carry], carry), results[n_carry:]

            return scan_layers(layer, [*carry], [*xs], length=self.stacks.slots, **options)

        with _compat.source_of(eqn):
            carried, made = jax.vmap(stage)(
                [sides[v] for v in names], [*carry], [*(slices[v] for v in stack.slices), *waited, *own_slots]
            )
        return list(carried), list(made)

    def layers_of(self, var: Any, separate: Mapping[Any, Sequence[Any]]) -> Any:
        """Return the layers of each stage, `[N, K, ...]`, of a stack that all microbatches share."""
        if var in separate:
            return self.stacks.spread_separate(separate[var])
        made = self.cut.made.get(var)
        if made is not None and made.primitive is CAST and made.invars[0] in separate:
            return self.stacks.spread_separate([x.astype(var.aval.dtype) for x in separate[made.invars[0]]])
        return self.stacks.spread(self.values.of_shared(var))

    def of_stage(self, x: Any, stage: int) -> Any:
        """Return the value of one stage: the sum over all stages after the others are set to zero."""
        mine = (jnp.arange(self.stages) == stage).reshape(-1, *[1] * (x.ndim - 1))
        if x.dtype == jnp.bool_:
            return (x & mine).any(axis=0)
        return jnp.where(mine, x, jnp.zeros_like(x)).sum(axis=0, dtype=x.dtype)

    def gathered(self, state: State, name: str, variables: Sequence[Any], index: Any) -> Env:
        """Return stacks over all layers of one microbatch, from the slots of all stages."""
        return {v: self.stacks.collect(read_slots(s, index)) for v, s in zip(variables, state[name], strict=True)}

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

    def add_on_stages(self, state: State, name: str, made: Env, numbers: Any) -> None:
        """Add the terms of each stage's layers to sums `[N, layers of a stage, ...]`."""
        new = []
        for var, total in zip(self.results_of(name), state[name], strict=True):
            x, op = made[var], self.ops[var]
            active = (numbers != IDLE).reshape(-1, *[1] * (x.ndim - 1))
            new.append(COMBINE[op](total, jnp.where(active, x, neutral(op, x.shape, x.dtype)).astype(total.dtype)))
        state[name] = new
