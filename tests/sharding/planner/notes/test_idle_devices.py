"""Warnings of devices that a plan leaves without work of their own."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from autoshard import plan
from autoshard.errors import AutoshardWarning
from tests.sharding.programs import batch, mlp_state, sgd_step

IDLE = {
    "split axis": (
        dict(plan="dp:8"),
        12,
        r"only 4 of the 8 devices have work of their own, and the others repeat it: batch 12 is not divisible by dp "
        r"8. Pad batch to 16, or request another plan, or use 4 devices",
    ),
    "stores state only": (
        dict(plan="fsdp:8"),
        12,
        r"only 4 of the 8 devices .*: batch 12 is not divisible by fsdp 8\. Pad",
    ),
    "mesh of some devices": (
        dict(mesh={"data": 4}),
        32,
        r"4 of the 8 attached devices are idle: mesh {'data': 4} has 4. Give a mesh of 8 devices, or a .*Mesh of the 4",
    ),
    "target": (
        dict(target="v5e:3x5"),
        16,
        r"nothing is sharded: each of the 15 devices does all of the work \(batch 16 is not divisible by dp 15\). Pad "
        "batch to 30, or use 1 device",
    ),
}


@pytest.mark.parametrize("name", IDLE)
def test_idle_devices_are_a_warning_and_a_note(name):
    options, size, message = IDLE[name]
    with pytest.warns(AutoshardWarning, match=message) as caught:
        planned = plan(sgd_step, mlp_state(), batch(size=size), **options)
    assert len(caught) == 1
    assert [note in str(caught[0].message) for note in planned.notes] == [True]  # and nothing is said twice


BUSY = {
    "all devices": dict(plan="dp:8"),
    "a part of a larger machine": dict(target="cpu:4"),
    "fixed by the user": dict(mesh={"data": 8}, fixed={"0/*": P("data"), "1": P()}, plan={"data": ["batch"]}),
}


@pytest.mark.parametrize("name", BUSY)
def test_other_plans_do_not_warn(name):
    assert not plan(sgd_step, mlp_state(), batch(), **BUSY[name]).notes


def test_a_mesh_of_chosen_devices_does_not_warn(mesh_of):
    assert not plan(sgd_step, mlp_state(), batch(), mesh=mesh_of(data=4), plan="data=dp:4").notes
    assert jax.device_count() == 8
