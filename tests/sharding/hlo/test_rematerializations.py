"""The partitioner's remarks, with shardings in both forms."""

import pytest

from autoshard.sharding.hlo.link_times import ProgramLinks
from autoshard.sharding.hlo.parser import parse_program
from autoshard.sharding.hlo.rematerializations import read_remarks, shard_count
from autoshard.sharding.machines.targets import find_target
from tests.sharding.hlo.texts import text_of

REMARK = (
    "W1122 09:04:05.84 29569 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The compiler cannot "
    "go from sharding {old} to {new} efficiently for HLO operation %add.88 = f32[8,128]{{1,0}} add(%a, %b), "
    'sharding={old}, metadata={{op_name="jit(step)/add" stack_frame_id=5}}. As the last resort, SPMD will replicate.'
)
OLD = "{devices=[8,1]<=[2,4]T(1,0)}"
NEW = "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"
OLD_NAMED = "{mesh['dp'=2,'tp'=4], [{'tp', 'dp'}, {}]}"
NEW_NAMED = "{mesh['dp'=2,'tp'=4], [{}, {'tp'}]}"


@pytest.mark.parametrize(
    ("sharding", "count"),
    [
        (OLD, 8),
        (NEW, 4),
        ("{devices=[2,2,2]<=[8] last_tile_dims={replicated}}", 4),
        ("{devices=[2,2,2,1]<=[8] last_tile_dims={manual, replicated}}", 4),
        (OLD_NAMED, 8),
        (NEW_NAMED, 4),
        ("{mesh['dp'=2,'tp'=4], [{'tp':(1)2}, {}]}", 2),
        ("{mesh['dp'=2,'tp'=4], [{}, {}], replicated={'dp'}}", 1),
        ("{replicated}", 1),
        ("{maximal device=0}", 1),
    ],
)
def test_the_number_of_shards_of_a_sharding(sharding, count):
    assert shard_count(sharding) == count


@pytest.mark.parametrize(("old", "new"), [(OLD, NEW), (OLD_NAMED, NEW_NAMED)])
def test_a_remark(old, new):
    program = parse_program(text_of('ROOT %a = f32[] constant(0), metadata={op_name="jit(step)/add" stack_frame_id=1}'))
    target = find_target("h100:8")
    text = REMARK.format(old=old, new=new)
    (remark,) = read_remarks(
        [text, text.replace("29569", "1")], program, ProgramLinks(target.topology, tuple(range(8)))
    )
    local = 8 * 128 * 4
    assert (remark.array, remark.bytes, remark.wire_bytes) == ("f32[8,128]", 8 * local, 7 * local)
    assert remark.us == pytest.approx(5 + 7 * local / 450e9 * 1e6)
    assert remark.cause == f"cannot reshard from {old} to {new} at add"
    assert (remark.op_name, remark.line) == ("jit(step)/add", "/home/me/model.py:12 (loss)")


def test_a_remark_in_an_unknown_form():
    (remark,) = read_remarks(["[SPMD] Involuntary full rematerialization of something"])
    assert (remark.bytes, remark.cause) == (0, "the partitioner gives no cause")
    assert remark.text == "Involuntary full rematerialization of something"
