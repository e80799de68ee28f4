"""At every call, donated arrays that share memory with another argument are copied, and few addresses are read."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autoshard
from autoshard.sharding.lower import separate_arrays
from autoshard.sharding.lower.separate_arrays import SeparateArrays, memory_kinds
from tests.sharding.programs import assert_close

X, W = jnp.ones((16, 8)), jnp.ones((8, 4))


def averaged_step(state: Any, x: jax.Array) -> Any:
    grads = jax.grad(lambda w: jnp.mean((x @ w - 1) ** 2))(state["params"])
    params = state["params"] - 0.1 * grads
    return {"params": params, "ema": 0.9 * state["ema"] + 0.1 * params}


def same_shards(x: jax.Array) -> jax.Array:
    shards = [shard.data for shard in x.addressable_shards]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def equal_sharding(x: jax.Array) -> jax.Array:
    sharding = x.sharding
    assert isinstance(sharding, NamedSharding)
    longer = PartitionSpec(*sharding.spec, *[None] * (x.ndim - len(sharding.spec)))
    shorter = PartitionSpec(*[e for e in sharding.spec if e])
    return jax.device_put(x, NamedSharding(sharding.mesh, shorter if longer == sharding.spec else longer))


@pytest.mark.parametrize("view", [same_shards, equal_sharding])
@pytest.mark.parametrize("words", ["dp:8", "fsdp:8"])
def test_state_that_shares_memory_at_a_later_call(words: str, view: Callable[[jax.Array], jax.Array]) -> None:
    jitted = autoshard.plan(averaged_step, {"params": W, "ema": W}, X, plan=words, donate_argnums=0)
    x = jax.device_put(X, jitted.in_shardings()[1])
    start = jax.device_put({"params": W + 0, "ema": W + 1}, jitted.in_shardings()[0])
    for step in (autoshard.auto_shard(averaged_step, plan=words, donate_argnums=0), jitted.jit()):
        state = step(jax.tree.map(jnp.copy, start), x)
        for _ in range(2):
            shared = view(state["params"])
            assert shared is not state["params"]
            assert separate_arrays.without_shared_memory([state["params"], shared], {0})[0] is not state["params"]
            want = averaged_step({"params": np.asarray(shared), "ema": np.asarray(shared)}, X)
            state = step({"params": state["params"], "ema": shared}, x)
            assert_close(want, state)


def test_an_argument_that_shares_memory_with_donated_state() -> None:
    def step(w: jax.Array, target: jax.Array, x: jax.Array) -> Any:
        return w - 0.1 * (w - target), jnp.sum(x @ w)

    planned = autoshard.auto_shard(step, plan="fsdp:8", donate_argnums=0)
    w, _ = planned(W + 0, W + 1, X)
    for _ in range(2):
        target = same_shards(w)
        want = np.asarray(target)
        w, _ = planned(w, target, X)
        assert_close(want, w)
        assert_close(want, target)  # it is still there


def test_on_one_device_the_call_is_repeated_with_copies() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    planned = autoshard.plan(averaged_step, {"params": W, "ema": W}, X, mesh=mesh, donate_argnums=0).jit()
    for step in (autoshard.auto_shard(averaged_step, mesh=mesh, donate_argnums=0), planned):
        state = step({"params": W + 0, "ema": W + 1}, X)
        for _ in range(2):
            shared = same_shards(state["params"])
            want = averaged_step({"params": np.asarray(shared), "ema": np.asarray(shared)}, X)
            state = step({"params": state["params"], "ema": shared}, X)
            assert_close(want, state)
    assert planned.separate.needed


def placed(x: Any) -> jax.Array:
    return jax.device_put(x, NamedSharding(jax.make_mesh((8,), ("a",)), PartitionSpec("a"))) + 0


def test_addresses_are_read_only_of_new_arrays_of_the_same_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    without_shared_memory = separate_arrays.without_shared_memory

    def counted(leaves: Any, donated: Any) -> Any:
        read.append(len(leaves))
        return without_shared_memory(leaves, donated)

    monkeypatch.setattr(separate_arrays, "without_shared_memory", counted)
    w, v, frozen, other = (placed(W) for _ in range(4))
    batch = placed(X)
    kinds = memory_kinds([w, v, frozen, batch], [x.sharding for x in (w, v, frozen, batch)])
    arrays = SeparateArrays(needed=True)
    arrays.learn([1, frozen, np.ones(3)], {0}, {"w": w, "v": v})
    assert arrays.distinct([w, v, frozen, batch], {0, 1}, kinds) is None  # the batch has another shape
    assert read == [0]
    assert arrays.distinct([w, v, other, batch], {0, 1}, kinds) is None
    assert read == [0, 3]
    assert arrays.distinct([frozen, v, w, batch], {0, 1}, kinds) is None  # a kept array may share memory with another
    assert read == [0, 3, 3]
    shared = same_shards(w)
    found = arrays.distinct([w, shared, frozen, batch], {0, 1}, kinds)
    assert found is not None and found[0] is w and found[1] is not shared and found[2] is frozen
    found = arrays.distinct([w, v, shared, batch], {0, 1}, kinds)
    assert found is not None and found[0] is not w and found[1] is v and found[2] is shared
    assert SeparateArrays(needed=False).distinct([w, shared], {0, 1}, kinds) is None
    found = arrays.distinct([w, w, frozen, batch], {0, 1}, kinds)
    assert found is not None and found[0] is w and found[1] is not w


def test_results_come_back_in_the_same_places_or_in_others(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = SeparateArrays(needed=True)
    for places in ((0, 1), (0, 1), (1, 0), (0, 1)):
        results = [placed(W), placed(W)]
        kinds = memory_kinds(results, [x.sharding for x in results])
        arrays.learn([], frozenset(), results)
        state = [results[i] for i in places]
        with monkeypatch.context() as patched:
            patched.setattr(separate_arrays, "without_shared_memory", None)  # no address is read
            assert arrays.distinct(state, {0, 1}, kinds) is None
        for i in (0, 1):
            found = arrays.distinct(
                [same_shards(state[1]) if i == j else x for j, x in enumerate(state)], {0, 1}, kinds
            )
            assert (found is None) == (i == 1)  # two arrays with the memory of the second result, or one
        assert arrays.distinct(state, {0, 1}, kinds) is None


def test_arrays_are_held_weakly() -> None:
    arrays = SeparateArrays(needed=True)
    arrays.learn([], frozenset(), [placed(W)])
    assert [ref() for ref in arrays.results] == [None]
