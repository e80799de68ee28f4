"""The wheel holds exactly the package and runs where nothing else is; the lock holds all that is needed."""

import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ("3.11", "3.12", "3.13")


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command that has to succeed and returns what it printed; what lies on our own path is not on its."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run([str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert ran.returncode == 0, f"{' '.join(map(str, command))}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel built from this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built


def empty_environment(folder: Path) -> Path:
    """Makes a virtual environment with pip and nothing else; returns its interpreter."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def pip_install(python: Path, *what: str | Path, cwd: Path) -> None:
    run(python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *what, cwd=cwd)


def locked(python_version: str) -> dict[str, str]:
    """The lock as one Python version reads it, `{canonical name: version}`."""
    environment = {name: str(value) for name, value in default_environment().items()}
    environment["python_version"] = python_version
    pinned: dict[str, str] = {}
    for line in LOCK.read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate(environment):
                name = canonicalize_name(requirement.name)
                assert name not in pinned, f"the lock has {name} twice on Python {python_version}"
                pinned[name] = str(requirement.specifier).removeprefix("==")
    return pinned


def direct_requirements() -> list[Requirement]:
    """What pyproject.toml asks for: to build, to run, to test."""
    texts = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    return [Requirement(text) for text in texts]


def test_wheel_holds_exactly_the_package(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    sources = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "autoshard").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert package == sources
    assert "autoshard/py.typed" in package
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.mark.whole
def test_wheel_runs_outside_the_repository(wheel, tmp_path):
    """The wheel in an environment of its own, its dependencies those of this one."""
    python = empty_environment(tmp_path / "venv")
    pip_install(python, "--no-deps", wheel, cwd=tmp_path)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    here = metadata.distribution("jax").locate_file("")
    (Path(site) / "dependencies.pth").write_text(f"{here}\n")
    said = run(tmp_path / "venv/bin/autoshard", "--help", cwd=tmp_path)
    assert all(command in said for command in ("train", "plan", "rules", "ckpt", "generate", "bench"))
    where = run(python, "-c", "import autoshard; print(autoshard.__file__)", cwd=tmp_path).strip()
    assert where.startswith(site)


@pytest.mark.slow
def test_wheel_installs_and_runs_in_an_empty_environment(wheel, tmp_path):
    """Every module is importable with the declared dependencies alone, nothing of the `dev` extra."""
    python = empty_environment(tmp_path / "venv")
    pip_install(python, "-c", LOCK, wheel, cwd=tmp_path)
    assert "train" in run(tmp_path / "venv/bin/autoshard", "--help", cwd=tmp_path)
    code = """
import importlib, pkgutil, autoshard
for found in pkgutil.walk_packages(autoshard.__path__, "autoshard."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
"""
    run(python, "-c", code, cwd=tmp_path)
    assert "pytest" not in run(python, "-m", "pip", "list", cwd=tmp_path)


def test_lock_is_names_and_versions_only():
    line_form = re.compile(r'[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+( ; python_version (<|>=) "3\.\d+")?')
    lines = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    assert lines
    assert [line for line in lines if not line_form.fullmatch(line)] == []


@pytest.mark.parametrize("python_version", PYTHONS)
def test_lock_pins_what_the_project_asks_for(python_version):
    pinned = locked(python_version)
    problems = []
    for requirement in direct_requirements():
        version = pinned.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version):
            problems.append(f"{requirement}: the lock has {version}")
    assert problems == []


def test_lock_pins_what_those_need_in_turn():
    """Walks the installed packages from the direct requirements down."""
    pinned = locked(f"{sys.version_info.major}.{sys.version_info.minor}")
    waiting, seen, missing = direct_requirements(), set(), set()
    while waiting:
        requirement = waiting.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        if key[0] not in pinned:
            missing.add(key[0])
        try:
            needs = metadata.requires(requirement.name) or []
        except metadata.PackageNotFoundError:
            continue  # of another platform, or of an extra that is not installed here
        extras = requirement.extras or {""}
        for text in needs:
            need = Requirement(text)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(need)
    assert missing == set()
