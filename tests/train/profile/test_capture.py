"""A trace of a real run on 8 virtual devices: recorded, named, compared."""

import json
import re
from collections import Counter
from typing import cast

import jax
import pytest
from jax.profiler import ProfileData

from autoshard.cli import main
from autoshard.errors import ConfigError
from autoshard.train.config.profile_words import read_profile
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.profile.capture import Profiler
from autoshard.train.profile.comparison import compare_trace, read_names
from autoshard.train.profile.named_lines import PLANE
from autoshard.train.program.planned_step import PlacedStep
from autoshard.train.run.loop import train

NO_STEP = cast(PlacedStep, None)  # of tests that end before collectives are named


def test_a_run_records_a_trace_that_its_plan_is_compared_with(make_config, capsys):
    config = make_config(profile="3:4", steps=5)
    run = train(config).run_dir
    said = capsys.readouterr().out
    assert f"trace of steps 3 to 4 in {run}/profile: `autoshard profile {run}` compares it with the plan" in said
    assert len(list(run.glob("profile/plugins/profile/*/*.xplane.pb"))) == 1  # where TensorBoard looks
    names = read_names(run)
    assert names["steps"] == [3, 4] and names["module"] == "jit_train_step" and not names["compiled"]
    assert json.loads((run / "config.json").read_text())["profile"] is None  # it applies to one attempt
    (session,) = run.glob("profile/plugins/profile/*/*.xplane.pb")
    plane = ProfileData.from_file(str(session)).find_plane_with_name(PLANE)
    assert plane is not None
    shown = Counter(event.name for line in plane.lines for event in line.events)
    expected: Counter[str] = Counter()
    for each in names["collectives"]:
        expected[each["name"]] += round(each["runs"] * 8 * 2)  # 8 devices, 2 steps
    assert shown == expected and not any(each["ends"] for each in names["collectives"])

    found = compare_trace(run)
    assert found.platform == "CPU" and found.devices == 8 and found.steps == (3, 4)
    assert not [note for note in found.notes if "compiled again" in note or "no event" in note]
    kinds = {row.kind: row for row in found.kinds}
    assert kinds["compute"].measured_us > 0 and kinds["all-gather"].measured_us > 0
    counted = {each["instruction"]: each["runs"] for each in names["collectives"]}
    assert {row.instruction: row.runs for row in found.collectives} == counted  # each ran as often as the program says
    assert any("of state/params/" in row.name for row in found.collectives)
    assert found.step_us is not None
    busy = sum(row.measured_us for row in found.kinds)
    assert sum(row.compute_us + row.measured_us for row in found.modules) == pytest.approx(busy)
    modules = {row.module: row for row in found.modules}  # compute and collectives of a module have one name
    assert modules["layers/mlp"].compute_us > 0 and modules["layers/mlp"].predicted_us > 0

    assert main(["profile", str(run)]) == 0
    text = capsys.readouterr().out
    assert re.search(r"step: planned .* measured .*x", text) and "by kind" in text and "by module" in text
    assert main(["profile", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["session"] == names["session"]


@pytest.mark.whole
def test_an_error_in_the_window_ends_the_trace_and_is_raised(tmp_path):
    said = []
    for _ in range(2):  # a second trace can begin, so the first one was ended
        with pytest.raises(ZeroDivisionError):
            with Profiler(read_profile("1:3", 9), tmp_path, NO_STEP, 0, said.append) as profiler:
                profiler.begin()
                with profiler.step(1):
                    raise ZeroDivisionError
    assert (
        said == [f"the trace in {tmp_path}/profile ends with an error of the run, so its collectives have no names"] * 2
    )


@pytest.mark.slow
def test_a_signal_in_the_window_ends_the_trace_with_the_steps_so_far(make_config, monkeypatch):
    """The run stops after step 3, as after a signal."""
    monkeypatch.setattr("autoshard.train.run.loop.StopAgreement.after", lambda self, step, last: step == 3)
    saved: list[bool] = []
    names = Profiler._names
    monkeypatch.setattr(Profiler, "_names", lambda self: saved.append(is_saved(3)) or names(self))
    config = make_config(profile="2:5", steps=6)

    def is_saved(step: int) -> bool:
        return (config.run_dir / "checkpoints" / f"step_{step:08d}").is_dir()

    run = train(config).run_dir
    assert saved == [True]  # the state comes first: little time may be left
    assert read_names(run)["steps"] == [2, 3]
    assert compare_trace(run).steps == (2, 3)


def test_a_full_disk_costs_the_trace_its_names_but_not_the_run_its_steps(tmp_path, monkeypatch):
    said: list[str] = []
    profiler = Profiler(read_profile("1", 5), tmp_path, NO_STEP, 0, said.append)
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *args, **options: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)

    def full(steps: list[int]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profiler, "_write_names", full)
    with profiler:
        profiler.begin()
        with profiler.step(1):
            pass
        profiler.end()
    assert said == [f"the trace in {tmp_path / 'profile'} has no names: OSError: [Errno 28] No space left on device"]


def test_a_window_before_the_attempt_is_said_and_not_recorded(tmp_path):
    said = []
    with Profiler(read_profile("2:3", 9), tmp_path, NO_STEP, 4, said.append) as profiler:
        assert not any(profiler.begins(step) or profiler.ends(step) for step in range(1, 10))
    assert said == ["no trace is recorded: this attempt begins at step 5, after steps 2 to 3 of --profile"]


def test_a_window_that_has_begun_is_recorded_from_the_first_step_of_the_attempt(tmp_path):
    with Profiler(read_profile("2:7", 9), tmp_path, NO_STEP, 4, print) as profiler:
        assert [step for step in range(1, 10) if profiler.begins(step)] == [5]
    with Profiler(read_profile("2:7", 9), tmp_path, NO_STEP, 4, print, enabled=False) as profiler:
        assert not any(map(profiler.begins, range(1, 10)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ten", "profile is 'ten'; write a step, such as 10, or the first and last, such as 10:12"),
        ("1:2:3", "write a step"),
        ("0", "steps are numbered from 1"),
        ("5:4", "the last is not before the first"),
        ("5:2000", "but the run ends at step 1000: give steps up to 1000"),
    ],
)
def test_invalid_windows_are_errors(words, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(profile=words, steps=1000)


def test_windows_name_their_steps():
    assert read_profile(None, 9) is None
    assert str(read_profile(" 3 ", 9)) == "step 3" and str(read_profile("3:9", 9)) == "steps 3 to 9"


def test_a_run_without_a_trace_is_an_error(tmp_path, capsys):
    assert main(["profile", str(tmp_path)]) == 2
    assert "is not a run" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert main(["profile", str(tmp_path)]) == 2
    assert "has no trace: record one with `autoshard train --profile STEPS`" in capsys.readouterr().err
    (tmp_path / "profile").mkdir()
    for text, message in (("{", "cannot be read"), ('{"format": 0}', "another format"), ("[]", "another format")):
        (tmp_path / "profile" / "collectives.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_names(tmp_path)
