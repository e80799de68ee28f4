"""The programs under examples/ are short, run unchanged and print the expected texts."""

import importlib.metadata
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.spmdrules.core import registry
from tests.pages import blocks, differences

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
PAGES = sorted((ROOT / "docs").rglob("*.md"))  # some show parts of the programs, and what they print
# Estimates differ a little between versions of JAX, which trace other equations. Pages show those of the oldest one.
HAS_JAX_OF_PAGES = importlib.metadata.version("jax").startswith("0.10.")
MAX_LINES = 80  # chosen: two minutes of reading

PLANNED = ("train_step on cpu:8", "memory per device", "sharded:", "one device:")
OUTPUTS = {
    "plain_jax": PLANNED,
    "flax_nnx": (*PLANNED, "up.kernel:  NamedSharding("),
    "flax_linen": PLANNED,
    "equinox_model": PLANNED,
    "own_kernel": PLANNED,
    "plan_for_a_pod": ("train_step on v5p:4x4x4", "= 64 devices", "alternatives (all else", "-> fsdp:8 tp:8"),
}
# Default tests of `sharding/api`, `foreign` and `spmdrules/custom_ops` have such programs.
LONG = ("equinox_model", "flax_linen", "own_kernel")
ALONE = "plain_jax"  # it runs in its own process, as users start it; the others share that of the tests


def test_every_example_is_tested():
    assert {file.stem for file in EXAMPLES.glob("*.py")} == set(OUTPUTS)


@pytest.mark.parametrize("name", OUTPUTS)
def test_example_is_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= MAX_LINES


def check(name, printed):
    for text in OUTPUTS[name]:
        assert text in printed, printed
    for block in (block for page in PAGES for block in blocks(page)) if HAS_JAX_OF_PAGES else ():
        if block.source == EXAMPLES / f"{name}.py":
            assert not differences(block, printed), differences(block, printed)


@pytest.mark.whole
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in OUTPUTS if name != ALONE],
)
def test_example_runs(name, tmp_path, monkeypatch, capsys):
    """Here a warning is an error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))  # rules of the example end with it
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    check(name, capsys.readouterr().out)


@pytest.mark.whole
def test_an_example_runs_in_its_own_process(tmp_path):
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    completed = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{ALONE}.py")],
        cwd=tmp_path,
        env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert completed.returncode == 0, completed.stderr
    assert "AutoshardWarning" not in completed.stderr
    check(ALONE, completed.stdout)
