"""Loss and every gradient of small models under `auto_shard` on the device, against float32 on the CPU."""

from __future__ import annotations

from typing import Any

import jax
import optax
import pytest

from autoshard import auto_shard
from autoshard.models import workload
from autoshard.train.step.train_state import make_program
from autoshard.train.step.train_step import loss_and_weight
from tests.accelerator.comparisons import FLOAT32_TOLERANCE, assert_no_worse, on_cpu, relative_error
from tests.sharding.programs import assert_close

pytestmark = pytest.mark.accelerator


def step_of(work: Any, key: jax.Array | None = None) -> tuple[Any, Any]:
    """Return `(params, others, batch) -> (loss, gradients)`, and the arguments `params, others`."""
    program = make_program(work.build, optax.sgd(1.0))
    state = on_cpu(program.create_state, jax.random.key(0))

    def step(params: Any, others: Any, batch: Any) -> Any:
        def mean_loss(params: Any) -> Any:
            frozen, variables = others
            total, weight = loss_and_weight(program.model(params, frozen, variables, key), batch, key)
            return total / weight

        return jax.value_and_grad(mean_loss)(params)

    return step, (state.params, (state.frozen, state.variables))


@pytest.mark.usefixtures("full_precision")
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "moe-tiny", "mixtral-tiny", "vit-tiny", "wide-resnet-tiny"])
def test_float32_steps_equal_those_of_the_cpu(name):
    work = workload(name)
    step, args = step_of(work)
    batch = work.random_batch()
    assert_close(on_cpu(step, *args, batch), auto_shard(step)(*args, batch), FLOAT32_TOLERANCE)


@pytest.mark.usefixtures("full_precision")
def test_dropout_drops_what_the_cpu_drops():
    work = workload("gpt-tiny").with_(dropout=0.3)
    step, args = step_of(work, jax.random.key(5))
    without, _ = step_of(work)
    batch = work.random_batch()
    expected = on_cpu(step, *args, batch)
    assert_close(expected, auto_shard(step)(*args, batch), FLOAT32_TOLERANCE)
    of_all = on_cpu(without, *args, batch)[1]["embed"]
    assert relative_error(expected[1]["embed"], of_all) > 0.1  # units were dropped


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_a_bfloat16_step_takes_the_kernel_and_is_as_exact_as_without(remat):
    sizes = {"context": 1024, "batch_size": 2, "heads": 4, "kv_heads": 2, "width": 256, "remat": remat}
    work = workload("llama-tiny").with_(dtype="bfloat16", attention="auto", **sizes)
    step, args = step_of(work)
    plain, _ = step_of(work.with_(attention="plain"))
    reference, _ = step_of(work.with_(attention="plain", dtype="float32"))
    batch = work.random_batch()
    planned = auto_shard(step)
    assert "__cudnn$fmha" in planned.lower(*args, batch).compile().as_text()
    (_, found), (_, expected) = planned(*args, batch), on_cpu(reference, *args, batch)
    assert_no_worse(found, jax.jit(plain)(*args, batch)[1], expected)


def test_a_plan_for_the_attached_device_counts_on_no_more_memory_than_it_has():
    step, args = step_of(workload("gpt-tiny"))
    made = auto_shard(step).plan(*args, workload("gpt-tiny").random_batch())
    has_bytes = jax.devices()[0].memory_stats()["bytes_limit"]
    assert made.mesh.size == 1 and made.limit_bytes <= has_bytes
