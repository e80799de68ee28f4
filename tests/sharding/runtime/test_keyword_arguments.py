"""Arguments by keyword: one plan for every way to call a function, and donated as under `jax.jit`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.sharding.runtime.keyword_arguments import by_position, keyword_names
from tests.sharding.programs import assert_close, batch, mlp_state, sgd_step

W, X = jnp.ones((8, 4)), jnp.ones((16, 8))


def step(w: jax.Array, v: jax.Array, *, x: jax.Array) -> Any:
    return w - jnp.mean(x), v * 2, x * 3


def default(w: jax.Array, scale: float = 1.0, v: jax.Array = W) -> Any:
    return w * scale, v + 1


CALLS: list[Callable[..., Any]] = [
    lambda step, w, v, x: step(w, v, x=x),
    lambda step, w, v, x: step(x=x, v=v, w=w),
    lambda step, w, v, x: step(w, x=x, v=v),
]


@pytest.mark.few(6)
@pytest.mark.whole
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("names", [("w",), ("w", "v"), ("x",), ("v", "x")], ids=lambda names: "-".join(names))
def test_donated_arguments_are_those_of_jax_jit(names: tuple[str, ...], call: Callable[..., Any]) -> None:
    fn = jax.jit(step, donate_argnames=names)
    planned = autoshard.auto_shard(fn, plan="dp:8")
    args, kwargs = planned.plan(W, W, x=X).in_shardings()[:2], planned.plan(W, W, x=X).in_shardings()[2]
    for _ in range(2):
        w, v, x = (jax.device_put(y, s) + 0 for y, s in zip((W, W, X), (*args, kwargs["x"]), strict=True))
        want = step(w, v, x=x)
        assert_close(want, call(planned, w, v, x))
        assert [n for n, y in (("w", w), ("v", v), ("x", x)) if y.is_deleted()] == sorted(names, key="wvx".index)
    w, v, x = W + 0, W + 0, X + 0
    call(fn, w, v, x)
    assert [n for n, y in (("w", w), ("v", v), ("x", x)) if y.is_deleted()] == sorted(names, key="wvx".index)


def test_an_argument_after_a_default_is_donated_too() -> None:
    planned = autoshard.auto_shard(default, plan="fsdp:8", donate_argnums=2)
    for _ in range(2):
        v = jax.device_put(W, planned.plan(W, v=W).in_shardings()[1]["v"]) + 0
        assert_close(default(W), planned(W, v=v)[:1] + (W + 1,))
        assert v.is_deleted()


def test_a_plan_with_donated_keywords_runs_and_is_measured() -> None:
    fn = jax.jit(step, donate_argnames=("x",))
    run = autoshard.plan(fn, W, W, x=X, plan="dp:8").jit()
    for _ in range(2):
        assert_close(step(W, W, x=X), run(W, W, x=X + 0))
    measured = autoshard.plan(fn, W, W, x=X, measure=1)
    assert measured.measured


def test_all_ways_to_call_have_one_plan() -> None:
    planned = autoshard.auto_shard(sgd_step, plan="fsdp:8", donate_argnums=0)
    state, _ = planned(params=mlp_state(), x=batch())
    first = planned.planned()
    state, _ = planned(state, x=batch())
    state, _ = planned(state, batch())
    assert planned.planned() is first and len(first.traced.state) == 3
    assert [leaf.path for leaf in planned.plan(params=state, x=batch()).inputs][0].startswith("0/")


def test_only_parameters_without_a_gap_are_passed_by_position() -> None:
    def only(a: Any, /, b: Any, *, c: Any = 0) -> Any:
        return a, b, c

    assert keyword_names(only) == ("", "b") and keyword_names(lambda *args, **kwargs: 0) == ()
    assert by_position((), {"a": 1, "b": 2}, keyword_names(only)) == ((), {"a": 1, "b": 2})
    assert by_position((1,), {"b": 2, "c": 3}, keyword_names(only)) == ((1, 2), {"c": 3})
    assert by_position((1,), {"c": 3}, ("a", "b", "c")) == ((1,), {"c": 3})
    assert by_position((1, 2), {"a": 3}, ("a", "b")) == ((1, 2), {"a": 3})  # the call raises
    with pytest.raises(TypeError, match="multiple values"):
        autoshard.auto_shard(default, plan="fsdp:8")(W, w=W)
