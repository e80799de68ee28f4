"""Products in these tests have the highest precision."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def highest_precision() -> Iterator[None]:
    """Keep XLA:TPU from gathering 16 bits of parameters in float32, so that tests can count their bytes."""
    with jax.default_matmul_precision("highest"):
        yield
