"""States that are not the usual nest of sharded float arrays."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.ckpt import Checkpointer, MismatchError
from autoshard.ckpt.compare import compare


def test_names_with_a_slash(tmp_path: Path) -> None:
    state: Any = {"a/b": jnp.ones(2), "a": {"b": jnp.zeros(2)}}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.save(2, state | {"a": {"b": jnp.full(2, 5.0)}})
        checkpoints.save(3, state | {"a/b": jnp.full(2, 5.0)}, block=True)
        for found in (checkpoints.restore(1, like=state), checkpoints.restore(1)):
            np.testing.assert_array_equal(found["a/b"], np.ones(2))
            np.testing.assert_array_equal(found["a"]["b"], np.zeros(2))
        for later in (2, 3):
            told = compare(checkpoints.describe(1), checkpoints.describe(later))
            assert told.same == 1 and told.values == ("a/b",) and not told.equal
        with pytest.raises(MismatchError, match="a/b and a/b both become c"):
            checkpoints.restore(1, like={"c": jnp.ones(2)}, rename={"a/b": "c"})
