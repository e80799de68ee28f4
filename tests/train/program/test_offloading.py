"""What a run moves to the host: the optimizer's state, and values of layers, alone and together."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from autoshard.ckpt import Checkpointer
from autoshard.cli import main
from autoshard.commands.plan import plan_train_step
from autoshard.errors import AutoshardWarning, ConfigError, PlanError
from autoshard.sharding.offload.words import AUTO, OPTIMIZER
from autoshard.sharding.planner.infeasible import DoesNotFitError
from autoshard.train.config.pretrained_config import PretrainedConfig
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.data.prefetch import place_batch
from autoshard.train.inference.trained_model import load_trained
from autoshard.train.program.build import make_program_of
from autoshard.train.program.offloading import plan_within_memory, planner_offload, with_offload
from autoshard.train.program.planned_step import search_variants
from autoshard.train.program.saved_state import restore_state
from autoshard.train.program.step_timing import time_steps
from autoshard.train.run.loop import Trainer, train
from autoshard.train.run.metrics import read_metrics
from tests.models.pretrained.folders import LLAMA, make_folder

MakeConfig = Callable[..., TrainConfig]
SHAPE: dict[str, Any] = dict(gpt=dict(layers=2, width=64), steps=3)


def figures(run_dir: Path) -> list[float]:
    """The losses of a run, of its steps and of its evaluations."""
    lines = read_metrics(run_dir / "metrics.jsonl")
    return [line[name] for name in ("loss", "val_loss") for line in lines if name in line]


def memory_of(tree: Any) -> set[str]:
    """The memory kinds of all arrays of at least 4 KiB. Smaller arrays are not moved."""
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.size * leaf.dtype.itemsize >= 4096}


def assert_same_runs(make_config: MakeConfig, tmp_path: Path, offload: str, **shape: Any) -> None:
    """Compares losses and the saved states of a run with those of the same run without offload."""
    train(make_config(run_dir=tmp_path / "run", offload=offload, **shape))
    train(make_config(run_dir=tmp_path / "plain", **shape))
    np.testing.assert_allclose(figures(tmp_path / "run"), figures(tmp_path / "plain"), rtol=1e-5)
    states = (load_trained(tmp_path / name).state for name in ("run", "plain"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), *states)


def test_the_state_of_the_optimizer_stays_on_the_host(make_config: MakeConfig, tmp_path: Path) -> None:
    """The state waits on the host from the beginning, after each step, and after a restore on another mesh."""
    given = make_config(offload="optimizer", **SHAPE)
    trainer = Trainer(given)
    placed = trainer.placed
    assert memory_of(placed.state_shapes.opt_state) == {"pinned_host"}
    state = trainer._new_state()
    for step in range(2):
        assert memory_of(state.opt_state) == {"pinned_host"} and memory_of(state.params) == {"device"}
        rows = lambda part, step=step: trainer.source.batch(step, part)  # noqa: E731
        state, _ = placed.step(state, place_batch(rows, placed.batch_shapes, placed.batch_shardings))
    assert memory_of(state.opt_state) == {"pinned_host"} and memory_of(state.params) == {"device"}
    with Checkpointer(tmp_path / "saved") as checkpoints:
        checkpoints.save(2, state, block=True)
        for changes, memory in (
            ({}, "pinned_host"),
            ({"plan": None, "mesh": "data=4,model=2"}, "pinned_host"),
            ({"offload": "none"}, "device"),
        ):
            other = Trainer(replace(given, run_dir=tmp_path / str(len(changes)) / memory, **changes))
            restored = restore_state(checkpoints, other.placed.state_shapes, other.program, {})
            assert memory_of(restored.opt_state) == {memory} and memory_of(restored.params) == {"device"}
            jax.tree.map(np.testing.assert_array_equal, restored, state)
            where = jax.tree.leaves(restored.params)[0].sharding.mesh
            assert dict(where.shape) == dict(other.placed.plan.mesh.shape)


def test_the_plan_and_its_page_say_what_waits_on_the_host(make_config: MakeConfig, tmp_path: Path) -> None:
    plan = plan_train_step(make_config(offload="residual, optimizer", **SHAPE))
    assert set(plan.offload) == {"optimizer"} and plan.estimate.host_memory_bytes > 0
    assert "moved to host memory in each step, before sharding: optimizer 960 KiB" in str(plan)
    assert re.search(r"mlp/w_down +x2 .*\n? .* in host memory", str(plan))
    plan.to_html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert "moved to host memory in each step, before sharding: optimizer 960 KiB" in page.replace("Moved", "moved")
    assert ">host memory</i>" in page
    without = plan_train_step(make_config(gpt=SHAPE["gpt"] | {"remat": "host:residual"}))
    moments = [leaf for leaf in plan.inputs if leaf.memory_kind == "pinned_host"]
    assert sum(4 * math.prod(leaf.shape) for leaf in moments) == plan.offload["optimizer"]
    assert {leaf.role for leaf in moments} == {"optimizer"}
    assert plan.estimate.host_memory_bytes > without.estimate.host_memory_bytes > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*devices (have work|are idle)")
@pytest.mark.parametrize(
    ("offload", "changes"),
    [
        ("optimizer", {}),
        ("residual, optimizer", {}),
        ("optimizer", {"ema_decay": 0.9}),
        ("optimizer", {"optimizer": dict(name="schedule_free", schedule="constant")}),
        ("optimizer", {"optimizer": dict(name="muon")}),
        ("qkv + optimizer", {"microbatches": 2}),
        ("optimizer", {"plan": "pp:2 dp:4", "microbatches": 2}),
        ("optimizer + residual", {"plan": "pp:2 dp:4", "microbatches": 2}),
        ("residual@1:+optimizer", {"gpt": dict(layers=3, width=64, scan_layers=False)}),
        ("optimizer", {"variants": "search", "plan": None}),
        ("qkv+optimizer", {"variants": "search", "plan": "pp:2 dp:4"}),
        ("optimizer", {"plan": None, "measure": 2}),
    ],
)
def test_results_are_those_without_offload(
    make_config: MakeConfig, tmp_path: Path, offload: str, changes: dict[str, Any]
) -> None:
    """Averages of parameters wait on the host, too. The evaluation reads them."""
    assert_same_runs(make_config, tmp_path, offload, **SHAPE | changes)


@pytest.mark.parametrize("offload", ["hidden+mlpwi*+optimizer", pytest.param("auto", marks=pytest.mark.slow)])
def test_a_model_of_the_users_own_gets_all_words(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offload: str
) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])  # the folder of user_code.py
    shape = dict(model="user_code:named", steps=3, batch_size=32)
    assert_same_runs(make_config, tmp_path, offload, **shape)
    moved = set(Trainer(make_config(run_dir=tmp_path / "again", offload=offload, **shape)).placed.plan.offload)
    assert moved == (set() if offload == "auto" else {"hidden", "mlpwi*", "optimizer"})
    with pytest.raises(PlanError, match="offload names 'hiden', which .* has hidden, mlp_in, optimizer. Use one of"):
        Trainer(make_config(run_dir=tmp_path / "bad", offload="hiden", **shape))


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["decoder_layer_input, optimizer", "qkv+optimizer"])
def test_a_pretrained_model_gets_all_words(make_config: MakeConfig, tmp_path: Path, offload: str) -> None:
    """Its first state is read into host memory. The policy of its layers says which values wait there."""
    folder = make_folder(tmp_path / "model", {**LLAMA, "vocab_size": 256, "num_hidden_layers": 2})
    pretrained = PretrainedConfig(folder, remat="keep:qkv" if "qkv" in offload else "full")
    shape = dict(pretrained=pretrained, steps=3, batch_size=16)
    assert_same_runs(make_config, tmp_path, offload, **shape)
    trainer = Trainer(make_config(run_dir=tmp_path / "again", offload=offload, **shape))
    assert set(trainer.placed.plan.offload) == set(offload.replace(", ", "+").split("+"))
    assert memory_of(trainer._new_state().opt_state) == {"pinned_host"}


@pytest.mark.slow
def test_a_resumed_run_may_move_something_else(make_config: MakeConfig, tmp_path: Path) -> None:
    """The checkpoint's plan moves other state. So the run is planned again, although its devices are the same."""
    given = make_config(offload="optimizer", plan=None, mesh=None, **SHAPE)
    train(given)
    kept = Trainer(replace(given, resume=True, steps=4))
    assert set(kept.placed.plan.offload) == {"optimizer"}
    train(replace(given, resume=True, steps=4, offload="none"))
    saved = Checkpointer(given.run_dir / "checkpoints", keep=None).describe(4).plan  # pyright: ignore
    assert saved is not None and not saved.get("offload")
    train(make_config(run_dir=tmp_path / "plain", plan=None, **SHAPE | {"steps": 4}))
    np.testing.assert_allclose(figures(given.run_dir)[:4], figures(tmp_path / "plain")[:4], rtol=1e-5)  # pyright: ignore


