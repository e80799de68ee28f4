"""What additive prices of variants get wrong, learned from the prices of some."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoshard.train.program.remat_space import Priced


class Guesses:
    """What additive prices say, corrected by what was learned from prices.

    Attributes:
        limit: memory of a device.
        host_limit: its share of its host's memory.
        margins: bytes by which peaks were underestimated, of mixes (True) and of single policies (False).
        mix_factor: the factor by which the time of a mix was underestimated.
        host_factor: the factor by which bytes on the host were underestimated.
    """

    def __init__(self, limit: float, host_limit: float):
        self.limit, self.host_limit = limit, host_limit
        self.mix_factor = self.host_factor = 1.0
        self.margins = {True: 0.0, False: 0.0}

    def fits(self, guess: Priced) -> bool:
        """Whether a guess seems to fit the memory of the device and of its host."""
        fits_device = guess.peak_bytes + self.margins[guess.is_mix] <= self.limit
        return fits_device and self.fits_host(guess)

    def fits_host(self, guess: Priced) -> bool:
        """Whether the offloaded values of a guess seem to fit the host."""
        return guess.host_bytes * self.host_factor <= self.host_limit

    def score_us(self, guess: Priced) -> float:
        """The corrected score."""
        return guess.score_us * (self.mix_factor if guess.is_mix else 1.0)

    def is_worth(self, guess: Priced, most_us: float) -> bool:
        """Whether a guess seems to fit, with a score of at most `most_us`."""
        return self.fits(guess) and self.score_us(guess) <= most_us

    def best(self, guesses: Sequence[Priced]) -> Priced | None:
        """The best of those that seem to fit, or else the leanest; None without guesses."""
        fitting = [each for each in guesses if self.fits(each)]
        if fitting:
            return min(fitting, key=self.score_us)
        return min(guesses, key=lambda each: (not self.fits_host(each), each.peak_bytes), default=None)

    def learn(self, guess: Priced, priced: Priced) -> None:
        """Correct later guesses by a price."""
        if math.isinf(priced.peak_bytes):  # the host's memory is full
            self.host_factor = max(self.host_factor, priced.host_bytes / max(guess.host_bytes, 1.0))
            return
        if priced.peak_bytes > self.limit:
            is_mix = guess.is_mix
            self.margins[is_mix] = max(self.margins[is_mix], priced.peak_bytes - guess.peak_bytes)
        elif guess.is_mix:
            self.mix_factor = max(self.mix_factor, priced.time_us / guess.time_us)
