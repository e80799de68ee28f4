"""How many gathered parameters a compiled program holds at once."""

import pytest
from gathered_buffers import Peak, gathered_buffers, peak
from hlo import read

GROUPS = "channel_id=1, replica_groups={{0,1}}, dimensions={0}"
PROGRAM = """HloModule step, is_scheduled=true, num_partitions=2

ENTRY %main (p: f32[4,8], q: f32[4,8]) -> f32[8,8] {
  %p = f32[4,8]{1,0} parameter(0)
  %q = f32[4,8]{1,0} parameter(1)
LINES
}
"""
SYNCHRONOUS = f"""  %a = f32[8,8]{{1,0}} all-gather(%p), {GROUPS}
  %one = f32[8,8]{{1,0}} multiply(%a, %a)
  %b = f32[8,8]{{1,0}} all-gather(%q), {GROUPS}
  ROOT %two = f32[8,8]{{1,0}} add(%one, %b)"""
BOTH = f"""  %a = f32[8,8]{{1,0}} all-gather(%p), {GROUPS}
  %b = f32[8,8]{{1,0}} all-gather(%q), {GROUPS}
  ROOT %two = f32[8,8]{{1,0}} add(%a, %b)"""
ASYNCHRONOUS = f"""  %s = (f32[4,8]{{1,0}}, f32[8,8]{{1,0}}) all-gather-start(%p), {GROUPS}
  %b = f32[8,8]{{1,0}} all-gather(%q), {GROUPS}
  %one = f32[8,8]{{1,0}} multiply(%b, %b)
  %a = f32[8,8]{{1,0}} all-gather-done(%s)
  ROOT %two = f32[8,8]{{1,0}} add(%one, %a)"""
COPIED = f"""  %a = f32[8,8]{{1,0}} all-gather(%p), {GROUPS}
  %c = f32[8,8]{{0,1}} copy(%a)
  %d = f32[64]{{0}} bitcast(%c)
  ROOT %two = f32[64]{{0}} add(%d, %d)"""


@pytest.mark.parametrize(("lines", "most"), [(SYNCHRONOUS, 1), (BOTH, 2), (ASYNCHRONOUS, 2), (COPIED, 2)])
def test_buffers_that_are_live_at_once(lines, most):
    assert peak(gathered_buffers(read(PROGRAM.replace("LINES", lines)))) == Peak(most * 256.0, most)


def test_programs_without_gathers():
    assert peak([]) == Peak(0.0, 0)
