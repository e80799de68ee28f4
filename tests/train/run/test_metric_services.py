"""Weights & Biases and MLflow themselves, without a server: a rollback and a restart lose no record."""

import json
import struct
import time

import pytest

from autoshard.train.run.metrics import Reporter

pytestmark = pytest.mark.slow
LOSSES = [(1, 4.0), (2, 3.0), (3, 9.0), (3, 2.0), (4, 1.0)]  # step 3 is done twice


def report(folder, writer, *, rolls_back):
    """Records steps 1 to 3, goes back to step 2 in the same attempt or in the next one, and records 3 and 4."""
    words = {"steps": 4, "enabled": True, "writers": (writer,), "settings": {"steps": 4}}
    reporter = Reporter(folder, start=0, **words)
    for step, loss in LOSSES[:3]:
        reporter.record(step, {"loss": loss})
    if rolls_back:
        reporter.rewind(2)
    else:
        reporter.close()
        time.sleep(1.1)  # the service names folders by the second
        reporter = Reporter(folder, start=2, **words)
    for step, loss in LOSSES[3:]:
        reporter.record(step, {"loss": loss})
    reporter.close()


def wandb_records(file):
    """Reads a file of an offline run: 7 bytes, then blocks of 32 KiB with parts of records, as in a LevelDB log."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # too little room for a part
            at += 32768 - at % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole, at = whole + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def wandb_records_of_ended_run(file):
    """Waits for the last record: another process writes the file, and the run does not wait for it."""
    for _ in range(600):
        records = list(wandb_records(file))
        if records and records[-1].WhichOneof("record_type") == "exit":
            return records
        time.sleep(0.1)
    raise AssertionError(f"{file} has no last record after 60 s")


@pytest.mark.parametrize("rolls_back", [True, False])
def test_weights_and_biases_keeps_records_of_steps_that_are_done_again(tmp_path, monkeypatch, rolls_back):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    report(tmp_path, "wandb", rolls_back=rolls_back)
    found, axes = [], set()
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len({file.name for file in files}) == 1  # one run
    for file in files:
        for record in wandb_records_of_ended_run(file):
            if record.WhichOneof("record_type") == "history":
                found.append({each.key or each.nested_key[0]: each.value_json for each in record.history.item})
            elif record.WhichOneof("record_type") == "metric" and record.metric.glob_name:
                axes.add(record.metric.step_metric)
    assert [(int(each["step"]), json.loads(each["loss"])) for each in found] == LOSSES
    assert axes == {"step"}


@pytest.mark.parametrize("rolls_back", [True, False])
def test_mlflow_keeps_records_of_steps_that_are_done_again(tmp_path, monkeypatch, rolls_back):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    report(tmp_path, "mlflow", rolls_back=rolls_back)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    history = client.get_metric_history((tmp_path / "mlflow_id").read_text(), "loss")
    assert sorted((each.step, each.value) for each in history) == sorted(LOSSES)
