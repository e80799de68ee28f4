"""The benchmark of absorbed reductions counts bytes, and the estimate equals its stored rows."""

import absorbed_reductions
import pytest
from hlo import read
from stored_rows import stored

STORED = stored(absorbed_reductions.PATH, absorbed_reductions.Row)
TEXT = """HloModule m, is_scheduled=true

%fused (p0: bf16[8,4], p1: bf16[4,16]) -> (bf16[8], bf16[8,16]) {
  %p0 = bf16[8,4]{1,0} parameter(0)
  %p1 = bf16[4,16]{1,0} parameter(1)
  %y = bf16[8,16]{1,0} convolution(%p0, %p1), dim_labels=bf_io->bf
  %m = bf16[8]{0} reduce(%y), dimensions={1}, to_apply=%max
  ROOT %t = (bf16[8]{0}, bf16[8,16]{1,0}) tuple(%m, %y)
}

%wide (p: bf16[8,16]) -> f32[8] {
  %p = bf16[8,16]{1,0} parameter(0)
  %c = f32[8,16]{1,0} convert(%p)
  ROOT %s = f32[8]{0} reduce(%c), dimensions={1}, to_apply=%add
}

ENTRY %main (x: bf16[8,4], w: bf16[4,16]) -> (f32[8], bf16[8,16]) {
  %x = bf16[8,4]{1,0} parameter(0)
  %w = bf16[4,16]{1,0} parameter(1)
  %f = (bf16[8]{0}, bf16[8,16]{1,0}) fusion(%x, %w), kind=kOutput, calls=%fused
  %y = bf16[8,16]{1,0} get-tuple-element(%f), index=1
  %s = f32[8]{0} fusion(%y), kind=kLoop, calls=%wide
  %copy = bf16[8,16]{0,1} copy(%y)
  ROOT %r = (f32[8]{0}, bf16[8,16]{0,1}) tuple(%s, %copy)
}
"""


def test_bytes_of_kernels_are_counted_for_each_element_without_copies():
    assert absorbed_reductions.compiled_bytes(read(TEXT), 8 * 16) == (2.0, 2.0)
    assert absorbed_reductions.compiled_bytes(read(TEXT), 8 * 4) == (0.0, 2.0)


@pytest.mark.parametrize("row", STORED, ids=lambda row: f"{row.target} {row.case} {row.length}")
def test_the_estimate_is_that_of_the_stored_row(row):
    made, elements = absorbed_reductions.planned(row.target, row.case, row.length)
    assert absorbed_reductions.estimated_bytes(made, elements) == (row.written[1], row.read[1])


def test_kernels_of_products_move_as_many_bytes_as_estimated():
    rows = [row for row in STORED if not row.case.startswith("attention")]
    differing = {row.case for row in rows if row.written[0] != row.written[1] or row.read[0] != row.read[1]}
    assert len(rows) > 30 and differing == {"sum of groups of 128"}  # XLA stores it in float32