@pytest.mark.parametrize(
    ("offload", "changes", "remat", "moved"),
    [
        ("none", {}, "none", None),
        ("optimizer", {}, "none", ("optimizer",)),
        ("optimizer", {"gpt": dict(remat="full")}, "full", ("optimizer",)),
        ("decoder_layer_input, optimizer", {}, "host:residual", ("optimizer",)),
        ("mlp_*", {}, "host:mlp_in+mlp_out", None),
        ("residual@::2", {"gpt": dict(layers=4)}, "host:residual,full", None),
        ("qkv+optimizer", {"plan": "pp:2 dp:4"}, "host:qkv", ("qkv", "optimizer")),
        ("none", {"plan": "pp:2 dp:4", "gpt": dict(layers=2, remat="full,host:qkv")}, "full,host:qkv", ("qkv",)),
        ("auto", {}, "none", "auto"),
        ("hidden+optimizer", {"model": "some:model"}, "none", "hidden+optimizer"),
        ("none", {"model": "some:model"}, "none", None),
    ],
)
def test_who_moves_what(make_config: MakeConfig, offload: str, changes: dict[str, Any], remat: str, moved: Any) -> None:
    config = with_offload(make_config(offload=offload, **{"gpt": dict(layers=2)} | changes))
    assert config.gpt.remat == remat and planner_offload(config) == moved


