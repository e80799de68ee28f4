"""Read the verdict of every step, report bad steps, and decide whether the run goes on.

A verdict is read when its step is done: one step late, so that the next step is on its way, and at once before
anything that uses the state. Verdicts are replicated, so all processes decide alike without an exchange.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autoshard._shown import shown
from autoshard.errors import AutoshardError
from autoshard.train.config import run_directory
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.run.incidents.batch_order import BatchOrder
from autoshard.train.run.metrics import Reporter
from autoshard.train.step.guard import GOOD, IN_A_ROW, NON_FINITE, SQUARES, VERDICT
from autoshard.train.step.parameter_paths import path_name

Tree = Any


@shown
class RollbackRequested(Exception):  # noqa: N818  it requests an action; it is no error
    """A bad step asks for the newest checkpoint.

    Attributes:
        bad_step: Steps done when the bad step was among them.
    """

    def __init__(self, bad_step: int = 0) -> None:  # copies of a half-built one give no step
        """Store the step."""
        super().__init__(bad_step)
        self.bad_step = bad_step

    def __str__(self) -> str:
        return f"step {self.bad_step} asks for a rollback"


@shown
@dataclass
class Held:
    """The newest state of a run; None before the first step."""

    state: Tree = None


@contextlib.contextmanager
def freed_on_rollback() -> Iterator[Held]:
    """Free the held state at a rollback, so that the restored one has its memory."""
    held = Held()
    try:
        yield held
    except RollbackRequested:
        for leaf in jax.tree.leaves(held.state):
            leaf.delete()
        raise


@shown
@dataclass(frozen=True)
class _Done:
    step: int
    batch: Mapping[str, jax.Array]
    metrics: Mapping[str, jax.Array]


@shown
class Watch:
    """Reads the verdicts of a run's steps.

    Attributes:
        order: Which batch each step has.
    """

    def __init__(self, config: TrainConfig, params: Tree, order: BatchOrder, reporter: Reporter) -> None:
        """Start without any step.

        Args:
            config: The run.
            params: Its trained parameters, or their shapes.
            order: Which batch each step has.
            reporter: Writes the incidents.
        """
        self.order = order
        self._config, self._guard, self._reporter = config, config.guard, reporter
        self._names = [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
        self._waiting: deque[_Done] = deque()

    def add(self, step: int, batch: Mapping[str, jax.Array], metrics: Mapping[str, jax.Array]) -> None:
        """Add a step that was dispatched; `step` is the number of steps done after it."""
        self._waiting.append(_Done(step, batch, metrics))

    def settle(self, params: Tree, *, but: int = 0) -> None:
        """Read the verdicts of all steps but the newest `but`, and report bad steps. Every process must call this.

        Args:
            params: The parameters after the newest step.
            but: How many of the newest steps are left for later.

        Raises:
            AutoshardError: A bad step ends the run.
            RollbackRequested: A bad step asks for a rollback.
        """
        while len(self._waiting) > but:
            done = self._waiting.popleft()
            verdict = int(done.metrics[VERDICT])
            if verdict == GOOD:
                continue
            self._meet(done, verdict, params)

    def forget(self) -> None:
        """Drop the steps whose verdicts are not read yet, because an earlier state is restored."""
        self._waiting.clear()

    def _meet(self, done: _Done, verdict: int, params: Tree) -> None:
        reaction = self._guard.reaction(verdict)
        metrics = jax.device_get(_replicated(dict(done.metrics)))
        why, leaf = self._why(verdict, metrics), self._first_leaf(metrics)
        found = f"step {done.step}: {why}{self._where(done, leaf, params) if verdict == NON_FINITE else ''}"
        limit = ""
        if reaction == "skip" and int(metrics[IN_A_ROW]) > self._guard.max_skips:
            limit = (
                f"it is bad step {int(metrics[IN_A_ROW])} in a row, and --guard.max-skips is {self._guard.max_skips}"
            )
        elif reaction == "rollback" and len(self.order.rollbacks) >= self._guard.max_rollbacks:
            limit = f"the run was rolled back {len(self.order.rollbacks)} times, which is --guard.max-rollbacks"
        kind = "stop" if limit else reaction
        incident = {"incident": kind, "why": why + (f"; {limit}" if limit else ""), "leaf": leaf}
        self._reporter.incident(done.step, incident | {"batch": self.order.batch_of(done.step - 1)})
        if kind == "stop":
            raise AutoshardError(self._end(found, verdict, limit))
        self._reporter.print(f"{found}; {'the update is left out' if kind == 'skip' else 'the run is rolled back'}")
        if kind == "rollback":
            raise RollbackRequested(done.step)

    def _why(self, verdict: int, metrics: Mapping[str, Any]) -> str:
        loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
        if verdict == NON_FINITE:
            return f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {norm}"
        guard = self._guard
        value, what = (loss, "loss") if guard.spike_of == "loss" else (norm, "gradient norm")
        return (
            f"the {what} is {value:.4g}, more than {guard.spike_factor:g} times the median of the last "
            f"{guard.spike_window} good steps"
        )

    def _first_leaf(self, metrics: Mapping[str, Any]) -> str | None:
        return _first(self._names, np.isfinite(metrics[SQUARES]))

    def _where(self, done: _Done, leaf: str | None, params: Tree) -> str:
        """Say where values are not finite: in gradients, in parameters before the step, in the batch."""
        # The state after a bad step is the one before it, so these are the parameters that the step started from.
        parameter = _first(self._names, _finite(params))
        floats = {name: array for name, array in done.batch.items() if jnp.issubdtype(array.dtype, jnp.floating)}
        array = _first(list(floats), _finite(floats)) if floats else None
        parts = [
            f"the gradient of {leaf} is the first that is not finite" if leaf else "all gradients are finite",
            f"the parameter {parameter} is not finite before the step" if parameter else "all parameters are finite",
            f"the batch has non-finite values in {array}" if array else "the batch is finite",
        ]
        return f": {', '.join(parts)}"

    def _end(self, found: str, verdict: int, limit: str) -> str:
        optimizer, guard = self._config.optimizer, "non-finite" if verdict == NON_FINITE else "spikes"
        remedy = f"try a lower --optimizer.learning-rate (it is {optimizer.learning_rate})"
        if not limit:
            remedy += f", or --guard.{guard} skip or rollback"
        return (
            f"{found}{f'; {limit}' if limit else ''}: {remedy}; checkpoints are in "
            f"{self._reporter.run_dir / run_directory.CHECKPOINTS}"
        )


def _replicated(tree: Tree, of: Callable[[Tree], Tree] = lambda tree: tree) -> Tree:
    """Return a function of arrays, by default the arrays themselves, in full on every device."""
    mesh = jax.tree.leaves(tree)[0].sharding.mesh
    return jax.jit(of, out_shardings=NamedSharding(mesh, PartitionSpec()))(tree)


def _finite(tree: Tree) -> np.ndarray:
    """Return for each leaf of arrays whether all of its values are finite, bool `[leaves]`."""
    return np.asarray(
        _replicated(tree, lambda tree: jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]))
    )


def _first(names: Sequence[str], finite: np.ndarray) -> str | None:
    return next((name for name, good in zip(names, finite, strict=True) if not good), None)
