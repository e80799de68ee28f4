"""The held-out loss: every token has the same weight, also in a padded batch."""

import math
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from autoshard.train.config.train_config import TrainConfig
from autoshard.train.data.text_data import TokenSource
from autoshard.train.program.build import make_program_of, train_step_of
from autoshard.train.program.evaluation import evaluate
from autoshard.train.program.planned_step import PlacedEvalStep, place_eval_step, place_step
from autoshard.train.step.train_step import batch_shapes, make_eval_step

# 19 targets in windows of 4, two windows per batch: the last batch has three targets instead of eight.
HELD_OUT = np.arange(20) ** 2 % 23


def measure(batches: int = 0, bytes_per_token: float | None = 2.5, rows: int = 2, sharding: Any = None) -> Any:
    """Evaluate with a step whose loss at a token is the token's id."""
    source = TokenSource(HELD_OUT, HELD_OUT, 23, 4, 2, rows, seed=0, bytes_per_token=bytes_per_token)
    shapes = batch_shapes(rows, 4)
    shardings: Any = dict.fromkeys(shapes, sharding or SingleDeviceSharding(jax.devices()[0]))

    def step(params: Any, frozen: Any, variables: Any, batch: Any) -> Any:
        assert (params, frozen, variables) == ("params", "frozen", "variables")
        return (batch["targets"] * batch["mask"]).sum(), batch["mask"].sum()

    parts = ("params", "frozen", "variables")
    return evaluate(PlacedEvalStep(step, shapes, shardings), parts, source, batches=batches)


def test_the_loss_is_the_mean_over_tokens_and_not_over_batches() -> None:
    evaluation = measure()
    assert evaluation.tokens == 19 and evaluation.loss == pytest.approx(HELD_OUT[1:].mean())
    assert evaluation.bits_per_byte == pytest.approx(evaluation.loss / math.log(2) / 2.5)
    assert evaluation.metrics() == {"val_loss": evaluation.loss, "val_bits_per_byte": evaluation.bits_per_byte}


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 16])
def test_it_depends_neither_on_the_rows_of_a_batch_nor_on_its_sharding(rows: int, mesh8: Mesh) -> None:
    """The last batch has 1 to 5 rows, and with 16 rows less than a row for each device."""
    assert measure(rows=rows) == measure()
    if rows % 8 == 0:
        assert measure(rows=rows, sharding=NamedSharding(mesh8, PartitionSpec(("data", "model")))) == measure()


def test_the_number_of_batches_is_limited_by_the_data() -> None:
    first = measure(batches=1)
    assert first.tokens == 8 and first.loss == pytest.approx(HELD_OUT[1:9].mean())
    assert measure(batches=100) == measure()


def test_without_a_text_there_are_no_bits_per_byte() -> None:
    evaluation = measure(bytes_per_token=None)
    assert evaluation.bits_per_byte is None and evaluation.metrics() == {"val_loss": evaluation.loss}


@pytest.mark.whole
@pytest.mark.few(1)
@pytest.mark.parametrize(("schedule", "forward"), [(None, "forward"), ("interleaved:2", "forward:2")])
def test_an_evaluation_under_a_pipeline_runs_in_its_stages_and_moves_no_parameter(schedule: Any, forward: str) -> None:
    config = TrainConfig(plan="pp:2 fsdp:2 tp:2", microbatches=4, batch_size=8, schedule=schedule)
    program = make_program_of(config)
    placed = place_step(train_step_of(config, program), program, config)
    parts = placed.state_shapes.params, placed.state_shapes.frozen, placed.state_shapes.variables
    made = place_eval_step(make_eval_step(program), parts, config)
    found = made.step.plan(*parts, made.batch_shapes)
    assert (found.stages, found.schedule, found.microbatches) == (2, forward, 4)
    assert {shape.shape[0] for shape in made.batch_shapes.values()} == {8}
    stored = [leaf.sharding.spec for leaf in jax.tree.leaves(parts)]
    assert [leaf.spec for leaf in found.inputs[: len(stored)]] == stored
