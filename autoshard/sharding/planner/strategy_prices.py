"""Prices one program under several strategies, without making a plan.

A search over programs compares many of them before it plans the best. Tracing and pricing a few layouts takes a
fraction of the time of a plan, which searches all layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard import _compat
from autoshard._gc import paused
from autoshard._shown import shown
from autoshard.errors import PlanError
from autoshard.sharding.layout.fixed_shardings import program_constraints
from autoshard.sharding.machines.device_mesh import MeshLike, find_machine, traced_machine
from autoshard.sharding.machines.kernel_rules import block_rules
from autoshard.sharding.machines.option_requests import OptionRequest, read_request
from autoshard.sharding.offload.rewriting import Offloader
from autoshard.sharding.offload.words import Words
from autoshard.sharding.plan.gather_words import read_gather
from autoshard.sharding.plan.memory_doubt import usable_bytes
from autoshard.sharding.plan.overlap_words import OverlapRequest, read_overlap
from autoshard.sharding.planner.constants import ROUNDING
from autoshard.sharding.planner.problem import PlanningProblem
from autoshard.sharding.program.kernel_records import KernelWord
from autoshard.sharding.program.tracing import trace
from autoshard.sharding.rewrite.kernel_rewriting import with_kernels
from autoshard.sharding.search.candidate import Candidate


@shown
@dataclass(frozen=True)
class StrategyPrice:
    """The estimate of one step under a strategy.

    Attributes:
        step_time_us: microseconds of a step.
        peak_memory_bytes: peak memory of a device.
        compute_us: microseconds of compute, a part of the step.
        host_us: microseconds in which the link to the host is busy.
        host_exposed_us: the part of `host_us` that compute does not hide; a part of the step.
        host_traffic_bytes: bytes that a device exchanges with its host, in both directions.
        host_bytes: bytes of a device that wait in the host's memory at a time.
        fits_host: whether a device may use so many (`Chip.host_limit_bytes`).
    """

    step_time_us: float
    peak_memory_bytes: float
    compute_us: float = 0.0
    host_us: float = 0.0
    host_exposed_us: float = 0.0
    host_traffic_bytes: float = 0.0
    host_bytes: float = 0.0
    fits_host: bool = True

    def beyond(self, other: StrategyPrice) -> StrategyPrice:
        """The same price, with only what it has on the host and on its link beyond another price."""
        names = ("host_us", "host_exposed_us", "host_traffic_bytes", "host_bytes")
        return replace(self, **{name: _more(getattr(self, name), getattr(other, name)) for name in names})


class StrategyPrices:
    """One program on one machine.

    Args:
        fn: the function of pytrees.
        args: its arguments, by shape.
        mesh: see `autoshard.plan`.
        target: see `autoshard.plan`.
        memory_limit_bytes: see `autoshard.plan`.
        fixed: see `autoshard.plan`.
        compiler_options: see `autoshard.plan`.
        gather: see `autoshard.plan`.
        overlap: see `autoshard.plan`.
        kernels: see `autoshard.plan`.
        offload: words of what waits in host memory, see `autoshard.plan`; not `auto`.
        donate_argnums: arguments whose buffers the results may reuse.
    """

    @paused()
    @_compat.classic_scans()
    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        mesh: MeshLike | None = None,
        target: str | None = None,
        memory_limit_bytes: float | None = None,
        fixed: Mapping[str, Any] | None = None,
        compiler_options: OptionRequest | None = None,
        gather: str | None = None,
        overlap: OverlapRequest | None = None,
        kernels: KernelWord = "off",
        offload: Words = (),
        donate_argnums: Sequence[int] = (),
    ):
        self.fixed = fixed or {}
        request = read_request(compiler_options)
        rules = block_rules(mesh, target, request)
        planned = traced_machine(mesh, target)
        traced = trace(fn, args, {}, donate_argnums, machine=planned, block_rules=rules)
        traced = with_kernels(traced, kernels, planned)
        if offload:
            traced = Offloader(traced).rewritten(offload)
        constraints = program_constraints(traced)
        if mesh is None and target is None:
            mesh = _compat.current_mesh()
        machine = find_machine(mesh, target, request)
        words = read_gather(gather), read_overlap(overlap)
        self.problem = PlanningProblem(traced, machine, memory_limit_bytes, constraints, *words)

    @property
    def limit_bytes(self) -> float:
        """Memory of one device."""
        return self.problem.limit

    @property
    def usable_bytes(self) -> float:
        """The memory that the program can use without a slowdown (`memory_doubt`); infinite if there is no limit."""
        return usable_bytes(self.limit_bytes, self.problem.machine.target.chip)

    @property
    def host_limit_bytes(self) -> float:
        """A device's share of its host's memory; infinite if unknown."""
        return self.problem.machine.target.chip.host_limit_bytes

    @property
    def platform(self) -> str:
        """The platform of the machine."""
        return self.problem.machine.target.platform

    @property
    def host_bandwidth(self) -> float:
        """Bytes per second between a device and its host, in one direction; 0 if unknown."""
        return self.problem.machine.target.chip.host_bandwidth

    @property
    def memory_bandwidth(self) -> float:
        """Bytes per second of a device's memory."""
        return self.problem.machine.target.chip.memory_bandwidth

    @paused()
    @_compat.classic_scans()
    def searched(self) -> dict[str, StrategyPrice]:
        """Return the prices of all strategies of a search, fastest first.

        Raises:
            PlanError: nothing can be planned.
        """
        best, others = self.problem.choose(None, {}, self.fixed)
        return {best.name: _price(best)} | {c.name: _price(c) for c in others if c.name != best.name}

    @paused()
    @_compat.classic_scans()
    def of(self, strategies: Iterable[str]) -> dict[str, StrategyPrice]:
        """Return the prices of some strategies. Those that are not possible for this program are left out."""
        return {words: _price(chosen) for words, chosen in self._chosen(strategies)}

    @paused()
    @_compat.classic_scans()
    def specified(self, strategies: Iterable[str]) -> dict[str, StrategyPrice]:
        """Return prices as `of` does, but by words that name the way of attention over a sharded sequence.

        For `cp`, the way depends on the program: `cp:4` can be `ring:4` for one variant of a step, and `gather:4` for
        another one.
        """
        return {chosen.name: _price(chosen) for _, chosen in self._chosen(strategies)}

    def _chosen(self, strategies: Iterable[str]) -> Iterator[tuple[str, Candidate]]:
        for words in strategies:
            try:
                yield words, self.problem.choose(words, {}, self.fixed, only_best=True)[0]
            except PlanError:
                continue


def _more(a: float, b: float) -> float:
    """By how much `a` exceeds `b`; 0 if that may be a rounding error."""
    return a - b if a - b > ROUNDING * a else 0.0


def _price(candidate: Candidate) -> StrategyPrice:
    cost = candidate.cost
    host = cost.host
    return StrategyPrice(
        cost.step_time_us,
        candidate.peak_bytes,
        cost.compute_us,
        host.time_us,
        host.exposed_us,
        host.nbytes,
        candidate.host_bytes,
        candidate.fits_host,
    )
