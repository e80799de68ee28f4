"""The module of a gather, by the product that takes its result."""

import pytest

from autoshard.sharding.audit.module_origins import origin_of
from autoshard.sharding.hlo.collectives import Collective
from autoshard.sharding.hlo.parser import parse_program
from tests.sharding.hlo.texts import text_of

SCOPE = 'metadata={op_name="jit(f)/overlap[0/up:activations]/dot_general"}'
ENTRY = f"""
    %w = f32[8] parameter(0)
    %s = (f32[8], f32[16]) all-gather-start(%w), channel_id=1, replica_groups={{{{0,1}}}}, dimensions={{0}}
    %d = f32[16] all-gather-done(%s)
    %b = f32[16] bitcast(%d)
    ROOT %p = f32[16] negate(%b), {SCOPE}
"""


@pytest.mark.parametrize(("kind", "axes", "origin"), [
    ("all-gather", ("fsdp",), "overlap[0/up:gather]"),
    ("all-gather", ("tp",), "scan"),  # parameters are not stored over tp: an activation is gathered
    ("all-to-all", ("fsdp",), "scan"),
])  # fmt: skip
def test_the_product_names_the_module(kind, axes, origin):
    program = parse_program(text_of(ENTRY))
    found = origin_of(program, (program.entry.name, "s"), Collective(kind, ((0, 1),), 64.0, op_name="scan"), axes,
                      ("fsdp",))  # fmt: skip
    assert found == origin


def test_an_origin_with_a_module_stays():
    program = parse_program(text_of(ENTRY))
    own = Collective("all-gather", ((0, 1),), 64.0, op_name="overlap[0/down:gather]/x")
    assert origin_of(program, (program.entry.name, "s"), own, ("fsdp",), ("fsdp",)) == own.op_name
