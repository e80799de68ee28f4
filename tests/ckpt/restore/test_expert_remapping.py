"""Restoring experts by number on any mesh: selecting, copying, and making experts of dense layers."""

import contextlib
import dataclasses
import functools
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import autoshard
from autoshard.ckpt import Checkpointer, CheckpointError, MismatchError
from autoshard.models import workload
from autoshard.models.moe import EXPERT_DIMS
from autoshard.train.step.ema import EmaConfig, averaged_params
from autoshard.train.step.optimizer import OptimizerConfig, make_optimizer
from autoshard.train.step.train_state import make_program
from autoshard.train.step.train_step import make_train_step
from tests.arrays import array

TINY = workload("mixtral-tiny")
EXPERTS = TINY.config.experts
OPTIMIZER, AVERAGE = make_optimizer(OptimizerConfig(), 1000), EmaConfig(0.9)
PROGRAM = make_program(TINY.build, OPTIMIZER, ema=AVERAGE)


def is_expert(name: str) -> bool:
    return "/experts/" in name


def filled(state: Any, scale: float = 1.0) -> Any:
    """Fill a state's shapes with random numbers, drawn by NumPy, which compiles nothing. Integers are 0."""
    rng = np.random.default_rng(0)

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            assert not leaf.shape
            return jax.random.key(0)
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return array(scale * rng.normal(size=leaf.shape) if is_float else np.zeros(leaf.shape), leaf.dtype)

    return jax.tree.map(fill, state)


@pytest.fixture(scope="module")
def state() -> Any:
    """Return a train state of a MoE in which all leaves and all experts differ."""
    return filled(PROGRAM.abstract_state())


@pytest.fixture(scope="module")
def plans() -> dict[str, Any]:
    subject = make_train_step(PROGRAM, optax.constant_schedule(1e-3)), PROGRAM.abstract_state(), TINY.batch()
    return {words: autoshard.plan(*subject, plan=words) for words in ("dp:2 ep:4", "fsdp:4 ep:2")}


@pytest.fixture
def saved(tmp_path: Path, state: Any, plans: dict[str, Any]) -> Checkpointer:
    placed = jax.device_put(state, plans["dp:2 ep:4"].in_shardings()[0])
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, placed, plan=plans["dp:2 ep:4"], expert_dims=EXPERT_DIMS, block=True)
    return checkpoints


def with_names(tree: Any) -> dict[str, Any]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def dims(saved: Checkpointer) -> dict[str, int]:
    return {leaf.name: leaf.expert_dim for leaf in saved.describe().leaves if leaf.expert_dim is not None}


@pytest.mark.slow
def test_a_plan_gives_the_expert_dims_of_weights(plans: dict[str, Any], state: Any, tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, plan=plans["dp:2 ep:4"], block=True)
        assert dims(checkpoints) == {name: 1 for name in with_names(state) if "/experts/w_" in name}


