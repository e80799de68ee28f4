"""Python callbacks in a planned program: how often each kind is called, with which arrays, and what is said of it."""

import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from autoshard import auto_shard, plan
from autoshard.errors import AutoshardWarning, PlanError
from tests.sharding.programs import assert_close

W, X = np.full((8, 8), 0.1, np.float32), np.arange(64, dtype=np.float32).reshape(8, 8)
received: list[tuple[int, ...]] = []


def _on_host(x):
    received.append(np.shape(x))
    return np.asarray(x, np.float32) * 2


def _receive(x):
    received.append(np.shape(x))


def _in_a_loop(x):
    def body(carry, _):
        return io_callback(_on_host, carry, carry, ordered=True) / 2, None

    return jax.lax.scan(body, x, length=3)[0]


def _watched(callback, **options):
    def fn(x):
        callback(_receive, x, **options)
        return x

    return fn


WHOLE, SHARD = (8, 8), (1, 8)
KINDS = {
    "pure_callback": (lambda x: jax.pure_callback(_on_host, x, x), {WHOLE: 1}),
    "io_callback": (lambda x: io_callback(_on_host, x, x), {WHOLE: 1}),
    "io_callback, ordered": (lambda x: io_callback(_on_host, x, x, ordered=True), {WHOLE: 1}),
    "io_callback, in a loop": (_in_a_loop, {WHOLE: 3}),
    "io_callback, no result": (_watched(lambda f, x: io_callback(f, None, x)), {WHOLE: 1}),
    "debug_callback": (_watched(jax.debug.callback), {WHOLE: 1}),
    "debug_callback, partitioned": (_watched(jax.debug.callback, partitioned=True), {SHARD: 8}),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_callback_is_called_as_often_as_the_plan_says(name):
    call, expected = KINDS[name]
    step = lambda w, x: jnp.tanh(call(x * 1) @ w).sum()  # noqa: E731
    received.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AutoshardWarning)
        sharded = auto_shard(step, plan="dp:8")
        actual = sharded(W, X)
        jax.effects_barrier()
    assert Counter(received) == expected
    assert_close(step(W, X), actual)
    primitive = name.partition(",")[0]
    said = [str(each.message) for each in caught if issubclass(each.category, AutoshardWarning)]
    if primitive == "debug_callback":
        assert not said
        return
    text = "runs Python on the host of one device, once, with gathered operands and replicated results"
    assert len(said) == 1 and f"'{primitive}' at " in said[0] and text in said[0] and "repeats" not in said[0]
    (line,) = [line for line in str(sharded.plan(W, X)).splitlines() if primitive in line and "no rule" in line]
    assert line.endswith(text)


@pytest.mark.parametrize("print_or_call", [lambda x: jax.debug.print("{}", x, ordered=True),
                                           lambda x: jax.debug.callback(_receive, x, ordered=True)])  # fmt: skip
def test_ordered_debug_callbacks_need_one_device(print_or_call):
    def step(x):
        print_or_call(x.sum())
        return x * 2

    with pytest.raises(
        PlanError, match=r"debug_\w+ at .*test_callbacks.py:\d+.* is ordered, .* one device only, not on 8"
    ):
        auto_shard(step)(X)
    assert_close(X * 2, plan(step, X, target="cpu:1").jit()(X))
