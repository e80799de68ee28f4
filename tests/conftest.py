"""Shared setup of all tests: 8 virtual CPU devices, a compilation cache, our warnings as errors, and fixtures."""

import gc
import hashlib
import importlib.util
import itertools
import math
import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.compiler_flags import xla_flags

# Eight devices, except if XLA_FLAGS already has a number.
flags = xla_flags(devices=8).split()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] != "cpu":  # an accelerator runs what users run, and test processes share its memory
    flags = []
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
for flag in flags:
    if flag.partition("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()

import jax  # noqa: E402  reads both variables on import

from tests import browser  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
CACHE_LIMIT_BYTES = 1 << 30  # chosen: the cache of compiled programs is emptied above this size
# Linux allows a process 65,530 memory mappings by default. Each compiled program takes a few, and the compiler crashes
# when there are none left. Measured: the tests between two counts add fewer than 5,000. Chosen: room for 15,000.
MAX_MAPPINGS = 50_000
TESTS_BETWEEN_COUNTS = 50

# Test files and folders, relative to `tests/`, that the quick suite leaves out. Either they hardly depend on the
# version of JAX, or other tests run the same code on every version.
ON_ONE_JAX = {
    "ckpt/exchange", "ckpt/restore", "ckpt/state/test_array_digest", "ckpt/state/test_array_packing", "ckpt/store",
    "ckpt/test_any_mesh", "ckpt/test_background", "ckpt/test_command", "ckpt/test_damage", "ckpt/test_faults",
    "ckpt/test_odd_states", "ckpt/test_pipelined_states", "ckpt/test_processes", "ckpt/test_refusals",
    "ckpt/test_texts", "foreign/test_harness", "golden/test_golden", "kernels/grouped/test_matmul",
    "kernels/sequence/test_ring", "kernels/test_attention_cost", "kernels/test_cross_entropy",
    "kernels/test_kernel_choice", "kernels/test_unseen_rows", "kernels/test_visibility", "launch", "models",
    "parity/test_global_norm", "parity/test_idle_experts", "serve", "sharding/api/test_plan",
    "sharding/audit/test_aot_compile", "sharding/autotune/test_measured_time", "sharding/autotune/test_settling",
    "sharding/axes/naming", "sharding/axes/test_expert_routing", "sharding/axes/rows/test_generated_batches",
    "sharding/axes/test_logical_axes", "sharding/axes/rows/test_single_row", "sharding/axes/test_state_checks",
    "sharding/axes/weights/test_weight_cover", "sharding/cost", "sharding/discover", "sharding/hlo", "sharding/layout",
    "sharding/lower/gathers", "sharding/lower/products", "sharding/lower/test_empty_arrays",
    "sharding/lower/test_recurrent_cells", "sharding/lower/test_resharded_products",
    "sharding/lower/test_square_weights", "sharding/machines", "sharding/microbatches/test_accumulation",
    "sharding/microbatches/test_counted_rows", "sharding/microbatches/test_repeated_rows",
    "sharding/microbatches/test_replicas", "sharding/microbatches/test_states", "sharding/offload/test_layer_words",
    "sharding/oracle/test_rule_check", "sharding/pipeline/test_choice",
    "sharding/pipeline/test_inner_words", "sharding/pipeline/test_schedules", "sharding/pipeline/test_slots",
    "sharding/pipeline/test_stage_gathers", "sharding/pipeline/test_stages", "sharding/planner", "sharding/report",
    "sharding/rewrite/experts/test_grouped_products", "sharding/rewrite/masks", "sharding/rewrite/test_array_masks",
    "sharding/rewrite/test_kernels_option", "sharding/runtime/test_static_leaves", "sharding/search",
    "spmdrules/catalogue", "spmdrules/custom_ops/test_operator", "spmdrules/families/test_cudnn",
    "spmdrules/propagation/test_propagate", "spmdrules/reference/test_derive", "spmdrules/test_writing_rules",
    "test_cli", "test_docs", "test_layout", "test_packaging", "test_project_files", "test_public_names", "test_release",
    "test_shown", "test_site", "test_units", "test_wrong_inputs", "train/config", "train/data", "train/inference",
    "train/program/test_frozen_base", "train/program/test_frozen_layers", "train/program/test_remat_search",
    "train/program/test_step_timing", "train/program/test_variants", "train/report", "train/run", "train/step",
}  # fmt: skip

# No deadline: the first example of a test compiles. Derandomised: every run tests the same examples.
hypothesis.settings.register_profile("autoshard", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.load_profile("autoshard")


def pytest_configure(config: pytest.Config) -> None:
    """Keeps compiled programs between runs in pytest's cache (`pytest --cache-clear` empties it)."""
    if os.environ.get("JAX_COMPILATION_CACHE_DIR") or getattr(config, "cache", None) is None:
        return
    folder = config.cache.mkdir("jax") / _machine()
    if not hasattr(config, "workerinput") and _size_bytes(folder) > CACHE_LIMIT_BYTES:
        shutil.rmtree(folder, ignore_errors=True)
    # Set by jax.config, not by the environment: processes that tests start do not use the cache.
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # Programs that differ only in source lines have separate entries, because audits and plans report those lines.
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)


def pytest_collection_finish() -> None:
    """Keeps the garbage collector from visiting the collected tests again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # chosen: fewer collections while programs are traced


def pytest_sessionfinish() -> None:
    """Frees what the tests have left. After `freeze`, the garbage collections that pytest runs next take no time."""
    gc.collect()
    gc.freeze()


_finished_tests = itertools.count(1)


def pytest_runtest_logfinish() -> None:
    """Frees compiled programs before the process runs out of memory mappings."""
    maps = Path("/proc/self/maps")
    if next(_finished_tests) % TESTS_BETWEEN_COUNTS or not maps.exists():
        return
    if maps.read_text().count("\n") > MAX_MAPPINGS:
        jax.clear_caches()
        gc.collect()


def _machine() -> str:
    """Names what compiled code depends on and the cache's key lacks: JAX's version and the CPU's features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        features = platform.processor()
    return f"{jax.__version__}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"


def _size_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*")) if folder.exists() else 0


def _needs_one_jax(path: Path) -> bool:
    return any(str(each) in ON_ONE_JAX for each in (path, *path.parents))


def _leave_few(items: list[pytest.Item]) -> None:
    """Marks all but n parameter sets of a test with `few(n)` as slow. The n sets are evenly spread."""
    found: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    limits: dict[str, int] = {}
    for item in items:
        marks = {mark.name: mark for mark in reversed([*item.iter_markers()])}  # the closest mark of a name
        if "few" in marks and "slow" not in marks:
            test = item.nodeid.partition("[")[0]
            found[test].append(item)
            limits[test] = marks["few"].args[0]
    for test, several in found.items():
        kept = {round(k * (len(several) - 1) / max(limits[test] - 1, 1)) for k in range(limits[test])}
        for number, item in enumerate(several):
            if number not in kept:
                item.add_marker("slow")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Keeps the quick suite from importing files of which it runs no test."""
    is_left_out = "not whole" in config.option.markexpr and collection_path.is_relative_to(TESTS)
    return True if is_left_out and _needs_one_jax(collection_path.relative_to(TESTS).with_suffix("")) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests that this machine cannot run, and marks the files that need only one JAX version."""
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
        "parity": (
            importlib.util.find_spec("transformers") is not None or os.environ.get("AUTOSHARD_PARITY") == "required",
            "needs the extra parity",
        ),
        "accelerator": (os.environ["JAX_PLATFORMS"] != "cpu", "needs an attached accelerator"),
    }
    missing = {marker: reason for marker, (is_here, reason) in needs.items() if not is_here}
    needs_one_jax = {
        path: path.is_relative_to(TESTS) and _needs_one_jax(path.relative_to(TESTS).with_suffix(""))
        for path in {item.path for item in items}
    }
    _leave_few(items)
    for item in items:
        names = {mark.name for mark in item.iter_markers()}
        for marker in names & missing.keys():
            # This machine lacks what the test needs, such as an accelerator. pytest prints the reason from `missing`.
            item.add_marker(pytest.mark.skip(reason=missing[marker]))
        if needs_one_jax[item.path]:
            item.add_marker("whole")


