"""Folders of runs, written by hand: finished, in progress, failed at the first step, resumed with trouble, long."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from autoshard.ckpt import Checkpointer
from autoshard.train.config import run_directory
from autoshard.train.config.stored_config import to_dict
from autoshard.train.config.train_config import TrainConfig
from tests.sharding.report.plans import planned

EVIL = "<script>window.evil = 1</script>&\"'"


def at(second):
    return f"2026-01-01T{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}.000+00:00"


def event(attempt, kind, second, step, **values):
    return {"attempt": attempt, "event": kind, "time": at(second), "step": step, **values}


def write(folder: Path, metrics=(), events=(), plans=("fsdp:8",), **settings) -> Path:
    """Write a run's folder; `plans` are the strategies of its plans, at steps 0, 20, 40, ..."""
    folder.mkdir(parents=True)
    config = TrainConfig(run_dir=folder, **settings)
    (folder / run_directory.CONFIG).write_text(json.dumps(to_dict(config)))
    for name, lines in ((run_directory.METRICS, metrics), (run_directory.ATTEMPTS, events)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    for number, words in enumerate(plans):
        run_directory.write_plan(folder, planned(words), 20 * number)
    return folder


def curve(first, last, spike=None):
    """Return records of training from step `first` to `last`."""
    rng = np.random.default_rng(first)
    records = []
    for step in range(first, last + 1):
        loss = 2 + 4 * np.exp(-step / 30) + rng.normal(0, 0.05)
        norm = 40.0 if step == spike else 1 + rng.uniform()
        records.append(
            {"step": step, "loss": loss, "grad_norm": norm, "learning_rate": 1e-3 * min(step / 10, 1.0)}
            | (
                {"tokens_per_second": 50_000 + rng.normal(0, 2000), "mfu": 0.4, "eta_seconds": 5.0}
                if step > first
                else {}
            )
        )
    return records


def finished(folder: Path) -> Path:
    """A run of 60 steps in one attempt, with evaluations, checkpoints of which some were removed, and all figures."""
    metrics = []
    for record in curve(1, 60):
        metrics.append(record | {"memory_bytes": 3 << 30})
        if record["step"] % 20 == 0:
            metrics.append({"step": record["step"], "val_loss": record["loss"] + 0.1, "val_bits_per_byte": 1.0})
    seconds = {"steps": 60.0, "compile": 20.0, "save": 3.0, "evaluation": 5.0, "plan": 4.0, "start": 2.0}
    metrics.append({"step": 60, "goodput": 0.6, **{f"seconds_{name}": value for name, value in seconds.items()}})
    events = [
        event(1, "begin", 4, 0, processes=1, devices=8, seconds={"plan": 4.0}),
        *(event(1, "save", 30 * n, 20 * n, seconds=seconds) for n in (1, 2, 3)),
        event(1, "end", 94, 60, reason="finished", seconds=seconds),
    ]
    write(folder, metrics, events, steps=60, batch_size=16, keep_checkpoints=2)
    with Checkpointer(folder / run_directory.CHECKPOINTS, keep=2) as checkpoints:
        for step, loss in ((20, 2.5), (40, 2.1), (60, 2.3)):
            checkpoints.save(step, {"w": jnp.zeros((64, 64))}, metrics={"val_loss": loss})
    return folder


def troubled(folder: Path) -> Path:
    """A run of four attempts: killed, preempted, failed and in progress; plans and devices change; losses go astray."""
    metrics = curve(1, 70, spike=33)
    metrics[44]["loss"] = float("nan")
    metrics[10]["accuracy"] = 0.1
    metrics[60]["accuracy"] = 0.7
    metrics[20][EVIL] = metrics[21][EVIL] = 1.0
    metrics += [
        {"step": 45, "incident": "skip", "why": "the loss is nan", "leaf": EVIL, "batch": 44},
        {"step": 55, "incident": "rollback", "why": f"20 steps in a row were skipped {EVIL}"},
        {"step": 70, "incident": EVIL, "why": None},
        {"step": 40, "val_loss": 3.2},
    ]
    metrics.sort(key=lambda record: record["step"])
    events = [
        event(1, "begin", 4, 0, processes=4, devices=32, seconds={"plan": 4.0}),
        event(1, "save", 50, 20, seconds={"plan": 4.0, "steps": 30.0, "compile": 16.0}),
        event(2, "begin", 130, 20, alive=at(90), processes=2, devices=16, seconds={"plan": 5.0, "restore": 3.0}),
        event(2, "save", 160, 40, seconds={"plan": 5.0, "steps": 25.0, "restore": 3.0, "compile": 5.0}),
        event(2, "end", 165, 40, reason="SIGTERM", seconds={"plan": 5.0, "steps": 30.0, "restore": 3.0}),
        event(3, "begin", 200, 40, alive=at(165), processes=2, devices=16, seconds={"plan": 5.0}),
        event(3, "end", 230, 41, reason=f"RuntimeError: {EVIL} " + "a long reason " * 60, seconds={"steps": 30.0}),
        event(4, "begin", 260, 40, alive=at(230), processes=2, devices=16, seconds={"plan": 5.0}),
        event(4, "save", 300, 60, seconds={"plan": 5.0, "steps": 40.0}),
    ]
    return write(folder, metrics, events, plans=("fsdp:8", "dp:8", "tp:8"), steps=1000, prompt=EVIL)


def failed_first(folder: Path) -> Path:
    """A run that failed at its first step: no metrics, no checkpoint."""
    events = [
        event(1, "begin", 4, 0, processes=1, devices=8, seconds={"plan": 4.0}),
        event(1, "end", 9, 0, reason="XlaRuntimeError: RESOURCE_EXHAUSTED: out of memory", seconds={"start": 9.0}),
    ]
    return write(folder, (), events, plans=("fsdp:8",))


def long(folder: Path, records: int) -> Path:
    """A run of many records, with a spike of the loss at a third of them."""
    write(folder, (), [event(1, "begin", 4, 0, processes=1, devices=8, seconds={})], plans=(), steps=2 * records)
    with (folder / run_directory.METRICS).open("w") as file:
        for step in range(1, records + 1):
            loss = 9.0 if step == records // 3 else 2 + 3 / (1 + step / records * 20)
            file.write(f'{{"step": {step}, "loss": {loss:.6f}, "grad_norm": 1.0, "learning_rate": 0.001}}\n')
    return folder
