"""Measure the throughput of a run."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator

import jax

from autoshard.models import flops_per_token
from autoshard.sharding.machines.chips import CHIPS, chip_name
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.program.build import loss_of
from autoshard.train.program.model_flops import step_flops
from autoshard.train.program.planned_step import PlacedStep
from autoshard.train.step.train_state import Program


class Clock:
    """Measure rates between two calls of `rates`, without pauses."""

    def __init__(self, tokens_per_step: int, peak_seconds_per_step: Callable[[], float | None]) -> None:
        """Start the clock.

        Args:
            tokens_per_step: Tokens in a step's batch.
            peak_seconds_per_step: Returns the time of a step at the devices' peak FLOP/s, in seconds; None if unknown.
                It is called once, after the first steps.
        """
        self._tokens = tokens_per_step
        self._peak_seconds_per_step = peak_seconds_per_step
        self._peak_seconds: float | None = None
        self._since = time.perf_counter()
        self._step: int | None = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time spent in the `with` block."""
        before = time.perf_counter()
        yield
        self._since += time.perf_counter() - before

    def rewind(self, step: int) -> None:
        """Measure anew from a step, because the run goes back to it."""
        self._since = time.perf_counter()
        self._step = step if self._step is not None else None

    def rates(self, step: int, steps: int) -> dict[str, float]:
        """Return tokens per second, ETA in seconds, and MFU if the peak is known.

        The first call returns nothing, because its time includes the compilation.

        Args:
            step: Steps done.
            steps: Steps of the run.
        """
        if first := self._step is None:
            self._peak_seconds = self._peak_seconds_per_step()
        now = time.perf_counter()
        seconds = (now - self._since) / max(step - (self._step or 0), 1)
        self._since, self._step = now, step
        if first or seconds <= 0:
            return {}
        rates = {"tokens_per_second": self._tokens / seconds, "eta_seconds": seconds * (steps - step)}
        return rates if self._peak_seconds is None else rates | {"mfu": self._peak_seconds / seconds}


def peak_flops(device_kind: str) -> float | None:
    """Return a device's peak bf16 FLOP/s; None if it is unknown, as for CPUs."""
    chip = chip_name(device_kind)
    return None if chip is None else CHIPS[chip].flops


def tokens_per_step(placed: PlacedStep) -> int:
    """Return the number of tokens in a step's batch."""
    return math.prod(placed.batch_shapes["inputs"].shape)


def peak_seconds_per_step(config: TrainConfig, program: Program, placed: PlacedStep) -> float | None:
    """Return the time of a step at the devices' peak FLOP/s, in seconds; None if the peak is unknown.

    The FLOPs of the built-in model are those of `flops_per_token`, and of other models those of `step_flops`.
    """
    device = jax.devices()[0]
    peak = peak_flops(device.device_kind)
    if peak is None:
        return None
    if config.is_built_in:
        flops = float(flops_per_token(config.gpt) * tokens_per_step(placed))
    else:
        flops = step_flops(program, placed.batch_shapes, loss_of(config), platform=device.platform)
    return flops / (peak * placed.plan.mesh.size)
