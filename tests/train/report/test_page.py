"""The page of a run: what it says of runs of every kind, escaping, policy, size."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from autoshard.cli import main
from autoshard.errors import ConfigError
from autoshard.train.config import run_directory
from autoshard.train.report.page import run_page, write_report
from autoshard.train.report.run_files import fates_of, read_run
from autoshard.train.report.series import read_series, runs, smoothed, thinned
from tests.sharding.report.html_reader import read
from tests.train.report.runs import EVIL, curve, event, failed_first, finished, long, troubled, write


def text_of(folder):
    return re.sub(r"\s+", " ", " ".join(read(run_page(read_run(folder))).text))


def test_a_finished_run(tmp_path, capsys):
    folder = finished(tmp_path / "mine")
    assert main(["report", str(folder)]) == 0
    file = folder / "report.html"
    assert capsys.readouterr().out == f"wrote {file}\n"
    text = re.sub(r"\s+", " ", " ".join(read(file.read_text()).text))
    assert "Finished step 60 of 60" in text
    assert "of 94.0 s" in text and "64 %" in text  # 60 of 94 seconds are steps
    assert "kept: best, newest" in text and "kept: newest" in text  # steps 40 and 60
    assert re.search(r"20 2026-01-01 00:00:30 - - - removed", text)
    assert "fsdp 8 = 8 devices" in text and "The page of the plan" in text
    assert "peak, measured" in text and "3.00 GiB" in text
    values = np.array([record["loss"] for record in curve(1, 60)])
    assert f"{smoothed(values)[-1]:.4f}" in text and f"{values[-1]:.4f} in the last record" in text
    assert f"smallest {values[59] + 0.1:.4f}" in text or "smallest" in text
    assert "batch_size 16 64" in text  # a setting, its value, its default


def test_a_run_with_trouble(tmp_path):
    text = text_of(troubled(tmp_path / "run"))
    assert "In progress, or killed step 70 of 1,000" in text
    assert "left no reason: killed, or its machine was lost" in text
    assert "SIGTERM: saved and stopped" in text and "failed: RuntimeError" in text
    assert "16 in 2 processes changed" in text and text.count("processes changed") == 1
    assert "1 value of loss is not finite, the first at step 45: nan." in text
    assert "the step was skipped" in text and "went back to a checkpoint" in text
    assert "3 plans" in text and "tp:8" in text and "between attempts" in text and "lost work" in text
    assert "accuracy" in text


def test_a_run_that_failed_at_its_first_step(tmp_path):
    text = text_of(failed_first(tmp_path / "run"))
    assert "Failed step 0 of 1,000" in text and "RESOURCE_EXHAUSTED" in text and "None yet." in text


def test_a_run_that_did_not_begin(tmp_path):
    text = text_of(write(tmp_path / "run", plans=()))
    assert "Not begun step 0" in text and "All have their defaults." in text


def test_a_run_without_evaluation(tmp_path):
    folder = write(tmp_path / "run", curve(1, 5), [event(1, "begin", 1, 0, seconds={})])
    assert "The run has no evaluation yet." in text_of(folder)


def test_every_attempt_ends_as_its_events_say(tmp_path):
    folder = write(tmp_path / "run", (), [event(1, "begin", 1, 0), event(1, "end", 2, 0, reason="SIGINT")])
    assert "Stopped by SIGINT" in text_of(folder)
    notice = "notice of a preemption"
    folder = write(tmp_path / "notice", (), [event(1, "begin", 1, 0), event(1, "end", 2, 0, reason=notice)])
    assert f"Stopped by {notice}" in text_of(folder) and f"{notice}: saved and stopped" in text_of(folder)


def test_a_step_that_a_rollback_undid_is_not_done(tmp_path):
    bad = {"step": 40, "incident": "rollback", "why": "the loss is nan", "leaf": "w", "batch": 39}
    folder = write(tmp_path / "run", [*curve(1, 5), bad], [event(1, "begin", 1, 0)])
    page = run_page(read_run(folder))
    assert "step 5 of" in page and "rollback at step 40" in page


def test_a_value_that_is_not_finite_is_shown(tmp_path):
    folder = write(tmp_path / "run", [*curve(1, 5), {"step": 5, "val_loss": None}], [event(1, "begin", 1, 0)])
    assert "1 value of val_loss is not finite, the first at step 5: nan." in text_of(folder)


def test_a_step_that_is_skipped_again_after_a_kill_counts_once(tmp_path):
    """A rollback leaves out batches: the same step is another one then, if its batch is bad, too."""
    bad = {"step": 4, "incident": "skip", "why": "the loss is nan", "leaf": "w", "batch": 3}
    other = {**bad, "batch": 7}
    back = {**bad, "incident": "rollback"}
    folder = write(tmp_path / "run", [bad, bad, *curve(1, 5), back, other, back], [event(1, "begin", 1, 0)])
    assert read_series(folder).incidents == [bad, back, other, back]


def test_a_loss_that_is_not_finite_is_not_the_best():
    nan, inf = float("nan"), float("inf")
    found = fates_of(
        {10: {"val_loss": nan}, 20: {"val_loss": 2.0}, 30: {"val_loss": -inf}, 40: {"val_loss": nan}}, None
    )
    assert [step for step, fate in found.items() if "best" in fate] == [20]


def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path):
    folder = finished(tmp_path / "run")
    (folder / run_directory.PLAN_JSON).write_text("{")
    with (folder / run_directory.METRICS).open("a") as file:
        file.write('[1]\n"x"\n{"step": 61, "loss": ')
    with (folder / run_directory.ATTEMPTS).open("a") as file:
        file.write('{"attempt": 2}\n{"attempt": 2, "event": "begin", "time": "yesterday", "step": 0}\n')
    step = next((folder / run_directory.CHECKPOINTS).glob("step_*60"))
    (step / "autoshard.json").unlink(missing_ok=True)
    for manifest in step.rglob("*"):
        if manifest.is_file() and manifest.name != "commit_success.txt":
            manifest.write_bytes(b"")
    text = text_of(folder)
    assert "the plan of step 0 cannot be drawn: this is not a plan" in text
    assert "Finished step 60 of 60" in text and "damaged:" in text


def test_settings_of_another_version_are_shown(tmp_path):
    folder = finished(tmp_path / "run")
    config = json.loads((folder / run_directory.CONFIG).read_text())
    (folder / run_directory.CONFIG).write_text(json.dumps(config | {"of_the_future": 7}))
    text = text_of(folder)
    assert "this version does not know all settings" in text and "of_the_future" in text


@pytest.mark.parametrize("make", [finished, troubled, failed_first])
def test_the_page_escapes_what_comes_from_files_and_makes_no_request(tmp_path, make):
    html = run_page(read_run(make(tmp_path / EVIL.replace("/", "-"))))
    document = read(html)
    assert document.tags_of("script") == 2 and html.count("<script") == 2  # the curves', the plan's
    assert not document.tags & {"link", "img", "iframe", "object", "embed", "base"}
    assert not [value for name, value in document.attributes if name in ("src", "srcset") or name.startswith("on")]
    assert all(value.startswith("#") for name, value in document.attributes if name == "href")
    assert "default-src &#x27;none&#x27;" in html and not re.search(r"https?:|url\(|@import", html)
    names = [value for name, value in document.attributes if name == "id"]
    assert len(names) == len({*names})  # the plan's page inside it has other names
    assert len(html) < 250_000


def test_a_long_run_is_thinned_and_keeps_its_spike(tmp_path):
    folder = long(tmp_path / "run", 20_000)
    html = run_page(read_run(folder))
    assert len(html) < 150_000
    data = json.loads(read(html).attributes[[n for n, _ in read(html).attributes].index("data-curves")][1])
    (name, (points,)), *_ = data
    assert name == "training" and 250 <= len(points) <= 1000
    assert [6666, 9.0] in points and points[0][0] == 1 and points[-1][0] == 20_000
    values = read_series(folder).get("loss").arrays[1]
    assert len(values) == 20_000


def test_thinning_keeps_extremes_of_every_part():
    steps, values = np.arange(100_000.0), np.random.default_rng(0).normal(size=100_000)
    kept_steps, kept = thinned(steps, values, 100)
    assert len(kept) <= 400 and (np.diff(kept_steps) > 0).all()
    for n in range(100):
        part = slice(1000 * n, 1000 * (n + 1))
        inside = (kept_steps >= steps[part][0]) & (kept_steps <= steps[part][-1])
        assert kept[inside].max() == values[part].max() and kept[inside].min() == values[part].min()


def test_curves_break_where_steps_go_back():
    assert runs(np.array([])) == [] and len(runs(np.array([3.0, 1.0, 2.0]))) == 2


def test_errors_name_the_folder_and_the_file(tmp_path, capsys):
    with pytest.raises(ConfigError, match="is not a run: config.json is missing"):
        read_run(tmp_path)
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "is not a run" in capsys.readouterr().err
    folder = failed_first(tmp_path / "run")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(folder, tmp_path / "no" / "such" / "folder.html")
    assert write_report(folder, tmp_path / "page.html") == str(tmp_path / "page.html")
    assert not (folder / "report.html").exists()


def test_a_run_in_a_bucket_is_read_by_its_url(tmp_path, monkeypatch):
    """The folder is opened through etils, which knows buckets; here a local folder stands for one."""
    folder = finished(tmp_path / "run")
    opened = []

    def path(url):
        opened.append(url)
        return tmp_path / url.removeprefix("gs://bucket/")

    monkeypatch.setattr("autoshard.train.report.run_files.epath", SimpleNamespace(Path=path))
    assert write_report("gs://bucket/run") == str(folder / "report.html")
    assert set(opened) == {"gs://bucket/run"}
