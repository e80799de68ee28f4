"""The outcome of a search without a plan that is fast enough."""

from __future__ import annotations


class TooSlow(Exception):  # noqa: N818 - an outcome, which the search handles itself
    """No plan of a program is fast enough.

    Attributes:
        least_us: a lower bound of the microseconds of a step.
        is_final: whether more microbatches do not help either.
    """

    def __init__(self, least_us: float = 0.0, is_final: bool = False):
        super().__init__(least_us, is_final)  # which a copy gets, too
        self.least_us, self.is_final = least_us, is_final
