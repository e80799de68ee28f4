"""Runs the layers of all stages at once: a scan over the layers of a stage, or of a chunk, on a dimension of stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard import _compat
from autoshard.sharding.layout.constants import EARLY_GATHER_SLICE_BYTES
from autoshard.sharding.pipeline.hoisted_casts import CAST
from autoshard.sharding.pipeline.microbatch_values import Env, MicrobatchValues
from autoshard.sharding.pipeline.slots import layer_on_device
from autoshard.sharding.pipeline.split_backward import Body
from autoshard.sharding.pipeline.stage_cut import Stack, StageCut
from autoshard.sharding.pipeline.stage_stacks import StageStacks
from autoshard.sharding.program.array_sizes import nbytes
from autoshard.sharding.rewrite.evaluation import scan_layers
from autoshard.spmdrules.families.weight_gathers import gather_once


class StageLayers:
    """The layers of each stage.

    Args:
        cut: the program of one microbatch, cut.
        values: computes values of one microbatch.
        stacks: splits stacks of layers into stages.
        residuals: the stacks that differ between microbatches.
        separate: stack of layers -> the separate values of its layers.
        gathers_once: whether the layers of each stage are gathered before the loop over the ticks.
    """

    def __init__(
        self,
        cut: StageCut,
        values: MicrobatchValues,
        stacks: StageStacks,
        residuals: Collection[Any],
        separate: Mapping[Any, Sequence[Any]],
        *,
        gathers_once: bool = False,
    ):
        self.cut, self.values, self.stacks = cut, values, stacks
        given = [v for stack in (cut.forward, cut.backward) for v in stack.slices if v not in residuals]
        # These are done once, not in each tick: exchanges of layers between stages, casts, and gathers of small layers.
        small = EARLY_GATHER_SLICE_BYTES * stacks.layers
        once = [
            v for v in dict.fromkeys(given)
            if gathers_once or not stacks.contiguous or v in cut.made or nbytes(v.aval) <= small
        ]  # fmt: skip
        self.given: Env = {v: self.of_stack(v, separate) for v in once}
        if gathers_once:
            with _compat.source_of(cut.forward.eqn):
                self.given = {v: gather_once(x) if _compat.is_floating(x.dtype) else x for v, x in self.given.items()}

    def of_stack(self, var: Any, separate: Mapping[Any, Sequence[Any]]) -> Any:
        """Return the layers of each stage, `[N, K, ...]`, of a stack that all microbatches share."""
        if var in separate:
            return self.stacks.spread_separate(separate[var])
        made = self.cut.made.get(var)
        if made is not None and made.primitive is CAST and made.invars[0] in separate:
            return self.stacks.spread_separate([x.astype(var.aval.dtype) for x in separate[made.invars[0]]])
        return self.stacks.spread(self.values.of_shared(var))

    def run(
        self,
        stack: Stack,
        numbers: Any,
        known: Env,
        carry: Sequence[Any],
        slices: Env,
        body: Body | None = None,
        waited: Sequence[Any] = (),
        chunk: Any = None,
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
            chunk: the chunk whose layers each stage runs, `[N]`; None if a stage has only one.

        Returns:
            The final carry `[N, ...]`, and what each stage stacks, `[N, layers of a stage or chunk, ...]`.
        """
        eqn, own, stacks = stack.eqn, self.cut.own, self.stacks
        varying = [v for v in stack.consts if v in own and v not in known]
        sides = {**known, **dict(zip(varying, self.values.on_stages(varying, numbers), strict=True))}
        names = [*dict.fromkeys(v for v in stack.consts if v in sides)]
        shared = {
            v: self.values.of_shared(v) for v in stack.consts if v not in sides and not isinstance(v, _compat.Literal)
        }
        run = body or layer_on_device(eqn.params["jaxpr"])
        of_stage = [sides[v] for v in names]
        whole, n_carry = [v for v in stack.slices if v not in slices], len(carry)
        given = [self.given[v] if v in self.given else self.of_stack(v, {}) for v in whole]
        own_slots = stacks.own_slots()
        sliced = [*(slices[v] for v in stack.slices if v in slices), *waited]

        def layer(
            of_stage: Sequence[Any], carry: list[Any], given: list[Any], own: list[Any], sliced: list[Any]
        ) -> tuple[list[Any], list[Any]]:
            known = {**shared, **dict(zip(names, of_stage, strict=True))}
            consts = [v.val if isinstance(v, _compat.Literal) else known[v] for v in stack.consts]
            of_stack, rest = iter(given), iter(sliced)
            xs = [next(rest) if v in slices else next(of_stack) for v in stack.slices]
            results = run(*consts, *carry, *xs, *rest)
            return stacks.carried(own, results[:n_carry], carry), results[n_carry:]

        # With several chunks, layers are read one by one from the stack of all, without a copy of the chunk.
        scanned = [given, own_slots] if chunk is None else [[], []]
        ends = np.cumsum([len(each) for each in scanned]).tolist()

        def layers(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            k, xs = xs[0], xs[1:]
            of_stack, own = xs[: ends[0]], xs[ends[0] : ends[1]]
            if chunk is not None:
                of_stack, own = ([stacks.layer(x, chunk, k) for x in each] for each in (given, own_slots))
            return jax.vmap(layer)(of_stage, carry, of_stack, own, xs[ends[1] :])

        by_layer = [jnp.swapaxes(x, 0, 1) for each in (*scanned, sliced) for x in each]
        options = {name: eqn.params[name] for name in ("reverse", "unroll")}
        with _compat.source_of(eqn):
            numbers = jnp.arange(stacks.slots)
            carried, made = scan_layers(layers, [*carry], [numbers, *by_layer], length=stacks.slots, **options)
        return list(carried), [jnp.swapaxes(x, 0, 1) for x in made]
