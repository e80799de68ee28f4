"""Search for what a layer does with each of its named values: recompute it, keep it, or move it to the host.

With n values, two or three actions each, and several numbers of microbatches, there are thousands of programs, and
planning one takes seconds. So only a few are planned:

1. Probes. The program with `full` recomputation is searched once, and its fastest strategies are priced for each number
   of microbatches. `none`, `dots`, and each named value alone on the host are priced under the best of these
   strategies. A price needs a trace, but no search.
2. All choices, and mixes of two policies that alternate over the layers, are priced from the probes (`remat_choice`).
3. The most promising ones that seem to fit are priced themselves, under the same strategies, until enough of them fit
   with room to spare. These prices also correct the additive prices of the others: their memory, and the time of mixes.
4. The best ones are planned, each with a search over all strategies. If none fits, the next ones are.

The plan that is chosen is the fastest of those planned, by the planner's own estimate. Layers that are not stacked are
replaced by stacked ones in steps 1 to 3, because those are traced faster and cost the same.

In a mix, the layers that offload come last. A loop sends a value to the host while its next iteration runs, until that
iteration computes the value again. So transfers have more time if the values are computed late in the loop body.

The time of transfers to the host is less certain than that of compute. So a choice that offloads is ranked as if a part
of its time on the link were exposed. It is planned only if it is then clearly faster than the best choice without.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoshard.errors import PlanError
from autoshard.sharding.machines.constants import BANDWIDTH_REACHED, HOST_BANDWIDTH_REACHED
from autoshard.sharding.plan.memory_doubt import almost_fills, ranked_us
from autoshard.sharding.planner.strategy_prices import StrategyPrice, StrategyPrices
from autoshard.sharding.planner.variants import Attempt
from autoshard.train.program import constants
from autoshard.train.program.remat_choice import Choice, Part, Parts, choices
from autoshard.train.program.remat_guesses import Guesses
from autoshard.train.program.remat_space import Priced, RematSpace

_OF_PLANS = ("plan", "schedule", "microbatches", "measure")  # options without which a program is priced


def remat_search(space: RematSpace) -> Callable[[Sequence[Attempt]], list[dict[str, Any]]]:
    """Make the function that `autoshard.plan` takes as `variants`: the most promising ones, then others if none fits.

    Args:
        space: the variants.
    """
    ranked: list[Priced] = []

    def next_variants(attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
        if not attempts:
            ranked[:] = promising(space)
        tried = [dict(each.keywords) for each in attempts]
        if any(each.fits for each in attempts) or len(tried) >= constants.MOST_PLANNED:
            return []
        return [each.keywords for each in _close([each for each in ranked if each.keywords not in tried])]

    return next_variants


def _close(ranked: Sequence[Priced]) -> list[Priced]:
    """The first variant and those close behind it. A strategy that was not probed may make one of these the fastest."""
    most = ranked[0].score_us * constants.WORTH_PLANNING if ranked else 0.0
    return [each for each in ranked[: constants.PLANNED] if each.score_us <= most]


def promising(space: RematSpace) -> list[Priced]:
    """Return variants that are worth a plan, the best first. If none seems to fit, the leanest come first.

    Raises:
        PlanError: the step cannot be planned.
    """
    probes = _Probes(space)
    if not probes.strategies:  # the requested plan is not possible, and planning says why
        return [Priced("full", probes.first, math.inf, math.inf)]
    fitting, others = _best_priced(probes)
    best = min((each.score_us for each in fitting if not each.offloads), default=math.inf)
    gain = 1 - constants.LEAST_OFFLOAD_GAIN
    worth = [each for each in fitting if not each.offloads or each.score_us < best * gain]
    worth.sort(key=lambda each: each.score_us)
    leanest = sorted(others, key=lambda each: each.peak_bytes)
    return [*worth, *leanest]


class _Probes:
    """The prices that were found so far, and those of choices that follow from them."""

    def __init__(self, space: RematSpace):
        self.space = space
        self.first, *self.more = sorted(space.microbatches)
        base = self.prices("full", self.first)
        self.limit, self.usable_bytes = base.limit_bytes, base.usable_bytes
        self.host_limit, bandwidth = base.host_limit_bytes, base.host_bandwidth
        self.host_us_per_byte = 1e6 / (bandwidth * HOST_BANDWIDTH_REACHED) if bandwidth else 0.0
        self.copy_us_per_byte = 1e6 / (base.memory_bandwidth * BANDWIDTH_REACHED)
        may_offload = bandwidth > 0 and base.platform in constants.OFFLOADING_PLATFORMS
        self.offloads = bool(space.host) or (space.offloads and may_offload)
        of_count = {self.first: base} | {count: self.prices("full", count) for count in self.more}
        self.full = self._full(of_count)
        fastest = dict.fromkeys(itertools.chain.from_iterable(map(self._best_strategies, self.full.values())))
        specified = base.specified(fastest)
        self.strategies = list(specified)
        if not self.strategies:
            return
        self.full[self.first] |= specified
        for count, found in self.full.items():  # strategies that another number of microbatches suggested
            found |= of_count[count].of([words for words in self.strategies if words not in found])
        del base, of_count  # their programs are not needed any more
        self.state = self.full[self.first]
        self.host_limit -= min(price.host_bytes for price in self.state.values())
        self.full = {count: {w: p.beyond(p) for w, p in found.items()} for count, found in self.full.items()}
        self.words = {remat: self.priced(remat, self.first) for remat in constants.REMATS[:-1]}
        self.alone = {name: self.priced(f"host:{name}", self.first) for name in space.names}
        self.names = [name for name, found in self.alone.items() if any(p.host_traffic_bytes for p in found.values())]
        self.host = [name for name in space.host if name in self.names or name not in space.optional]
        if idle := [name for name in self.host or space.host if name not in self.names]:
            raise PlanError(
                f"offload names {', '.join(idle)}, which no backward pass of a layer reads here, so nothing would be "
                f"moved. Leave it out; {', '.join(self.names) or 'no other value'} can wait on the host"
            )

    def prices(self, remat: str, microbatches: int) -> StrategyPrices:
        """Trace a variant."""
        options = {name: value for name, value in self.space.options.items() if name not in _OF_PLANS}
        step, *args = self.space.step(remat, microbatches)
        return StrategyPrices(step, tuple(args), donate_argnums=(0,), **options)

    def priced(self, remat: str, microbatches: int) -> dict[str, StrategyPrice]:
        """Trace a variant, and price it under the probed strategies.

        Figures of the host are those of the layers' values, without the optimizer's state. Under `full`, layers have
        none there.
        """
        found = self.prices(remat, microbatches).of(self.strategies)
        return {words: price.beyond(self.state[words]) for words, price in found.items()}

    def _full(self, of_count: Mapping[int, StrategyPrices]) -> dict[int, dict[str, StrategyPrice]]:
        """Price `full` for each number of microbatches, under the requested strategy or the fastest ones.

        Args:
            of_count: number of microbatches -> the program with `full`.
        """
        requested, base = self.space.options.get("plan"), of_count[self.first]
        if requested is None:
            found = base.searched()
        else:
            found = base.of([requested])
        fastest = sorted(found, key=lambda words: found[words].step_time_us)[: constants.SCREENED_STRATEGIES]
        return {self.first: found} | {count: of_count[count].of(fastest) for count in self.more}

    def _best_strategies(self, found: Mapping[str, StrategyPrice]) -> list[str]:
        """The fastest strategies, the fastest of those that fit, and the leanest."""
        by_time = sorted(found, key=lambda words: found[words].step_time_us)
        fitting = [words for words in by_time if found[words].peak_memory_bytes <= self.limit]
        leanest = min(by_time, key=lambda words: found[words].peak_memory_bytes, default=None)
        return [*by_time[: constants.PROBED_STRATEGIES], *fitting[:1], *([leanest] if leanest else [])]

    def known(self) -> list[Priced]:
        """The variants that were priced themselves."""
        words = {("full", count): found for count, found in self.full.items()}
        words |= {(remat, self.first): found for remat, found in self.words.items()}
        return [self.best(remat, count, found) for (remat, count), found in words.items() if found]

    def best(self, remat: str, microbatches: int, found: Mapping[str, StrategyPrice]) -> Priced:
        """The variant under the fastest strategy that fits, or else under the leanest."""
        fitting = [p for p in found.values() if p.peak_memory_bytes <= self.limit and p.fits_host]
        if fitting:
            p = min(fitting, key=lambda p: ranked_us(p.step_time_us, p.peak_memory_bytes, self.usable_bytes))
        else:
            p = min(found.values(), key=lambda p: p.peak_memory_bytes)
        peak = p.peak_memory_bytes if p.fits_host else math.inf  # fits nowhere
        return Priced(remat, microbatches, p.step_time_us, peak, p.host_us, p.host_bytes, self.usable_bytes)

    def estimated(self) -> list[Priced]:
        """Every choice, word and mix with its additive price, under each strategy that was probed."""
        found: list[Priced] = []
        for count, words in itertools.product(self.full, self.strategies):
            if words not in self.full[count]:
                continue
            pure = self._pure(count, words)
            found += [
                replace(each, strategy=words, usable_bytes=self.usable_bytes) for each in (*pure, *self._mixes(pure))
            ]
        return found

    def _pure(self, count: int, words: str) -> list[Priced]:
        """The variants whose layers all have one policy."""
        full, base = self.full[count][words], self.full[self.first].get(words)
        found = [] if self.space.host else [Priced("full", count, full.step_time_us, full.peak_memory_bytes)]
        if base is None:
            return found
        share = self.first / count
        for remat, prices in {} if self.space.host else self.words.items():
            if p := prices.get(words):
                time_us = full.step_time_us + p.step_time_us - base.step_time_us
                more = (p.peak_memory_bytes - base.peak_memory_bytes) * share
                found.append(Priced(remat, count, time_us, full.peak_memory_bytes + more))
        alone = {name: self.alone[name][words] for name in self.names if words in self.alone[name]}
        values = {
            name: Part(base.step_time_us - self._kept_us(p), p.host_bytes * self.first) for name, p in alone.items()
        }
        parts = Parts(
            full.step_time_us, full.peak_memory_bytes, full.compute_us, values, count,
            self.host_us_per_byte, self.copy_us_per_byte,
        )  # fmt: skip
        must = [name for name in self.host if name in values]
        if len(must) < len(self.host):  # not priced under this strategy
            return found
        host = must or (list(values) if self.offloads else [])
        for choice in choices(list(values), host, must):
            if choice != Choice():
                time_us, peak, busy = parts.price(choice)
                found.append(Priced(choice.remat, count, time_us, peak, 2 * busy, parts.host_bytes(choice)))
                if not must and (busy > parts.hidden_us or parts.host_bytes(choice) > self.host_limit):
                    found += self._partly_offloaded(parts, choice)
        return found

    def _kept_us(self, offloaded: StrategyPrice) -> float:
        """The step time if the values on the host were kept: without the time on the link and without the copies."""
        copies_us = 2 * offloaded.host_bytes * self.first * self.copy_us_per_byte  # of all microbatches, both ways
        return offloaded.step_time_us - offloaded.host_exposed_us - copies_us

    def _partly_offloaded(self, parts: Parts, choice: Choice) -> Iterator[Priced]:
        """Mixes for a choice that exceeds the host's link or memory: some layers offload, and others recompute."""
        others = Choice(keep=choice.keep).remat
        for count, period in constants.SEARCHED_REMAT_MIXES:
            if self.space.layers > period and not self.space.layers % period:
                time_us, peak, busy = parts.price_mix(choice, count / period)
                remat = ",".join([others] * (period - count) + [choice.remat] * count)
                waiting = parts.host_bytes(choice, count / period)
                yield Priced(remat, parts.microbatches, time_us, peak, 2 * busy, waiting)

    def _mixes(self, pure: Sequence[Priced]) -> list[Priced]:
        """Mixes over the layers of two policies: a light one that may exceed the memory, and a slower one that fits.

        Neither is a mix itself.
        """
        front = _front(each for each in pure if "," not in each.remat)
        found = []
        for light, strict in itertools.product(front, front):
            too_large = almost_fills(light.peak_bytes, self.usable_bytes)
            if not too_large or strict.peak_bytes > self.limit or strict.time_us <= light.time_us:
                continue
            for count, period in constants.SEARCHED_REMAT_MIXES:
                if self.space.layers > period and not self.space.layers % period:
                    group = [light] * count + [strict] * (period - count)
                    group.sort(key=lambda each: each.host_bytes)
                    remat = ",".join(each.remat for each in group)
                    share = count / period
                    time_us, peak, host_us, waiting = (
                        share * a + (1 - share) * b
                        for a, b in zip(_figures(light), _figures(strict), strict=True)
                    )  # fmt: skip
                    found.append(Priced(remat, light.microbatches, time_us, peak, host_us, waiting))
        return found


