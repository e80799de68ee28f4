"""Batches put on the devices ahead of their use, by a background thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

Rows = Callable[[range], Mapping[str, np.ndarray]]
Shapes = Mapping[str, jax.ShapeDtypeStruct]
Shardings = Mapping[str, jax.sharding.Sharding]


def place_batch(rows_of: Rows, shapes: Shapes, shardings: Shardings) -> dict[str, jax.Array]:
    """Make one global batch; this host makes only the rows that its own devices hold.

    Args:
        rows_of: Gives the named arrays of a range of rows of the global batch.
        shapes: Global shape and dtype of each array.
        shardings: Where each array goes.
    """
    made: dict[tuple[int, int], Mapping[str, np.ndarray]] = {}

    def block(name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> np.ndarray:
        start, stop, _ = index[0].indices(shape[0])
        if (start, stop) not in made:
            made[start, stop] = rows_of(range(start, stop))
        part = made[start, stop][name][(slice(None), *index[1:])]
        # A copy of our own: on CPU the array may alias the buffer, and its maker may write into it again.
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
    """Iterates over `make(item)` for each item, made by a thread up to `depth` ahead.

    An exception in the thread is raised at the place in the iteration where its batch would have been.
    Leaving the `with` block ends the thread, whether or not everything was consumed.
    """

    def __init__(self, items: Iterable[Any], make: Callable[[Any], Any], depth: int = 2) -> None:
        """Start the thread.

        Args:
            items: What to make batches of, such as step numbers.
            make: Makes one batch; called in the thread.
            depth: Batches that wait, made but not used.
        """
        self._ready: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=max(depth, 1))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(items, make), name="prefetch", daemon=True)
        self._thread.start()

    def _work(self, items: Iterable[Any], make: Callable[[Any], Any]) -> None:
        try:
            for item in items:
                if self._stop.is_set() or not self._put(("batch", make(item))):
                    return
            self._put(("end", None))
        except BaseException as error:  # forwarded whatever it is: the consumer decides
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
        """The batches in order."""
        while True:
            kind, value = self._ready.get()
            if kind == "error":
                raise value
            if kind == "end":
                return
            yield value

    def close(self) -> None:
        """End the thread and forget what it made."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> Prefetcher:
        """The prefetcher itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread."""
        self.close()
