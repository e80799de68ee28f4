"""Lower bounds of the step time of a pipeline. One bound holds for all ways to run a layout.

The planner first searches a pipeline as it is. Then it tries groups of rows, gathers weights once a step, and changes
how attention runs. The bound of a layout holds for each of these plans:

    step_us >= exposed_us + min(
        sum over stretches of max(kernels_us, hideable_us) + waiting_us    state is moved in each tick
        sum over stretches of kernels_us + late_us)                        state is moved once a step
    late_us  = max(0, (sum over loops of hideable_us + waiting_us) / ticks + hideable_us - kernels_us of the update)

    kernels_us   kernels of the stretch
    exposed_us   collectives of activations
    hideable_us  collectives of parameters and gradients that compute can hide
    waiting_us   collectives of parameters and gradients that it cannot hide
    ticks        at least the number of ticks

The second sum counts only for plans that can have groups of rows. Other plans reduce gradients in each tick. Their
stages may gather weights once a step, so the bound leaves out these gathers.

Each collective has the best links that any device assignment gives it (`best_links`). If attention can run in several
ways, the bound counts the kernels of the fastest way, and no collectives of attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from autoshard.sharding.cost.bounds.least_time import LeastTime, Pricer
from autoshard.sharding.cost.equivalence_classes import OperatorClass
from autoshard.sharding.cost.prices.canonical_layout import CanonicalLayout, Names
from autoshard.sharding.cost.prices.price import Price
from autoshard.sharding.cost.stretches import Stretches
from autoshard.sharding.layout.operator_strategy import Move
from autoshard.sharding.machines.best_links import BestLinks, best_links
from autoshard.sharding.machines.links import Links
from autoshard.sharding.machines.topology import Topology
from autoshard.spmdrules.core.placement import ReshardKind
from autoshard.spmdrules.ir.program import Op


class PipelineTime:
    """Computes lower bounds of the step time of a program that is cut into stages.

    Args:
        classes: the operator classes of the program.
        stretches: its stretches.
        least_us: see `LeastTime`.
        has_ways: for each class, whether it is attention that can run over a sharded sequence in several ways.
        topology: the devices.
        hides: whether compute can hide a collective of parameters or gradients on these links.
    """

    def __init__(
        self,
        classes: Sequence[OperatorClass],
        stretches: Stretches,
        least_us: Callable[[OperatorClass], float],
        has_ways: Sequence[bool],
        topology: Topology,
        hides: Callable[[Links], bool],
    ):
        self._has_ways, self._topology, self._hides = has_ways, topology, hides
        self._links: dict[tuple[ReshardKind, int], tuple[BestLinks, bool]] = {}
        self._bounds = LeastTime(classes, stretches, least_us)

    def __call__(
        self,
        canonical: CanonicalLayout,
        price: Pricer,
        is_state: Callable[[Op, Move], bool],
        ways: Callable[[], Sequence[CanonicalLayout]] | None,
        *,
        ticks: float,
        has_groups: bool,
    ) -> Iterator[float]:
        """Yield lower bounds in microseconds, from low to high.

        Args:
            canonical: the layout.
            price: see `LeastTime`.
            is_state: see `LeastTime`.
            ways: returns the layout with each way of attention; None if it shards no sequence.
            ticks: see above.
            has_groups: whether the plan can have groups of rows.
        """

        def price_of_any(number: int, each: OperatorClass, layout: CanonicalLayout) -> tuple[Price, Names]:
            found, names = price(number, each, layout)
            if ways is not None and self._has_ways[number]:
                times = [price(number, each, other)[0].time_us for other in ways()]
                return Price(min([found.time_us, *times]), ()), names
            if has_groups:
                return found, names
            moves = tuple([move for move in found.moves if move.array < 0 or not is_state(each.op, move)])
            return Price(found.time_us, moves), names

        def timer(kind: ReshardKind, axes: tuple[str, ...], local_bytes: float) -> tuple[float, bool]:
            links, hides = self._links_of(kind, math.prod([canonical.mesh[a] for a in axes]))
            return links.time_us(local_bytes), hides

        def total_us(
            kernels: Sequence[float], hideable: Sequence[float], exposed_us: float, waiting_us: float
        ) -> float:
            total = exposed_us + sum(map(max, kernels, hideable)) + waiting_us
            if not has_groups:
                return total
            late_us = max(0.0, (sum(hideable[1:]) + waiting_us) / ticks + hideable[0] - kernels[0])
            return min(total, exposed_us + sum(kernels) + late_us)

        return self._bounds(canonical, timer, price_of_any, is_state, total_us)

    def _links_of(self, kind: ReshardKind, devices: int) -> tuple[BestLinks, bool]:
        """Return the best links of a collective, and whether compute can hide it on any of them."""
        found = self._links.get((kind, devices))
        if found is None:
            links = best_links(self._topology, kind, devices)
            found = self._links[kind, devices] = links, any(map(self._hides, links.links))
        return found
