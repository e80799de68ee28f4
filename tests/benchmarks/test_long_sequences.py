"""Which all-gathers of a compiled program hold a whole sequence."""

import pytest
from hlo import read
from long_sequences import whole_sequences

PROGRAM = """HloModule step, is_scheduled=true, num_partitions=2

ENTRY %main (p: f32[4,8]) -> f32[8,8] {
  %p = IN parameter(0)
  ROOT %a = OUT all-gather(%p), channel_id=1, replica_groups={{0,1}}, dimensions={0}
}
"""
ASYNCHRONOUS = """HloModule step, is_scheduled=true, num_partitions=2

ENTRY %main (p: bf16[3,512,64]) -> bf16[3,1024,64] {
  %p = bf16[3,512,64] parameter(0)
  %s = (bf16[3,512,64], bf16[3,1024,64]) all-gather-start(%p), channel_id=1, replica_groups={{0,1}}, dimensions={1}
  ROOT %a = bf16[3,1024,64] all-gather-done(%s)
}
"""


@pytest.mark.parametrize(
    ("part", "whole", "found"),
    [
        ("bf16[2,512,64]", "bf16[2,1024,64]", True),
        ("bf16[1024,64]", "bf16[2048,64]", True),  # rows and positions as one dimension
        ("bf16[1,512,64]", "bf16[2,512,64]", True),  # chunks of positions
        ("bf16[2,256,64]", "bf16[2,256,128]", False),  # features of a part of the sequence
        ("s32[2,512]", "s32[2,1024]", False),  # tokens are no floats
        ("f32[512,96]", "f32[1024,96]", False),  # a parameter
        ("bf16[1,48,512]", "bf16[1,96,1024]", False),  # a layer of a stack
    ],
)
def test_whole_sequences_are_found(part, whole, found):
    program = read(PROGRAM.replace("IN", part).replace("OUT", whole))
    shapes = [(1024, 96), (4, 96, 1024)]
    assert [*whole_sequences(program, 1024, shapes)] == ([whole.replace(",", ", ")] if found else [])


def test_asynchronous_gathers_count():
    assert [*whole_sequences(read(ASYNCHRONOUS), 1024)] == ["bf16[3, 1024, 64]"]


def test_the_shard_in_the_tuple_of_a_start_is_not_gathered():
    """A shard of a weight may have as many elements as a sequence has positions."""
    program = ASYNCHRONOUS.replace("[3,512,64]", "[1,128,8,1]").replace("[3,1024,64]", "[1,256,8,1]")
    assert [*whole_sequences(read(program), 1024, [(256, 8, 1)])] == []
    assert [*whole_sequences(read(program), 1024)] == []
    assert [*whole_sequences(read(program), 2048)] == ["bf16[1, 256, 8, 1]"], "but the gathered array counts"
