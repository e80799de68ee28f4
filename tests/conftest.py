"""What every test shares: 8 virtual CPU devices, a compilation cache, our own warnings as errors, helpers."""

import gc
import hashlib
import importlib.metadata
import importlib.util
import itertools
import math
import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

# Eight devices; and machine code that is compiled fast rather than fast: tests compile far longer than they run.
# XLA's emitters of fusions triple that time; it refuses flags that it does not know, as this one since JAX 0.11.
FLAGS = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
for flag in FLAGS:
    if flag.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402  it reads both variables when it is imported

from tests import browser  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
CACHE_LIMIT_BYTES = 1 << 30
# Of the 65,530 that Linux gives a process: each compiled program takes a few, and beyond them the compiler crashes.
MOST_MAPPINGS = 30_000

# What hardly depends on the version of JAX, or is of what other tests run on both: the quick suite leaves it out.
ON_ONE_JAX = {
    "test_attention", "test_catalogue_activation", "test_catalogue_attention", "test_catalogue_convolution",
    "test_catalogue_elementwise", "test_catalogue_indexing", "test_catalogue_layout", "test_catalogue_linalg",
    "test_catalogue_losses", "test_catalogue_moe", "test_catalogue_norms", "test_catalogue_order",
    "test_catalogue_random", "test_catalogue_reduction", "test_cli", "test_config", "test_data", "test_derive",
    "test_damage", "test_digest", "test_discover", "test_docs", "test_golden", "test_harness", "test_history",
    "test_improve", "test_loss", "test_padding", "test_rediscovery", "test_report", "test_routing", "test_sample",
    "test_unfit", "test_variants", "test_vendor", "test_whatif", "test_writing_rules",
}  # fmt: skip

# No deadline: the first example of a test compiles. Derandomised: a red run is red again.
hypothesis.settings.register_profile("autoshard", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("autoshard")


def pytest_configure(config: pytest.Config) -> None:
    """Keeps compiled programs between runs, under pytest's own cache (`pytest --cache-clear` empties it)."""
    if os.environ.get("JAX_COMPILATION_CACHE_DIR") or getattr(config, "cache", None) is None:
        return
    folder = config.cache.mkdir("jax") / _machine()
    if not hasattr(config, "workerinput") and _size_bytes(folder) > CACHE_LIMIT_BYTES:
        shutil.rmtree(folder, ignore_errors=True)
    # By jax.config and not by the environment: the processes that tests start compile for themselves.
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # Two programs that differ in source lines only are two: audits and plans report those lines.
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)


_ended = itertools.count(1)


def pytest_runtest_logfinish() -> None:
    """Lets go of compiled programs before a process has too many of them."""
    maps = Path("/proc/self/maps")
    if next(_ended) % 50 == 0 and maps.exists() and maps.read_text().count("\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


def _machine() -> str:
    """A name for what compiled code depends on and the cache's key leaves out: the processor's features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        features = platform.processor()
    return f"{jax.__version__}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"


def _size_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*")) if folder.exists() else 0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what this machine cannot run, and says why; marks the files that one JAX version is enough for."""
    needs = {
        "tpu_compile": (importlib.util.find_spec("libtpu") is not None, "needs the extra aot-tpu"),
        "cuda_compile": (
            importlib.util.find_spec("jax_cuda13_plugin") is not None,
            "needs the extra aot-cuda",
        ),
        "browser": (
            browser.chromium() is not None or browser.is_required(),
            f"needs a browser: none of {', '.join(browser.NAMES)} is on PATH",
        ),
        "accelerator": (os.environ["JAX_PLATFORMS"] != "cpu", "needs an attached accelerator"),
    }
    for item in items:
        if item.path.stem in ON_ONE_JAX:
            item.add_marker("whole")
        for marker, (is_here, reason) in needs.items():
            if not is_here and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def own_warnings_are_errors() -> Iterator[None]:
    """A warning of ours that a test does not expect (`pytest.warns`) fails it."""
    from autoshard.errors import AutoshardWarning

    with warnings.catch_warnings():
        warnings.simplefilter("error", AutoshardWarning)
        yield


@pytest.fixture
def strict_numerics() -> Iterator[None]:
    """No implicit promotion of dtypes or ranks. For our own modules; optax and foreign code need both."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="session")
def mesh_of() -> Callable[..., jax.sharding.Mesh]:
    """Makes a mesh with Auto axes over the first devices: `mesh_of(data=2, model=4)`."""

    def make(**axes: int) -> jax.sharding.Mesh:
        kinds = (jax.sharding.AxisType.Auto,) * len(axes)
        devices = jax.devices()[: math.prod(axes.values())]
        return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=devices)

    return make


@pytest.fixture(scope="session")
def mesh8(mesh_of: Callable[..., jax.sharding.Mesh]) -> jax.sharding.Mesh:
    """Eight devices, `data` 2 x `model` 4."""
    return mesh_of(data=2, model=4)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture(scope="session")
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python code in a fresh interpreter: `run_python("import autoshard", cwd=tmp_path)`."""

    def run(code: str, *, cwd: Path = ROOT, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s)

    return run
