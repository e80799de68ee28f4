"""With both of XLA's partitioners, Shardy (JAX's default) and GSPMD, a plan computes the same as one device."""

import jax
import pytest

from autoshard import auto_shard
from tests.parity.test_workloads import compare, trained
from tests.sharding.programs import OPTIMIZER, adamw_step, assert_close, batch, mlp_state

SETTING = "jax_use_shardy_partitioner"
PLANS = ("dp:8", "dp:2 tp:4", "dp:2 fsdp:2 tp:2 state")
SHORT = [("llama-tiny", "dp:2 tp:4 seq")]
LONG = [
    ("moe-tiny", "dp:2 ep:4"),
    ("gpt-tiny", "dp:8"),
    ("gpt-tiny", "dp:2 fsdp:2 tp:2"),
    ("llama-tiny", "fsdp:8"),
    ("moe-tiny", "fsdp:2 ep:2 tp:2"),
    ("mixtral-tiny", "fsdp:2 ep:2 tp:2"),
    ("wide-resnet-tiny", "dp:2 fsdp:2 tp:2"),
    ("vit-tiny", "fsdp:8"),
]


@pytest.fixture(params=["shardy", "gspmd"])
def partitioner(request):
    """Compiles programs with each partitioner in turn during a test."""
    before = getattr(jax.config, SETTING, None)
    if before is None:
        pytest.skip("this JAX has only one partitioner")
    jax.config.update(SETTING, request.param == "shardy")
    yield request.param
    jax.config.update(SETTING, before)


@pytest.fixture
def gspmd():
    """Compiles programs with GSPMD during a test. `test_workloads` covers Shardy."""
    before = getattr(jax.config, SETTING, None)
    if before is None:
        pytest.skip("this JAX no longer has GSPMD")
    jax.config.update(SETTING, False)
    yield
    jax.config.update(SETTING, before)


def step_of(plan):
    """Makes a new function for each test, so that no program compiled by one partitioner is reused for the other."""
    return auto_shard(lambda state, x: adamw_step(state, x), plan=plan)


def test_the_program_is_lowered_for_the_configured_partitioner(partitioner):
    state = (params := mlp_state(), OPTIMIZER.init(params))
    text = step_of("dp:2 tp:4").lower(state, batch()).as_text()
    assert ("sdy.sharding" in text) == (partitioner == "shardy")
    assert ("mhlo.sharding" in text) == (partitioner == "gspmd")


@pytest.mark.few(2)
@pytest.mark.parametrize("plan", PLANS)
def test_a_step_equals_that_of_one_device(partitioner, plan):
    state = (params := mlp_state(), OPTIMIZER.init(params))
    assert_close(jax.jit(adamw_step)(state, batch()), step_of(plan)(state, batch()))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plan"), [*SHORT, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in LONG)])
def test_a_workload_trains_as_on_one_device(gspmd, name, plan):
    compare(name, plan, trained.__wrapped__)