@pytest.mark.slow
def test_expert_dims_of_a_model(saved: Checkpointer, state: Any) -> None:
    """Only weights, their moments and averages, and the router's columns have a dimension of experts."""
    expert_dims = dims(saved)
    names = with_names(state)
    expected = {name for name in names if is_expert(name)}
    assert set(expert_dims) == expected and len(expected) >= 4 * 4 and any(name.startswith("ema/") for name in expected)
    assert all(names[name].shape[dim] == EXPERTS for name, dim in expert_dims.items())
    assert f"{EXPERTS} experts" in str(saved.describe())


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [[0, 3, 7], [5], [7, 0], [*range(EXPERTS), 0, 3]])
def test_some_experts_on_another_mesh(saved: Checkpointer, state: Any, plans: Any, numbers: list[int]) -> None:
    expert_dims = dims(saved)
    whole = with_names(state)
    mesh = jax.tree.leaves(plans["fsdp:4 ep:2"].in_shardings()[0])[0].mesh

    def wanted(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        dim = expert_dims.get(jax.tree_util.keystr(path, simple=True, separator="/"))
        shape = list(leaf.shape)
        if dim is not None:
            shape[dim] = len(numbers)
        spec: list[Any] = [None] * len(shape)
        if dim is not None and len(numbers) % 2 == 0:
            spec[dim] = "ep"
        return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    like = jax.tree_util.tree_map_with_path(wanted, state)
    restored = saved.restore(like=like, experts=numbers)
    jax.tree.map(lambda leaf, want: leaf.sharding == want.sharding or pytest.fail(str(leaf)), restored, like)
    for name, leaf in with_names(restored).items():
        want = np.asarray(whole[name])
        want = np.take(want, numbers, axis=expert_dims[name]) if name in expert_dims else want
        np.testing.assert_array_equal(leaf, want, err_msg=name)
    by_path = with_names(saved.restore(experts=numbers))
    for name, dim in expert_dims.items():
        np.testing.assert_array_equal(by_path[name], np.take(np.asarray(whole[name]), numbers, axis=dim))


@pytest.mark.parametrize("within", [False, True])
def test_some_experts_on_explicit_axes(tmp_path: Path, within: bool) -> None:
    mesh = jax.make_mesh((2, 4), ("ep", "tp"), axis_types=(AxisType.Explicit,) * 2)
    weights = np.arange(8 * 4 * 2, dtype=np.float32).reshape(8, 4, 2)
    sharding = NamedSharding(mesh, PartitionSpec("ep", "tp"))
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, {"experts": weights, "mlp": weights[0]}, expert_dims={"experts": 0})
        like: Any = {"experts": jax.ShapeDtypeStruct((4, 4, 2), np.float32, sharding=sharding)}
        dense: Any = {"new": jax.ShapeDtypeStruct((8, 4, 2), np.float32, sharding=sharding)}
        with jax.set_mesh(mesh) if within else contextlib.nullcontext():
            restored = checkpoints.restore(like=like, experts=[5, 0, 7, 0], partial=True)["experts"]
            copies = checkpoints.restore(like=dense, upcycle={"new": 0}, rename={"mlp": "new"}, partial=True)["new"]
    assert restored.sharding == sharding and copies.sharding == sharding
    np.testing.assert_array_equal(restored, weights[[5, 0, 7, 0]])
    np.testing.assert_array_equal(copies, np.broadcast_to(weights[0], (8, 4, 2)))


def test_all_experts_on_another_degree_of_expert_parallelism(saved: Checkpointer, state: Any, plans: Any) -> None:
    shardings_of_plan = plans["fsdp:4 ep:2"].in_shardings()[0]
    restored = saved.restore(like=state, shardings=shardings_of_plan)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert [leaf.sharding for leaf in jax.tree.leaves(restored)] == jax.tree.leaves(shardings_of_plan)


@pytest.mark.few(1)
@pytest.mark.parametrize("explicit", [False, True])
def test_one_program_for_all_leaves_of_a_shape(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, explicit: bool
) -> None:
    axis_types = (AxisType.Explicit if explicit else AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("ep", "tp"), axis_types=axis_types)
    sharding = NamedSharding(mesh, PartitionSpec("ep"))
    rng = np.random.default_rng(0)
    width = 37 + explicit  # no other test has compiled the programs of these shapes
    state = {f"up{i}": rng.normal(size=(8, width)).astype(np.float32) for i in range(6)}
    state |= {f"dense{i}": rng.normal(size=(width, 3)).astype(np.float32) for i in range(5)}
    of_shape = functools.partial(jax.ShapeDtypeStruct, dtype=np.float32, sharding=sharding)
    like = {name: of_shape((8, width)) for name in state if name[0] == "u"}
    like |= {name: of_shape((8, width, 3)) for name in state if name[0] == "d"}
    numbers = [5, 0, 7, 0, 1, 2, 3, 6]
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state, expert_dims={"up*": 0}, block=True)
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            restored = checkpoints.restore(like=like, experts=numbers, upcycle={"dense*": 0})
        compiled = [one for one in caplog.messages if "Finished XLA compilation of jit(changed)" in one]
    assert len(compiled) == 2, compiled
    for name, leaf in restored.items():
        want = state[name][numbers] if name[0] == "u" else np.broadcast_to(state[name], (8, width, 3))
        np.testing.assert_array_equal(leaf, want, err_msg=name)
        assert leaf.sharding == sharding