def test_in_a_pipeline_the_layers_keep_what_the_planner_moves(make_config: MakeConfig) -> None:
    config = with_offload(make_config(plan="pp:2 dp:4", microbatches=2, offload="qkv", **SHAPE))
    assert config.gpt.remat == "host:qkv" and "keep:qkv" in str(make_program_of(config).graph)
    plan = plan_train_step(config)
    assert set(plan.offload) == {"qkv"} and plan.estimate.host_memory_bytes > 0
    with pytest.raises(PlanError, match="pp:2 with offload='qkv': layers that are no jax.lax.scan.*='optimizer'"):
        plan_train_step(replace(config, gpt=replace(config.gpt, scan_layers=False)))


@pytest.mark.slow
def test_a_searched_pipeline_has_the_policy_of_its_names(make_config: MakeConfig) -> None:
    shape = SHAPE | {"plan": "pp:2 dp:4", "variants": "search"}
    found, plan = search_variants(make_config(offload="qkv+optimizer", **shape))
    assert (found.gpt.remat, found.offload) == ("host:qkv", "optimizer")
    assert set(plan.offload) == {"qkv", "optimizer"}
    found, plan = search_variants(make_config(**shape))
    assert {each["remat"] for each, *_ in plan.variants} == {"none", "dots", "full"}
    found, plan = search_variants(make_config(**shape | {"plan": None, "schedule": "1f1b"}))
    assert plan.stages > 1 and plan.schedule == "1f1b"


@pytest.mark.slow
def test_a_search_moves_what_is_requested_in_every_variant(make_config: MakeConfig) -> None:
    shape = SHAPE | {"variants": "search", "gpt": SHAPE["gpt"] | {"layers": 4}}
    options = {"target": "v5e:2x4", "batch_size": 16}
    for offload in ("optimizer", "residual+optimizer"):
        found, plan = search_variants(make_config(offload=offload, **shape | options))
        assert found.offload == "optimizer" and set(plan.offload) == {"optimizer"}
        assert ("host:residual" in found.gpt.remat) == ("residual" in offload)
        assert plan.estimate.host_memory_bytes >= plan.offload["optimizer"] / 8


@pytest.mark.slow
def test_kernels_of_a_run_change_no_losses(make_config: MakeConfig, tmp_path: Path) -> None:
    shape = dict(gpt=dict(layers=2, attention="plain"), steps=3)
    for name, kernels in (("run", "require"), ("plain", "off")):
        trainer = Trainer(make_config(run_dir=tmp_path / name, kernels=kernels, **shape))
        assert bool(trainer.placed.plan.kernels) == (name == "run")
        trainer.run()
    np.testing.assert_allclose(figures(tmp_path / "run"), figures(tmp_path / "plain"), rtol=1e-5)


