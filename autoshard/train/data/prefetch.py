"""Load batches onto the devices ahead of their use, in a background thread."""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from autoshard.errors import AutoshardWarning
from autoshard.train.data.constants import PATIENCE_S

Rows = Callable[[range], Mapping[str, np.ndarray]]
Shapes = Mapping[str, jax.ShapeDtypeStruct]
Shardings = Mapping[str, jax.sharding.Sharding]


def place_batch(rows_of: Rows, shapes: Shapes, shardings: Shardings) -> dict[str, jax.Array]:
    """Make one global batch. Each host makes only the rows that its own devices hold.

    Args:
        rows_of: Returns the named arrays for a range of rows of the global batch.
        shapes: Global shape and dtype of each array.
        shardings: Sharding of each array.
    """
    made: dict[tuple[int, int], Mapping[str, np.ndarray]] = {}

    def block(name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> np.ndarray:
        start, stop, _ = index[0].indices(shape[0])
        if (start, stop) not in made:
            made[start, stop] = rows_of(range(start, stop))
        part = made[start, stop][name][(slice(None), *index[1:])]
        # Copy: on CPU the JAX array may alias the buffer, and `rows_of` may reuse that for the next batch.
        return np.array(part, dtype=shapes[name].dtype)

    return {
        name: jax.make_array_from_callback(
            spec.shape,
            shardings[name],
            lambda index, name=name, spec=spec: block(name, spec.shape, index or ()),
        )
        for name, spec in shapes.items()
    }


class Prefetcher:
    """Iterate over `make(item)` for each item; a thread makes up to `depth` of them ahead.

    If `make` raises, the iteration raises the exception in place of that batch. Leaving the `with` block ends the
    thread, even if batches are left. A thread that still waits for a disk after `PATIENCE_S` is left behind, with a
    warning, so that a run can end. `make` must not wait for other processes: it may run at any time beside a step.
    """

    def __init__(self, items: Iterable[Any], make: Callable[[Any], Any], depth: int = 2) -> None:
        """Start the thread.

        Args:
            items: Arguments of `make`, such as step numbers.
            make: Makes one batch; called in the thread.
            depth: Maximum number of batches that wait in the queue.
        """
        self._ready: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=max(depth, 1))
        self._stop = threading.Event()
        self._last: tuple[str, Any] | None = None  # the end or the error, which every later iteration meets again
        self._thread = threading.Thread(target=self._work, args=(items, make), name="prefetch", daemon=True)
        self._thread.start()

    def _work(self, items: Iterable[Any], make: Callable[[Any], Any]) -> None:
        try:
            for item in items:
                if self._stop.is_set() or not self._put(("batch", make(item))):
                    return
            self._put(("end", None))
        except BaseException as error:  # every exception is passed on to the consumer
            self._put(("error", error))

    def _put(self, message: tuple[str, Any]) -> bool:
        while not self._stop.is_set():
            try:
                self._ready.put(message, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches in order."""
        while True:
            kind, value = self._last or self._ready.get()
            if kind != "batch":
                self._last = kind, value
            if kind == "error":
                raise value
            if kind == "end":
                return
            yield value

    def close(self) -> None:
        """End the thread and drop the batches in the queue."""
        self._stop.set()
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            warnings.warn(
                f"the thread that loads batches did not end within {PATIENCE_S:.0f} s, because reading a batch takes "
                "longer; it is left behind and ends with the process",
                AutoshardWarning,
                stacklevel=2,
            )

    def __enter__(self) -> Prefetcher:
        """Return the prefetcher itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread."""
        self.close()
