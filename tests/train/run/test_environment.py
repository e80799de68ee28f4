"""The environment says which process this is; what is missing or wrong is named."""

from collections.abc import Mapping

import pytest

from autoshard.errors import ConfigError
from autoshard.train.run.environment import Place, find_place, is_in_cluster

NAMES = (
    "JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID SLURM_NTASKS SLURM_PROCID SKYPILOT_NUM_NODES "
    "SKYPILOT_NODE_RANK SKYPILOT_NODE_IPS OMPI_COMM_WORLD_SIZE TPU_WORKER_HOSTNAMES MEGASCALE_NUM_SLICES"
).split()
JAX = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:42", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
SLURM = {"SLURM_NTASKS": "4", "SLURM_PROCID": "2"}
SKYPILOT = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6\n"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch):
    """Sets these variables and no others that describe processes."""

    def set_to(variables: Mapping[str, str]) -> None:
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_to


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, None),
        (JAX, Place("10.0.0.1:42", 4, 3)),
        (SLURM, None),  # JAX finds the address
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:42"}, Place("10.0.0.1:42", 4, 2)),
        (SKYPILOT, Place("10.0.0.5:8476", 2, 1)),
        (SKYPILOT | {"SKYPILOT_NUM_NODES": "1"}, None),
        (SKYPILOT | JAX, Place("10.0.0.1:42", 4, 3)),
    ],
)
def test_the_place_of_a_process(environment, variables, place):
    environment(variables)
    assert find_place() == place


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "h:1"}, "JAX_NUM_PROCESSES, JAX_PROCESS_ID is not: set all three or none"),
        (JAX | {"JAX_PROCESS_ID": "4"}, "process 4 of 4 does not exist"),
        (JAX | {"JAX_NUM_PROCESSES": "four"}, "JAX_NUM_PROCESSES=four and JAX_PROCESS_ID=3 must be numbers"),
        ({"JAX_COORDINATOR_ADDRESS": "h:1", "SLURM_NTASKS": "4"}, "SLURM_PROCID is not set: start the processes"),
        (SKYPILOT | {"SKYPILOT_NODE_RANK": ""}, "SKYPILOT_NODE_RANK is not set: SkyPilot sets both"),
        (SKYPILOT | {"SKYPILOT_NODE_IPS": "10.0.0.5"}, "SKYPILOT_NUM_NODES is 2, but SKYPILOT_NODE_IPS has 1"),
    ],
)
def test_what_is_wrong_is_named(environment, variables, message):
    environment(variables)
    with pytest.raises(ConfigError, match=message):
        find_place()


def test_tasks_of_slurm_need_srun(environment):
    environment(SLURM)
    assert is_in_cluster()
    environment({"SLURM_NTASKS": "4"})
    with pytest.raises(
        ConfigError, match="SLURM_PROCID is not set: start the processes with srun, or unset SLURM_NTASKS"
    ):
        is_in_cluster()
    environment({"SLURM_NTASKS": "1"})
    assert not is_in_cluster()


def test_slices_of_one_host_are_one_run(environment):
    environment({"TPU_WORKER_HOSTNAMES": "one", "MEGASCALE_NUM_SLICES": "2"})
    assert is_in_cluster()
    environment({"TPU_WORKER_HOSTNAMES": "one", "MEGASCALE_NUM_SLICES": "1"})
    assert not is_in_cluster()
