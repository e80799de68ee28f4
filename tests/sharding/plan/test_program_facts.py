"""The facts of a plan that decide which option sets are tried."""

import pytest

from autoshard import plan
from autoshard.sharding.machines.chips import CHIPS
from autoshard.sharding.plan.program_facts import program_facts
from tests.sharding.programs import mlp_state, rows_of, sgd_step


def test_the_memory_is_that_of_the_chip_whatever_limit_is_requested():
    made = plan(sgd_step, mlp_state(), rows_of(64, 64), target="v5e:2x4", plan="fsdp:8", memory_limit_bytes=2**30)
    facts = program_facts(made)
    assert facts is not None
    assert facts.memory_share * CHIPS["v5e"].memory_bytes == pytest.approx(made.estimate.peak_memory_bytes)
    assert facts.collectives >= {"all-gather", "reduce-scatter"}


def test_a_machine_without_option_sets_has_no_facts():
    assert program_facts(plan(sgd_step, mlp_state(), rows_of(64, 64), target="cpu:8", plan="fsdp:8")) is None
