"""A run that resumes on another mesh has the losses of a run without the interruption."""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import autoshard
from autoshard.ckpt import Checkpointer
from autoshard.models import workload
from autoshard.models.moe import EXPERT_DIMS
from autoshard.train.step.optimizer import OptimizerConfig, learning_rate_schedule, make_optimizer
from autoshard.train.step.train_state import make_program
from autoshard.train.step.train_step import make_train_step

BEFORE, AFTER = 4, 20  # numbers of steps before and after the checkpoint

DENSE, SORTED, CAPACITY = "llama-tiny", "mixtral-tiny", "moe-tiny"
FROM = {
    DENSE: ("dp:8", "fsdp:8", "dp:2 tp:4", "dp:2 fsdp:2 tp:2"),
    SORTED: ("dp:2 ep:4", "fsdp:4 ep:2", "dp:2 ep:2 tp:2", "ep:8"),
    CAPACITY: ("dp:2 ep:4", "fsdp:2 ep:2 tp:2"),
}
TO = {
    DENSE: ("dp:1", "fsdp:2", "tp:2", "dp:2 tp:2", "fsdp:4", "fsdp:2 tp:2", *FROM[DENSE]),
    SORTED: ("dp:1", "ep:2", "tp:2", "ep:4", "dp:2 ep:2", "fsdp:2 tp:2", *FROM[SORTED]),
    CAPACITY: ("dp:1", "ep:2", "fsdp:2 ep:2", *FROM[CAPACITY]),
}
QUICK = {(DENSE, "dp:2 fsdp:2 tp:2", "fsdp:4")}


CASES = [
    pytest.param(
        *(name, source, target),
        marks=pytest.mark.whole if (name, source, target) in QUICK else pytest.mark.slow,
        id=f"{name}: {source} -> {target}",
    )
    for name, sources in FROM.items()
    for source in sources
    for target in TO[name]
]


def batch_of(name: str, step: int) -> dict[str, np.ndarray]:
    """Return rows of tokens that count up, each row by its own increment, so that there is something to learn."""
    work = workload(name)
    rows, context, vocab = work.batch_size, work.config.context, 128
    rng = np.random.default_rng(step)
    begin, increment = rng.integers(0, vocab, (rows, 1)), rng.integers(1, 4, (rows, 1))
    tokens = ((begin + increment * np.arange(context + 1)) % vocab).astype(np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "mask": np.ones((rows, context), np.float32)}


@functools.cache
def program_of(name: str) -> tuple[Any, Any]:
    settings = OptimizerConfig(learning_rate=1e-2, warmup_steps=2)
    program = make_program(workload(name).build, make_optimizer(settings, BEFORE + AFTER))
    return program, make_train_step(program, learning_rate_schedule(settings, BEFORE + AFTER))


@functools.cache
def placed_step(name: str, words: str) -> tuple[Any, Any, Any]:
    """Return the step on a mesh, its plan, and the shapes and shardings of the state."""
    program, train_step = program_of(name)
    axes = {axis: int(size) for axis, _, size in (word.partition(":") for word in words.split())}
    step = autoshard.auto_shard(train_step, donate_argnums=0, plan=words, mesh=axes)
    shapes = program.abstract_state()
    plan = step.plan(shapes, workload(name).batch())
    like = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        plan.in_shardings()[0],
    )
    return step, plan, like


def steps(name: str, words: str, state: Any, numbers: Iterable[int]) -> tuple[Any, list[float]]:
    step, losses = placed_step(name, words)[0], []
    for number in numbers:
        state, metrics = step(state, batch_of(name, number))
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train on a mesh of eight devices; return the checkpoint's folder, the saved state, and the following losses."""

    @functools.cache
    def run(name: str, words: str) -> tuple[Path, Any, list[float]]:
        step, plan, _ = placed_step(name, words)
        state = step.init(program_of(name)[0].create_state, jax.random.key(0))
        state, first = steps(name, words, state, range(BEFORE))
        folder = tmp_path_factory.mktemp("run")
        with Checkpointer(folder) as checkpoints:
            dims = None if name == DENSE else EXPERT_DIMS
            checkpoints.save(BEFORE, state, plan=plan, expert_dims=dims, block=True)
        saved_state = jax.tree.map(np.asarray, state)
        _, losses = steps(name, words, state, range(BEFORE, BEFORE + AFTER))
        # The loss falls, so a wrongly restored state would change the following losses.
        assert losses[-1] < first[0] - 0.5
        return folder, saved_state, losses

    return run


@pytest.mark.filterwarnings("ignore:.*attached devices are idle")
@pytest.mark.parametrize(("name", "source", "target"), CASES)
def test_a_run_resumes_on_another_mesh(saved: Any, name: str, source: str, target: str) -> None:
    folder, saved_state, losses = saved(name, source)
    _, plan, like = placed_step(name, target)
    with Checkpointer(folder) as checkpoints:
        state = checkpoints.restore(like=like)
    count = plan.mesh.size
    for (path, leaf), want, shape in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(saved_state), jax.tree.leaves(like), strict=True
    ):
        leaf_path = jax.tree_util.keystr(path)
        assert leaf.sharding == shape.sharding and len(leaf.sharding.device_set) == count, leaf_path
        assert leaf.dtype == want.dtype and np.asarray(leaf).tobytes() == want.tobytes(), leaf_path
    _, resumed = steps(name, target, state, range(BEFORE, BEFORE + AFTER))
    if source == target:
        assert resumed == losses
    np.testing.assert_allclose(resumed, losses, rtol=1e-5)
