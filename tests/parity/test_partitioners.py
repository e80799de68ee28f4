"""Both of XLA's partitioners make of a plan what one device computes: Shardy, JAX's default, and GSPMD before it."""

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
    """Programs are compiled by this partitioner during a test."""
    before = getattr(jax.config, SETTING, None)
    if before is None:
        pytest.skip("this JAX has one partitioner: nothing to choose")
    jax.config.update(SETTING, request.param == "shardy")
    yield request.param
    jax.config.update(SETTING, before)


@pytest.fixture
def gspmd():
    """Programs are compiled by GSPMD during a test; Shardy's are those of `test_workloads`."""
    before = getattr(jax.config, SETTING, None)
    if before is None:
        pytest.skip("this JAX has GSPMD no more")
    jax.config.update(SETTING, False)
    yield
    jax.config.update(SETTING, before)


def step_of(plan):
    """A function of its own for each test: what is compiled by one partitioner must not be taken for the other."""
    return auto_shard(lambda state, x: adamw_step(state, x), plan=plan)


def test_the_program_is_for_the_partitioner_that_is_asked_for(partitioner):
    state = (params := mlp_state(), OPTIMIZER.init(params))
    text = step_of("dp:2 tp:4").lower(state, batch()).as_text()
    assert ("sdy.sharding" in text) == (partitioner == "shardy")
    assert ("mhlo.sharding" in text) == (partitioner == "gspmd")


@pytest.mark.parametrize("plan", PLANS)
def test_a_step_is_that_of_one_device(partitioner, plan):
    state = (params := mlp_state(), OPTIMIZER.init(params))
    assert_close(jax.jit(adamw_step)(state, batch()), step_of(plan)(state, batch()))


@pytest.mark.whole
@pytest.mark.parametrize(("name", "plan"), [*SHORT, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in LONG)])
def test_a_workload_trains_as_on_one_device(gspmd, name, plan):
    compare(name, plan, trained.__wrapped__)
