"""The wheel contains exactly the package and runs on its own; the lock file pins every requirement."""

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
    """Run a command that must succeed, without our PYTHONPATH, and return its standard output."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    completed = subprocess.run([str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert completed.returncode == 0, f"{' '.join(map(str, command))}\n{completed.stdout}\n{completed.stderr}"
    return completed.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel built from this source tree."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built


def empty_environment(folder: Path) -> Path:
    """Make a virtual environment with pip and nothing else, and return its interpreter."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def pip_install(python: Path, *what: str | Path, cwd: Path) -> None:
    run(python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *what, cwd=cwd)


def locked(python_version: str) -> dict[str, str]:
    """The pins of the lock file that apply to a Python version, `{canonical name: version}`."""
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
    """The requirements in pyproject.toml, including the `dev` extra and the extras that it takes."""
    extras = PROJECT["optional-dependencies"]
    found = [Requirement(text) for text in [*PROJECT["dependencies"], *extras["dev"]]]
    own = [extra for each in found if each.name == "autoshard" for extra in each.extras]
    taken = [Requirement(text) for extra in own for text in extras[extra]]
    return [each for each in [*found, *taken] if each.name != "autoshard"]


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
    """The wheel is installed in a new environment that uses this environment's dependencies."""
    python = empty_environment(tmp_path / "venv")
    pip_install(python, "--no-deps", wheel, cwd=tmp_path)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    site_packages = metadata.distribution("jax").locate_file("")
    (Path(site) / "dependencies.pth").write_text(f"{site_packages}\n")
    output = run(tmp_path / "venv/bin/autoshard", "--help", cwd=tmp_path)
    assert all(command in output for command in ("train", "plan", "rules", "ckpt", "generate", "bench"))
    imported_from = run(python, "-c", "import autoshard; print(autoshard.__file__)", cwd=tmp_path).strip()
    assert imported_from.startswith(site)


@pytest.mark.slow
def test_wheel_installs_and_runs_in_an_empty_environment(wheel, tmp_path):
    """Every module can be imported with only the declared dependencies, without the `dev` extra."""
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
def test_lock_pins_the_direct_requirements(python_version):
    pinned = locked(python_version)
    problems = []
    for requirement in direct_requirements():
        version = pinned.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version):
            problems.append(f"{requirement}: the lock has {version}")
    assert problems == []


def test_lock_pins_the_transitive_requirements():
    """Walk the installed packages, starting at the direct requirements."""
    pinned = locked(f"{sys.version_info.major}.{sys.version_info.minor}")
    to_visit, visited, missing = direct_requirements(), set(), set()
    while to_visit:
        requirement = to_visit.pop()
        key = (canonicalize_name(requirement.name), frozenset(requirement.extras))
        if key in visited:
            continue
        visited.add(key)
        if key[0] not in pinned:
            missing.add(key[0])
        try:
            needs = metadata.requires(requirement.name) or []
        except metadata.PackageNotFoundError:
            continue  # for another platform, or for an extra that is not installed here
        extras = requirement.extras or {""}
        for text in needs:
            need = Requirement(text)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras):
                to_visit.append(need)
    assert missing == set()
