"""Parts of a run made from its config: the vocabulary, users' factories and data, and the search for variants."""

import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import optax
import pytest
from flax import nnx

from autoshard.errors import ConfigError
from autoshard.models import GPT, GPTConfig, MoEConfig
from autoshard.models.wide_resnet import WideResNetConfig
from autoshard.models.workloads import workload
from autoshard.sharding.planner.variants import Attempt
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.program import build
from autoshard.train.program.build import (
    fit_vocab,
    is_pipelined,
    make_source,
    model_builder,
    remat_unit_count,
    variant_search,
    workload_step,
    workload_variants,
)
from autoshard.train.program.constants import REMATS, VOCAB_MULTIPLE
from autoshard.train.user_functions import load_function

MakeConfig = Callable[..., TrainConfig]
LIGHT, STRICT = REMATS[0], REMATS[-1]


def attempt(remat: str, *, fits: bool, peak: float, limit: float = 60.0) -> Attempt:
    return Attempt({"remat": remat, "microbatches": 1}, fits, 1.0, peak, limit)


@pytest.mark.parametrize(("size", "expected"), [(1, 256), (256, 256), (257, 320), (1000, 1024)])
def test_the_vocabulary_grows_in_multiples(make_config: MakeConfig, size: int, expected: int) -> None:
    fitted = fit_vocab(make_config(), size)
    assert fitted.gpt.vocab == expected and expected % VOCAB_MULTIPLE == 0
    assert fitted.gpt.width == make_config().gpt.width


def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Write a user's module `built_by_a_user` into the working folder."""
    (tmp_path / "built_by_a_user.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "built_by_a_user", raising=False)


def test_a_factory_gets_the_arguments_that_it_accepts(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
from autoshard.models import GPTConfig
seen = []
def everything(**given):
    seen.append(sorted(given))
    return GPTConfig(vocab=given["vocab"], layers=1, heads=2, width=16, context=given["context"])
def one(vocab):
    seen.append(["vocab"])
    return vocab
"""
    user_module(tmp_path, monkeypatch, code)
    build = model_builder(make_config(model="built_by_a_user:everything"))
    model = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    assert isinstance(model, GPT) and (model.cfg.vocab, model.cfg.context) == (256, 16)
    seen = load_function("built_by_a_user:everything", "--model").__globals__["seen"]
    with pytest.raises(ConfigError, match="--model built_by_a_user:one returned int, not an nnx.Module"):
        model_builder(make_config(model="built_by_a_user:one"))(nnx.Rngs(0))
    assert seen == [["context", "rngs", "vocab"], ["vocab"]]


def test_a_users_source_is_used_as_it_is(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = """
import numpy as np
from autoshard.train.data.text_data import TokenSource
def source(config):
    tokens = np.arange(400) % 11
    return TokenSource(tokens, tokens, vocab_size=99, context=4, seed=0, batch_size=2, eval_batch_size=2)
"""
    user_module(tmp_path, monkeypatch, code)
    source = make_source(make_config(data="built_by_a_user:source"))
    assert source.vocab_size == 99
    assert source.batch(0, range(2))["inputs"].shape == (2, 4)  # not the run's 16


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (GPTConfig(layers=3), 3),
        (MoEConfig(GPTConfig(layers=6), moe_every=2), 3),
        (WideResNetConfig(stages=(2, 3)), 5),
    ],
)
def test_units_of_remat(config: Any, count: int) -> None:
    assert remat_unit_count(config) == count


def test_variants_share_the_trace_of_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[int] = []
    made = build.make_optimizer

    def counted(*settings: Any) -> optax.GradientTransformation:
        optimizer = made(*settings)

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            traced.append(1)
            return optimizer.update(updates, state, params)

        return optax.GradientTransformation(optimizer.init, update)

    monkeypatch.setattr(build, "make_optimizer", counted)
    work = workload("gpt-tiny")
    step, *shapes = workload_variants(work)

    def text(step: Callable[..., Any], **variant: Any) -> str:
        name, _, program = jax.jit(partial(step, **variant)).lower(*shapes).as_text().partition("\n")
        assert "module" in name
        return program

    for remat, microbatches in (("full", 1), ("full", 2), ("none", 1)):
        found = text(step, remat=remat, microbatches=microbatches)
    assert len(traced) == 1
    monkeypatch.undo()
    alone, *_ = workload_step(work.with_(remat="none"))
    assert found == text(alone)


def test_all_combinations_of_variants_come_first() -> None:
    search = variant_search({"remat": [LIGHT, STRICT], "microbatches": [1, 2]}, 8)
    assert [(each["remat"], each["microbatches"]) for each in search([])] == [
        (LIGHT, 1), (LIGHT, 2), (STRICT, 1), (STRICT, 2)
    ]  # fmt: skip
    without_remat = variant_search({"microbatches": [1, 2]}, 8)
    assert without_remat([]) == [{"microbatches": 1}, {"microbatches": 2}]
    assert without_remat([attempt(LIGHT, fits=True, peak=1.0)]) == []


def test_remat_policies_are_mixed_as_far_as_memory_allows() -> None:
    """40 of the 80 bytes between the policies are free: at most half of the layers have the lighter one."""
    search = variant_search({"remat": [LIGHT, STRICT], "microbatches": [1]}, 8)
    tried = [attempt(LIGHT, fits=False, peak=100.0), attempt(STRICT, fits=True, peak=20.0)]
    half, quarter = f"{LIGHT},{STRICT}", f"{LIGHT},{STRICT},{STRICT},{STRICT}"
    assert search(tried) == [{"remat": half, "microbatches": 1}]
    assert search([*tried, attempt(half, fits=True, peak=59.0)]) == []
    tried.append(attempt(half, fits=False, peak=61.0))
    assert search(tried) == [{"remat": quarter, "microbatches": 1}]
    assert search([*tried, attempt(quarter, fits=False, peak=61.0)]) == []


@pytest.mark.parametrize(
    ("light", "strict", "layers"),
    [
        (attempt(LIGHT, fits=True, peak=50.0), attempt(STRICT, fits=True, peak=20.0), 8),
        (attempt(LIGHT, fits=False, peak=100.0), attempt(STRICT, fits=False, peak=70.0), 8),
        (attempt(LIGHT, fits=False, peak=math.inf), attempt(STRICT, fits=True, peak=20.0), 8),
        (attempt(LIGHT, fits=False, peak=100.0), attempt(STRICT, fits=True, peak=55.0), 8),  # no room for one of four
        (attempt(LIGHT, fits=False, peak=100.0), attempt(STRICT, fits=True, peak=20.0), 7),  # 7 has no equal groups
    ],
)
def test_no_mix_is_tried_without_need_or_room(light: Attempt, strict: Attempt, layers: int) -> None:
    assert variant_search({"remat": [LIGHT, STRICT], "microbatches": [1]}, layers)([light, strict]) == []


@pytest.mark.parametrize(
    ("options", "pipelined"),
    [
        ({}, False),
        ({"schedule": "zb"}, True),
        ({"plan": "pp:2"}, True),
        ({"plan": "dp:2"}, False),
        ({"schedule": "zb", "mesh": "data=2"}, False),
    ],
)
def test_a_schedule_without_plan_and_mesh_makes_a_pipeline(options, pipelined):
    assert is_pipelined(TrainConfig(**options)) == pipelined