@pytest.fixture(autouse=True)
def own_warnings_are_errors() -> Iterator[None]:
    """Fails a test if we warn unexpectedly: without `pytest.warns` or a mark `filterwarnings`."""
    from autoshard.errors import AutoshardWarning

    with warnings.catch_warnings():
        warnings.simplefilter("error", AutoshardWarning, append=True)  # marks come before it
        yield


@pytest.fixture
def strict_numerics() -> Iterator[None]:
    """Forbids implicit promotion of dtypes and ranks. For our own modules only: optax and foreign code need both."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="session")
def mesh_of() -> Callable[..., jax.sharding.Mesh]:
    """Returns a function that makes a mesh of Auto axes over the first devices: `mesh_of(data=2, model=4)`."""

    def make(**axes: int) -> jax.sharding.Mesh:
        kinds = (jax.sharding.AxisType.Auto,) * len(axes)
        devices = jax.devices()[: math.prod(axes.values())]
        return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=devices)

    return make


@pytest.fixture(scope="session")
def mesh8(mesh_of: Callable[..., jax.sharding.Mesh]) -> jax.sharding.Mesh:
    """A mesh of eight devices, `data` 2 x `model` 4."""
    return mesh_of(data=2, model=4)


@pytest.fixture(scope="session")
def root() -> Path:
    """The root folder of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Returns a function that runs code in a new interpreter: `run_python("import autoshard", cwd=tmp_path)`."""

    def run(code: str, *, cwd: Path = ROOT, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s)

    return run


@pytest.fixture(scope="session", name="browser")
def running_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    """A headless Chromium."""
    path = browser.chromium()
    if path is None:
        pytest.fail(
            f"AUTOSHARD_BROWSER=required, but there is no browser: none of {', '.join(browser.NAMES)} is on PATH"
        )
    with browser.Browser(path, tmp_path_factory.mktemp("browser") / "profile") as running:
        yield running