@pytest.mark.slow
def test_both_steps_are_timed(make_config: MakeConfig) -> None:
    """The step by hand has its state on the device."""
    timing = time_steps(make_config(offload="optimizer", **SHAPE), 2)
    assert min(timing.planned_seconds, timing.by_hand_seconds) > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"offload": "auto, optimizer"}, "'auto' must stand alone. 'auto' may move the optimizer's state, too"),
        ({"offload": "residual+none"}, "offload is 'residual.none'; 'none' must stand alone"),
        ({"offload": "optimiser"}, "'optimiser' is not a named value. Give none, auto, optimizer, or names of"),
        ({"offload": "optimizer@::2"}, "offload has 'optimizer@::2', but the optimizer's state is not counted in"),
        ({"offload": "residual@7:"}, "selects none of 2 layers, numbered from 0; 'residual@:2' selects all"),
        ({"offload": "residual@1:"}, "the 2 layers are one scan.* or write the layers out with --gpt.no-scan-layers"),
        ({"offload": "qkv@::2", "variants": "search", "gpt": dict(layers=4)}, "leave out --variants search, or the"),
        ({"offload": "a++b", "model": "some:model"}, "offload is 'a\\+\\+b'; it must be 'none', 'auto', or words such"),
        ({"offload": "auto+a", "model": "some:model"}, "'auto' must stand alone"),
    ],
)
def test_bad_words(make_config: MakeConfig, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_config(**{"gpt": dict(layers=2)} | changes)


# --- offload="auto" ---------------------------------------------------------------------------------------------------


class Planned:
    """A planner for which only plans with some words fit. For other words it warns or raises an error."""

    def __init__(self, fitting: Sequence[str], raises: bool):
        self.fitting, self.raises, self.tried = fitting, raises, []

    def __call__(self, words: Sequence[str]) -> Any:
        self.tried.append(tuple(words))
        fits = "+".join(words) in self.fitting
        if not fits and self.raises:
            raise DoesNotFitError("no plan fits")
        if not fits:
            warnings.warn("no plan fits", AutoshardWarning, stacklevel=2)
        notes: tuple[str, ...] = ("a note",)
        return SimpleNamespace(
            fits=fits, offload=dict.fromkeys(words, 1.0), notes=notes, where=lambda notes: SimpleNamespace(notes=notes)
        )


def within(planned: Any, target: str = "v5e:2x4", otherwise: Sequence[str] = (OPTIMIZER,)) -> Any:
    return plan_within_memory(planned, (), tuple(otherwise), mesh=None, target=target)


@pytest.mark.parametrize("raises", [False, True])
def test_auto_moves_the_state_of_the_optimizer_only_if_nothing_else_fits(raises: bool) -> None:
    planned = Planned([""], raises)
    assert within(planned).notes == ("a note",) and planned.tried == [()]
    planned = Planned(["optimizer"], raises)
    note = "no plan fits with less in host memory, so offload='auto' also moves optimizer"
    assert within(planned).notes == ("a note", note) and planned.tried == [(), ("optimizer",)]


def test_auto_reports_that_nothing_fits() -> None:
    with pytest.raises(DoesNotFitError, match="no plan fits. With more in host memory .optimizer., nothing fits eith"):
        within(Planned([], raises=True))
    with pytest.warns(AutoshardWarning, match="no plan fits"):
        assert not within(Planned([], raises=False), otherwise=(AUTO,)).fits


@pytest.mark.parametrize("target", ["cpu:8", "h100:8"])
def test_auto_moves_nothing_on_other_platforms(target: str) -> None:
    planned = Planned(["optimizer"], raises=True)
    with pytest.raises(DoesNotFitError, match="no plan fits$"):
        within(planned, target)
    assert planned.tried == [()]


@pytest.mark.slow
@pytest.mark.parametrize("words", ["fsdp:8", "pp:2 fsdp:4"])
def test_a_plan_of_a_named_model_that_fits_only_with_state_on_the_host(words: str, capsys: Any) -> None:
    settings = [f"--set={name}" for name in ("layers=8", "width=512", "heads=4", "ffn=2048")]
    options = ["--target", "v5e:2x4", "--batch-size", "8", "--plan", words, "--verify", "0"]
    command = ["plan", "gpt-tiny", *settings, *options, "--memory-limit-bytes", "40000000"]
    assert main([*command, "--offload", "none"]) == 2
    capsys.readouterr()
    assert main(command) == 0
    table = capsys.readouterr().out
    assert "so offload='auto' also moves" in table and "optimizer 192 MiB" in table
