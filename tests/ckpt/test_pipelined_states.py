"""A state that a pipelined plan saved is restored by a plan without a pipeline, and back, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import auto_shard
from autoshard.ckpt import Checkpointer
from tests.sharding.pipeline.programs import make_step, state, tokens

pytestmark = pytest.mark.filterwarnings("ignore:.*devices")


@pytest.mark.parametrize("words", ["pp:2 fsdp:2 tp:2", pytest.param("pp:4 dp:2", marks=pytest.mark.slow)])
def test_a_pipelined_state_is_restored_without_a_pipeline_and_back(words, tmp_path):
    pipelined = auto_shard(make_step("auxiliary"), plan=words, microbatches=4, schedule="1f1b")
    other = auto_shard(make_step("auxiliary"), plan="fsdp:8")
    first = state(jnp.float32)
    staged, whole = (step.plan(first, tokens()).in_shardings()[0] for step in (pipelined, other))
    specs = [{str(leaf.spec) for leaf in jax.tree.leaves(each)} for each in (staged, whole)]
    assert any("pp" in spec for spec in specs[0]) and not any("pp" in spec for spec in specs[1])

    held = jax.device_put(first, staged)
    with Checkpointer(tmp_path, keep=3) as checkpoints:
        for number, place in enumerate((whole, staged)):
            checkpoints.save(number, held)
            like = jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), first, place)
            held = checkpoints.restore(number, like)
            for leaf, to, expected in zip(*map(jax.tree.leaves, (held, place, first)), strict=True):
                assert leaf.sharding == to
                np.testing.assert_array_equal(leaf, expected)


@pytest.mark.slow
def test_a_pipelined_run_goes_on_without_a_pipeline_and_back(tmp_path):
    """The losses are those of a run on one device."""
    steps = [
        auto_shard(make_step("auxiliary"), plan="pp:2 dp:2 tp:2", microbatches=4, schedule="zb"),
        auto_shard(make_step("auxiliary"), plan="fsdp:8"),
    ]
    one_device = jax.jit(make_step("auxiliary"))
    alone, held, losses = state(jnp.float32), state(jnp.float32), []
    with Checkpointer(tmp_path, keep=3) as checkpoints:
        for number in range(4):
            step = steps[number % 2]
            place = step.plan(held, tokens()).in_shardings()[0]
            if number:
                like = jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), held, place)
                held = checkpoints.restore(number, like)
            held, loss, *_ = step(held, tokens())
            alone, expected, *_ = one_device(alone, tokens())
            checkpoints.save(number + 1, held)
            losses.append((float(loss), float(expected)))
    np.testing.assert_allclose(*zip(*losses, strict=True), rtol=1e-5)
