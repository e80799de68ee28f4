"""Names of run folders, the newest one, and the files of plans."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from autoshard.errors import ConfigError
from autoshard.train.config.run_directory import new_run_dir, newest_run_dir, write_plan


def test_the_newest_run_of_a_preset_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder counts only if it has a config, and its time is that of its config, not its name."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--resume: there is no run in 'runs': give its folder with --run-dir"):
        newest_run_dir("small")
    one, two, unfinished = (new_run_dir("small", seconds) for seconds in (0, 100_000, 200_000))
    foreign = new_run_dir("large", 0)
    assert len({one, two, unfinished, foreign}) == 4
    for folder, changed in ((one, 2000), (two, 1000), (foreign, 3000)):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        os.utime(folder / "config.json", (changed, changed))
    unfinished.mkdir()
    assert newest_run_dir("small") == one
    assert newest_run_dir("large") == foreign


def test_each_plan_of_a_run_gets_a_file(tmp_path: Path) -> None:
    class Plan(SimpleNamespace):
        def __str__(self) -> str:
            return f"plan {self.name}"

        def to_json(self) -> str:
            return f'"{self.name}"'

    for name, step in (("a", 0), ("b", 3), ("b", 3), ("c", 3), ("a", 5)):
        write_plan(tmp_path, Plan(name=name), step)
    texts = {path.name: path.read_text() for path in tmp_path.glob("*.txt")}
    assert texts == {"plan.txt": "plan a\n", "plan-3.txt": "plan b\n", "plan-3-2.txt": "plan c\n"}
    assert {path.name for path in tmp_path.glob("*.json")} == {"plan.json", "plan-3.json", "plan-3-2.json"}
