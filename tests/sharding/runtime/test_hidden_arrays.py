"""Objects that are not pytrees and hold arrays are refused, and arrays that occur twice can be donated."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import autoshard
from autoshard.errors import AutoshardWarning, PlanError
from autoshard.sharding.program.hidden_arrays import array_inside


class Model:
    def __init__(self, w: Any) -> None:
        self.w = w

    def loss(self, x: jax.Array) -> jax.Array:
        return jnp.mean((x @ self.w) ** 2)


class Holder:
    __slots__ = ("models",)

    def __init__(self, *models: Model) -> None:
        self.models = list(models)


class Compared(Model):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Compared) and np.array_equal(self.w, other.w)

    def __hash__(self) -> int:
        return hash(np.asarray(self.w).tobytes())


@dataclasses.dataclass(frozen=True, eq=False)
class Frozen:
    scale: float
    table: Any


class Words(dict[str, Any]):
    """A mapping that must not be read to its end."""

    def items(self) -> Any:
        yield from ((str(i), [str(i)]) for i in range(100))
        raise AssertionError("read to the end")


X, W = jnp.ones((16, 8)), jnp.ones((8, 4))


@pytest.mark.parametrize(
    ("leaf", "path"),
    [
        (Model(W), ".w"),
        (Model(np.ones(3)), ".w"),
        (Model(W).loss, ".__self__.w"),
        (Holder(Model(None), Model(W)), ".models[1].w"),
        (Model({"a": {"b": W}}), ".w['a']['b']"),
        (Model(None), None),
        (Model(np.array(["a"])), None),
        (Model(Model(W).loss), ".w.__self__.w"),
        (Holder(Model(Words()), Model([Words() for _ in range(2000)]), Model(W)), ".models[2].w"),
        (Model(autoshard.auto_shard(lambda x: x, example=(W,))), None),
        (Compared(W), None),
        (Frozen(1.0, W), None),
        (jax.nn.relu, None),
        (functools.partial(jnp.matmul, W), None),
        (lambda x: x @ W, None),
        (optax.adam(1e-3).update, None),
        (linen.Dense(3).apply, None),
        ("text", None),
        (object(), None),
    ],
)
def test_arrays_in_attributes_are_found(leaf: Any, path: str | None) -> None:
    assert array_inside(leaf) == path


def test_an_argument_that_holds_arrays_is_refused() -> None:
    @autoshard.auto_shard
    def step(model: Any, x: jax.Array) -> jax.Array:
        return model.loss(x)

    with pytest.raises(PlanError, match=r"argument 'model' is a Model, which holds an array at \.w: .*the class Mo"):
        step(Model(W), X)
    with pytest.raises(PlanError, match=r"holds an array at \.w"):
        autoshard.plan(step.__wrapped__, Model(W), X)
    bound = autoshard.auto_shard(lambda loss, x: loss(x))
    with pytest.raises(PlanError, match=r"holds an array at \.__self__\.w: .*Register the class Model"):
        bound(Model(W).loss, X)


@pytest.mark.parametrize("inner", [lambda fn: fn, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_large_arrays_that_are_hidden_too_deep_are_warned_of(inner: Any) -> None:
    def deep(rows: int) -> Model:
        return Model(Model(Model(Model(Model(Model(np.ones((rows, 8), np.float32)))))))

    def step(model: Any, x: jax.Array) -> jax.Array:
        return inner(lambda x: x @ model.w.w.w.w.w.w.T)(x)

    with pytest.warns(AutoshardWarning, match=r"captures 2.00 MiB of arrays, the largest a float32\[8, 65536\]"):
        autoshard.auto_shard(step)(deep(65536), X)
    autoshard.auto_shard(step)(deep(64), X)  # our warnings are errors


def test_a_result_that_holds_a_value_under_trace_is_refused() -> None:
    with pytest.raises(PlanError, match=r"result is a Model, which holds an array at \.w"):
        autoshard.auto_shard(lambda x: Model(x * 2))(X)
    text, doubled = autoshard.auto_shard(lambda x: (Model(np.ones(3)), x * 2))(X)
    assert isinstance(text, Model) and float(doubled[0, 0]) == 2.0
