"""Metrics reach every service that is asked for, and a resumed run continues its curves.

Weights & Biases and MLflow are stand-ins that record their calls. `test_metric_services.py` has the real ones.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from autoshard.errors import ConfigError
from autoshard.train.run import metric_writers
from autoshard.train.run.metric_writers import check_writers, open_writers
from autoshard.train.run.metrics import Reporter

SETTINGS = {"steps": 4, "gpt": {"layers": 2}}


def report(folder: Path, writer: str, start: int) -> None:
    reporter = Reporter(folder, steps=4, start=start, enabled=True, writers=(writer,), settings=SETTINGS)
    for step in (start + 1, start + 2):
        reporter.record(step, {"loss": 1.0 / step})
    reporter.close()


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    return made


def test_weights_and_biases_continues_a_run(tmp_path, monkeypatch):
    calls: list[Any] = []
    run = SimpleNamespace(
        define_metric=lambda name, **words: None, log=calls.append, finish=lambda: calls.append("finish")
    )

    def init(**settings: Any) -> Any:
        calls.append(settings)
        return run

    monkeypatch.setitem(sys.modules, "wandb", module("wandb", init=init))
    report(tmp_path, "wandb", 0)
    report(tmp_path, "wandb", 2)
    first, again = calls[0], calls[4]
    assert first == again and first["resume"] == "allow" and first["config"] == SETTINGS
    assert calls[1:4] == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}, "finish"]
    assert first["id"] == (tmp_path / "wandb_id").read_text() and first["dir"] == str(tmp_path)


@pytest.mark.parametrize("served", [True, False])
def test_mlflow_continues_a_run(tmp_path, monkeypatch, served):
    calls: list[Any] = []

    def start_run(**words: str) -> Any:
        calls.append(("start", words))
        return SimpleNamespace(info=SimpleNamespace(run_id="seven"))

    variable = SimpleNamespace(get=lambda: "http://server" if served else None)
    fake = module(
        "mlflow",
        environment_variables=SimpleNamespace(MLFLOW_TRACKING_URI=variable, MLFLOW_EXPERIMENT_NAME=variable),
        set_tracking_uri=lambda uri: calls.append(("uri", uri)),
        set_experiment=lambda name: calls.append(("experiment", name)),
        start_run=start_run,
        log_params=lambda values: calls.append(("parameters", values)),
        log_metrics=lambda values, step: calls.append((step, values)),
        end_run=lambda: calls.append("end"),
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    report(tmp_path, "mlflow", 0)
    report(tmp_path, "mlflow", 2)
    places = [] if served else [("uri", f"sqlite:///{tmp_path / 'mlflow.db'}"), ("experiment", "autoshard")]
    assert calls == [
        *places,
        ("start", {"run_name": tmp_path.name}),
        ("parameters", {"steps": 4, "gpt.layers": 2}),
        (1, {"loss": 1.0}),
        (2, {"loss": 0.5}),
        "end",
        *places,
        ("start", {"run_id": "seven"}),
        (3, {"loss": 1 / 3}),
        (4, {"loss": 0.25}),
        "end",
    ]


def test_tensorboard_is_a_folder_of_the_run(tmp_path):
    [writer] = open_writers(["tensorboard"], tmp_path, {}, 0)
    writer.write(1, {"loss": 1.0})
    writer.close()
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_a_rollback_drops_steps_from_tensorboard_and_keeps_the_other_services_open(tmp_path, monkeypatch):
    given: list[Any] = []
    board = SimpleNamespace(add_scalar=lambda *_: None, close=lambda: None)
    monkeypatch.setattr(metric_writers, "SummaryWriter", lambda folder, purge_step: given.append(purge_step) or board)
    run = SimpleNamespace(define_metric=lambda *_, **words: None, log=given.append, finish=lambda: given.append("end"))
    monkeypatch.setitem(sys.modules, "wandb", module("wandb", init=lambda **_: given.append("begin") or run))
    writers = ("tensorboard", "wandb")
    reporter = Reporter(tmp_path, steps=4, start=0, enabled=True, writers=writers, settings=SETTINGS)
    reporter.record(2, {"loss": 9.0})
    reporter.rewind(1)
    reporter.record(2, {"loss": 1.0})
    reporter.close()
    assert given == [1, "begin", {"step": 2, "loss": 9.0}, 2, {"step": 2, "loss": 1.0}, "end"]
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 2, "loss": 1.0}\n'


@pytest.mark.parametrize("start", [0, 2])
def test_tensorboard_drops_the_steps_that_are_done_again(tmp_path, monkeypatch, start):
    given: list[Any] = []
    board = SimpleNamespace(add_scalar=lambda *_: None, close=lambda: None)
    monkeypatch.setattr(metric_writers, "SummaryWriter", lambda folder, purge_step: given.append(purge_step) or board)
    report(tmp_path, "tensorboard", start)
    assert given == [start + 1]


def test_unknown_and_missing_services_are_named(monkeypatch):
    with pytest.raises(
        ConfigError, match="metrics 'wandbb' is unknown: give some of tensorboard, wandb, mlflow, or none"
    ):
        check_writers(["tensorboard", "wandbb"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else object())
    check_writers(["tensorboard", "mlflow"])
    with pytest.raises(ConfigError, match=r"metrics wandb needs the package wandb: pip install 'autoshard\[wandb\]'"):
        check_writers(["wandb"])
