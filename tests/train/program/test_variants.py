"""Runs whose remat policy and microbatches the planner chooses."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoshard.commands.plan import plan_train_step
from autoshard.errors import ConfigError
from autoshard.train.config import run_directory
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.program.offloading import with_offload
from autoshard.train.program.planned_step import search_variants
from autoshard.train.run.loop import Trainer, train
from autoshard.train.run.metrics import read_metrics

MakeConfig = Callable[..., TrainConfig]
SHAPE: dict[str, Any] = dict(
    gpt=dict(layers=1, width=64, context=64), batch_size=16, plan=None, steps=3, variants="search"
)


def losses(run_dir: Path | None) -> list[float]:
    assert run_dir is not None
    return [line["loss"] for line in read_metrics(run_dir / "metrics.jsonl") if "loss" in line]


@pytest.mark.slow
def test_the_search_takes_the_fastest_variant_that_fits(make_config: MakeConfig) -> None:
    free, plan = search_variants(make_config(**SHAPE))
    assert plan_train_step(make_config(**SHAPE)).variants == plan.variants
    without = plan_train_step(make_config(**SHAPE | {"variants": "given"}))  # it recomputes nothing
    assert free.microbatches == 1 and plan.estimate.step_time_us <= without.estimate.step_time_us
    peak = plan.estimate.peak_memory_bytes
    tight, plan = search_variants(make_config(memory_limit_bytes=int(peak * 0.7), **SHAPE))
    assert dict(plan.variant) == {"remat": tight.gpt.remat, "microbatches": tight.microbatches}
    assert plan.fits and (tight.gpt.remat, tight.microbatches) != (free.gpt.remat, 1)


@pytest.mark.parametrize(
    ("how", "keeps"),
    [
        ({"variants": "search"}, "; --variants given keeps it"),
        ({"variants": "given", "offload": "auto"}, "; another --offload than auto keeps it"),
        ({"variants": "search", "offload": "auto"}, "; --variants given with another --offload than auto keeps it"),
    ],
)
def test_a_search_names_the_settings_that_it_replaces(make_config: MakeConfig, how: dict[str, str], keeps: str) -> None:
    gpt: dict[str, Any] = SHAPE["gpt"]
    given = make_config(**SHAPE | how | {"gpt": {**gpt, "remat": "full"}})
    found, plan = search_variants(given)
    assert found.gpt.remat != "full"
    (note,) = [note for note in plan.notes if "the search chose" in note]
    assert note.startswith(f"the search chose gpt.remat {found.gpt.remat} in place of full") and keeps in note
    assert note in str(plan)
    _, plan = search_variants(make_config(**SHAPE | how))
    assert not [note for note in plan.notes if "the search chose" in note]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*attached devices are idle")
def test_a_run_uses_the_chosen_variant(make_config: MakeConfig, tmp_path: Path) -> None:
    """The run prints the table, stores the choice, has the losses of one device, and resumes with the same variant."""
    given = make_config(run_dir=tmp_path / "run", memory_limit_bytes=1_500_000, **SHAPE)
    trainer = Trainer(given)
    chosen = trainer.config
    assert trainer.placed.plan.variants and "variant: remat=" in str(trainer.placed.plan)
    assert (chosen.gpt.remat, chosen.microbatches) != (given.gpt.remat, given.microbatches)
    trainer.run()
    stored = run_directory.read_config(tmp_path / "run")
    assert (stored["gpt"]["remat"], stored["microbatches"]) == (chosen.gpt.remat, chosen.microbatches)
    train(make_config(run_dir=tmp_path / "alone", mesh="data=1", **SHAPE | {"variants": "given"}))
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(tmp_path / "alone"), rtol=1e-5)
    again = Trainer(replace(chosen, resume=True, steps=4, memory_limit_bytes=None))
    assert again.config.gpt.remat == chosen.gpt.remat and again.placed.plan.variant == trainer.placed.plan.variant


@pytest.mark.slow
def test_with_dropout_the_number_of_microbatches_stays(make_config: MakeConfig) -> None:
    shape = SHAPE | {"gpt": SHAPE["gpt"] | {"dropout": 0.1}, "microbatches": 2}
    _, plan = search_variants(make_config(**shape))
    assert {each["microbatches"] for each, *_ in plan.variants} == {2}


def test_only_the_built_in_model_has_variants(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="supports only the built-in model, not some:model"):
        search_variants(make_config(model="some:model", **SHAPE))


def test_names_of_offload_set_the_remat_policy(make_config: MakeConfig) -> None:
    config = make_config(offload="residual,query_proj", gpt=SHAPE["gpt"])
    assert with_offload(config).gpt.remat == "host:residual+qkv"
    assert with_offload(make_config(gpt=SHAPE["gpt"])).gpt.remat == "none"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"offload": "residul"}, "'residul' is not a named value"),
        (
            {"offload": "qkv", "gpt": {"remat": "full"}},
            "offload is 'qkv' and gpt.remat is 'full': both say what a layer",
        ),
    ],
)
def test_offload_is_refused(make_config: MakeConfig, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        make_config(**changes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*attached devices are idle")
def test_a_run_with_values_on_the_host_has_the_losses_of_one_device(make_config: MakeConfig, tmp_path: Path) -> None:
    """The run stores the policy, and resumes with it."""
    shape = SHAPE | {"variants": "given"}
    given = make_config(run_dir=tmp_path / "run", offload="residual+qkv", **shape)
    train(given)
    assert run_directory.read_config(tmp_path / "run")["gpt"]["remat"] == "host:residual+qkv"
    train(make_config(run_dir=tmp_path / "alone", mesh="data=1", **shape))
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(tmp_path / "alone"), rtol=1e-5)
    again = Trainer(make_config(run_dir=tmp_path / "run", offload="residual+qkv", resume=True, **shape | {"steps": 4}))
    assert again.config.gpt.remat == "host:residual+qkv"


@pytest.mark.slow
def test_auto_searches_the_policy_with_the_configured_microbatches(make_config: MakeConfig) -> None:
    shape = SHAPE | {"variants": "given", "microbatches": 2, "offload": "auto"}
    found, plan = search_variants(make_config(**shape))
    assert found.offload == "auto" and found.microbatches == 2 and plan.variants
    assert {each["microbatches"] for each, *_ in plan.variants} == {2}