def _figures(each: Priced) -> tuple[float, float, float, float]:
    return each.time_us, each.peak_bytes, each.host_us, each.host_bytes


def _front(pure: Iterable[Priced]) -> list[Priced]:
    """The Pareto front: the variants for which no other has both a better score and a smaller peak."""
    front: list[Priced] = []
    for each in sorted(pure, key=lambda each: (each.score_us, each.peak_bytes)):
        if not front or each.peak_bytes < front[-1].peak_bytes:
            front.append(each)
    return front


def _best_priced(probes: _Probes) -> tuple[list[Priced], list[Priced]]:
    """Price the most promising variants, first those without, then those with values on the host.

    Returns:
        The priced variants that fit, and those that do not.
    """
    known = [] if probes.space.host else probes.known()
    fitting = [each for each in known if each.peak_bytes <= probes.limit]
    others = [each for each in known if each.peak_bytes > probes.limit]
    done = {(each.remat, each.microbatches) for each in known}
    guesses, estimated = Guesses(probes.limit, probes.host_limit), probes.estimated()
    for offloads in (False, True):
        estimates = [each for each in estimated if each.offloads == offloads]
        best = min((each.score_us for each in fitting), default=math.inf)
        most = best * constants.WORTH_PRICING * (1 - constants.LEAST_OFFLOAD_GAIN * offloads)
        found = 0
        for _ in range(constants.MOST_PRICED):
            guess = guesses.best([each for each in estimates if (each.remat, each.microbatches) not in done])
            if guess is None or found >= constants.PRICED_FITTING:
                break
            has_others = bool(fitting) or (probes.offloads and not offloads)  # that may fit, where this one does not
            if has_others and not guesses.is_worth(guess, most):
                break
            done.add((guess.remat, guess.microbatches))
            prices = probes.priced(guess.remat, guess.microbatches)
            if not prices:
                continue
            priced = probes.best(guess.remat, guess.microbatches, prices)
            alike = {words: p for words, p in prices.items() if words == guess.strategy}  # as the guess says
            as_guessed = probes.best(guess.remat, guess.microbatches, alike or prices)
            guesses.learn(guess, as_guessed)
            if priced.peak_bytes <= probes.limit:
                fitting.append(priced)
                found += not almost_fills(as_guessed.peak_bytes, probes.usable_bytes)
                most = min(most, priced.score_us * constants.WORTH_PRICING)
            else:
                others.append(priced)
    return fitting, others
