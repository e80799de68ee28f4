"""Programs that do not mention autoshard compute the same under `auto_shard` as on one device."""

import importlib
from functools import cache
from pathlib import Path

import pytest

from tests.foreign import harness

PROGRAMS = (
    "nnx_cnn",
    "nnx_transformer",
    "linen_transformer",
    "linen_lstm",
    "linen_train_state",
    "scan_recurrence",
    "optax_mlp",
    "optax_multi_steps",
    "optax_inject_hyperparams",
    "equinox_mlp",
    "equinox_batch_norm",
    "haiku_cnn",
    "haiku_lstm",
    "keras_cnn",
    "numpyro_svi",
    "penzai_mlp",
)
MIXED = "dp:2 fsdp:2 tp:2"
# Always run: the planner's own plan for some programs, and one plan with three mesh axes. Longer suites run the others.
ALWAYS = [("optax_mlp", None), ("optax_mlp", MIXED)]
ALWAYS += [(name, "fsdp:8") for name in ("equinox_mlp", "linen_train_state")]
ALWAYS += [(name, MIXED) for name in ("optax_multi_steps", "optax_inject_hyperparams", "penzai_mlp")]
ONE_JAX = [("scan_recurrence", None)]
ONE_JAX += [(name, MIXED) for name in ("equinox_batch_norm", "haiku_cnn", "keras_cnn")]
CASES = [(name, plan) for name in PROGRAMS for plan in (None, MIXED, "dp:8", "fsdp:8", "tp:8")]
STEPS = 20

# Adam divides a gradient by its own size: a leaf whose gradient is only noise, such as the bias of keys, moves in full
# steps.
ADAPTIVE = ("linen_transformer",)


def program(name):
    """Imports a program and its library, which takes seconds for some."""
    return importlib.import_module(f"tests.foreign.{name}")


@cache
def single(name):
    return harness.run_single(program(name), STEPS)


def case(name, plan):
    marks = () if (name, plan) in ALWAYS else pytest.mark.whole if (name, plan) in ONE_JAX else pytest.mark.slow
    return pytest.param(name, plan, marks=marks, id=f"{name}-{plan or 'chosen'}")


@pytest.mark.few(2)
@pytest.mark.filterwarnings("ignore:.*devices have work of their own")
@pytest.mark.parametrize(("name", "plan"), [case(*each) for each in CASES])
def test_parity_with_one_device(name, plan):
    result = harness.run_sharded(program(name), STEPS, plan=plan)
    harness.compare(single(name), result, state=name not in ADAPTIVE)
    assert result.devices == 8
    if plan == "fsdp:8":
        assert result.share < 0.3  # nearly all of the state is divisible by 8


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_do_not_mention_sharding(name):
    source = Path(__file__).with_name(f"{name}.py").read_text()
    for word in ("autoshard", "sharding", "PartitionSpec", "mesh"):
        assert word not in source.lower()