def test_experts_that_do_not_exist(saved: Checkpointer, tmp_path: Path, files_of: Any) -> None:
    before = files_of(tmp_path)
    with pytest.raises(CheckpointError, match=f"has no expert {EXPERTS}, -1, its experts are 0 to {EXPERTS - 1}"):
        saved.restore(experts=[0, EXPERTS, -1])
    numbers: Any
    for numbers in ([], [True], [0.0], np.array([[0, 1]])):
        with pytest.raises(CheckpointError, match="it must be a list of numbers such as"):
            saved.restore(experts=numbers)
    with pytest.raises(MismatchError, match="differ"):
        saved.restore(like=saved.restore(), experts=[0, 1])
    assert files_of(tmp_path) == before
    with Checkpointer(tmp_path / "dense") as dense:
        dense.save(0, {"w": jnp.ones((4, 2))}, block=True)
        with pytest.raises(CheckpointError, match="does not give the dimension of experts of its leaves"):
            dense.restore(experts=[0])
        np.testing.assert_array_equal(dense.restore(experts=[0, 2], expert_dims={"w": 0})["w"], np.ones((2, 2)))
        with pytest.raises(CheckpointError, match="'v' matches no leaf"):
            dense.restore(experts=[0], expert_dims={"v": 0})
        with pytest.raises(CheckpointError, match=r"w: float32\[4, 2\] has no dimension 2"):
            dense.save(1, {"w": jnp.ones((4, 2))}, expert_dims={"*": 2})


def test_upcycling_without_a_dense_layer(tmp_path: Path) -> None:
    """Without `rename`, the template's experts would silently keep their values."""
    with Checkpointer(tmp_path) as dense:
        dense.save(0, {"mlp": jnp.ones((4, 2)), "norm": jnp.ones(2)}, block=True)
        like: Any = {"experts": jnp.zeros((3, 4, 2)), "norm": jnp.zeros(2)}
        with pytest.raises(CheckpointError, match="'experts' matches no requested leaf that was saved"):
            dense.restore(like=like, upcycle={"experts": 0}, partial=True)
        upcycled = dense.restore(like=like, upcycle={"experts": 0}, partial=True, rename={"mlp": "experts"})
    np.testing.assert_array_equal(upcycled["experts"], np.ones((3, 4, 2)))


@pytest.mark.whole
def test_a_dense_model_becomes_experts(tmp_path: Path) -> None:
    """Every expert is a copy of the dense layer with its moments and averages, so the outputs are equal."""
    cfg = dataclasses.replace(TINY.config, gpt=dataclasses.replace(TINY.config.gpt, dtype="float32"))
    dense_cfg = dataclasses.replace(cfg.gpt, ffn=cfg.expert_ffn or cfg.gpt.hidden)
    dense_work = dataclasses.replace(workload("llama-tiny"), config=dense_cfg)
    moe_work = dataclasses.replace(TINY, config=cfg)
    dense, moe = (make_program(work.build, OPTIMIZER, ema=AVERAGE) for work in (dense_work, moe_work))
    first = filled(dense.abstract_state(), scale=0.1)
    mean = jax.tree.map(lambda leaf: 3 * leaf, first.params)
    first = dataclasses.replace(
        first,
        opt_state=jax.tree.map(lambda leaf: leaf + 1, first.opt_state),
        ema=dataclasses.replace(first.ema, mean=mean, weight=jnp.float32(1)),
    )
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, first)
        like = filled(moe.abstract_state(), scale=0.2)
        wide = {name: leaf.ndim - 3 for name, leaf in with_names(like).items() if "/experts/w_" in name}
        restored = checkpoints.restore(
            like=like,
            partial=True,
            rename={"*/blocks/mlp": "*/blocks/moe/experts", "*/blocks": "*/blocks/moe"},
            upcycle=wide,
        )
        assert checkpoints.restored is not None
        kept = checkpoints.restored.kept
    assert all("router" in name for name in kept) and len(kept) == 4
    tokens = jnp.arange(32, dtype=jnp.int32).reshape(2, 16)
    for part_of in (lambda state: state.params, lambda state: averaged_params(state.ema, state.params)):
        logits = [
            jax.jit(lambda *parts, program=program: program.model(parts[0], parts[1], parts[2], None)(tokens))(
                part_of(state), state.frozen, state.variables
            )
            for program, state in ((dense, first), (moe, restored))
        ]
        np.testing.assert_allclose(logits[0], logits[1], rtol=1e-4, atol=1e-4)
    copies = {name: leaf for name, leaf in with_names(restored).items() if "/experts/w_" in name}
    assert len(copies) == 4 * 3 and all(np.ptp(np.asarray(leaf), axis=1).max() == 0 for leaf in copies.values())
