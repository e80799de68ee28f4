"""Trip counts of loops, printed by the compiler or derived from the loop."""

import pytest

from autoshard.sharding.hlo.parser import parse_program
from autoshard.sharding.hlo.trip_counts import COMPARISONS, Loops, trip_count
from tests.sharding.hlo.texts import loop, text_of

ENTRY = """
%start = s32[] constant({start})
%array = f32[64] constant(0)
%copied = s32[] copy(%start)
%state = (s32[], f32[64]) tuple(%copied, %array)
ROOT %loop = (s32[], f32[64]) while(%state), condition=%condition, body=%body{more}
"""
LESS = """
%limit = s32[] constant({limit})
%i = s32[] get-tuple-element(%p), index=0
ROOT %go = pred[] compare(%i, %limit), direction={direction}
"""
STEP = """
%i2 = s32[] get-tuple-element(%q), index=0
%one = s32[] constant({step})
%next = s32[] {how}(%i2, %one)
%x = f32[64] get-tuple-element(%q), index=1
ROOT %after = (s32[], f32[64]) tuple(%next, %x)
"""


def trips(text):
    program = parse_program(text)
    loops = Loops(program)
    return [loops.trips(c, i) for c in program.computations.values() for i in c.instructions if i.opcode == "while"]


def trips_of_counter(start=0, limit=24, step=1, direction="LT", how="add", more=""):
    computations = loop(LESS.format(limit=limit, direction=direction), STEP.format(step=step, how=how))
    return trips(text_of(ENTRY.format(start=start, more=more), computations))[0]


@pytest.mark.parametrize(
    ("loop_settings", "expected"),
    [
        ({}, 24),
        ({"start": 3, "limit": 10, "step": 2}, 4),
        ({"start": 23, "limit": 0, "how": "subtract", "direction": "GE"}, 24),
        ({"start": 24, "limit": 0, "step": -1, "direction": "GT"}, 24),
        ({"direction": "LE"}, 25),
        ({"direction": "NE"}, 24),
        ({"start": 30}, 0),
        ({"step": 0}, None),
        ({"direction": "EQ"}, 0),
        ({"how": "multiply"}, None),
        ({"more": ', backend_config={"known_trip_count":{"n":"7"}}'}, 7),
    ],
)
def test_a_loop_over_a_counter(loop_settings, expected):
    assert trips_of_counter(**loop_settings) == expected


def test_a_comparison_with_swapped_operands():
    other = """
        %limit = s32[] constant(12)
        %i = s32[] get-tuple-element(%p), index=0
        ROOT %go = pred[] compare(%limit, %i), direction=GT
    """
    assert trips(text_of(ENTRY.format(start=2, more=""), loop(other, STEP.format(step=1, how="add")))) == [10]


def test_a_comparison_and_a_step_inside_fusions():
    compare = """
%compared (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}
"""
    stepped = """
%stepped (c: s32[]) -> s32[] {
  %c = s32[] parameter(0)
  %two = s32[] constant(2)
  ROOT %plus = s32[] add(%c, %two)
}
"""
    condition = """
        %limit = s32[] constant(10)
        %i = s32[] get-tuple-element(%p), index=0
        ROOT %go = pred[] fusion(%i, %limit), kind=kLoop, calls=%compared
    """
    body = """
        %i2 = s32[] get-tuple-element(%q), index=0
        %next = s32[] fusion(%i2), kind=kLoop, calls=%stepped
        %x = f32[64] get-tuple-element(%q), index=1
        ROOT %after = (s32[], f32[64]) tuple(%next, %x)
    """
    assert trips(text_of(ENTRY.format(start=0, more=""), compare, stepped, loop(condition, body))) == [5]


def nested(state: str, condition: str, inner: str, outer: str) -> str:
    """A loop of three iterations around another one. Both increment their counters; the rest is given."""
    return f"""
%outer_condition (p: ({state})) -> pred[] {{
  %p = ({state}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %three = s32[] constant(3)
  ROOT %go = pred[] compare(%i, %three), direction=LT
}}

%inner_condition (p: ({state})) -> pred[] {{
  %p = ({state}) parameter(0)
  {condition}
  ROOT %go = pred[] compare(%i, %limit), direction=LT
}}

%inner_body (q: ({state})) -> ({state}) {{
  %q = ({state}) parameter(0)
  %one = s32[] constant(1)
  {inner}
}}

%outer_body (r: ({state})) -> ({state}) {{
  %r = ({state}) parameter(0)
  %inner = ({state}) while(%r), condition=%inner_condition, body=%inner_body
  %i = s32[] get-tuple-element(%r), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  {outer}
}}
"""


def test_a_limit_and_a_start_that_an_outer_loop_passes_in():
    state = "s32[], s32[], s32[]"  # the outer counter, the inner limit, the inner start
    condition = """
  %i = s32[] get-tuple-element(%p), index=2
  %limit = s32[] get-tuple-element(%p), index=1"""
    inner = f"""
  %i = s32[] get-tuple-element(%q), index=2
  %next = s32[] add(%i, %one)
  %limit = s32[] get-tuple-element(%q), index=1
  %outer = s32[] get-tuple-element(%q), index=0
  ROOT %after = ({state}) tuple(%outer, %limit, %next)"""
    outer = f"""
  %limit = s32[] get-tuple-element(%inner), index=1
  %start = s32[] get-tuple-element(%r), index=2
  ROOT %after = ({state}) tuple(%next, %limit, %start)"""
    entry = f"""
        %zero = s32[] constant(0)
        %eight = s32[] constant(8)
        %two = s32[] constant(2)
        %state = ({state}) tuple(%zero, %eight, %two)
        ROOT %loop = ({state}) while(%state), condition=%outer_condition, body=%outer_body
    """
    assert sorted(trips(text_of(entry, nested(state, condition, inner, outer))), key=str) == [3, 6]


def test_a_start_that_the_outer_loop_changes_is_unknown():
    state = "s32[], s32[]"
    condition = """
  %i = s32[] get-tuple-element(%p), index=0
  %limit = s32[] constant(3)"""
    inner = f"""
  %i = s32[] get-tuple-element(%q), index=0
  %next = s32[] add(%i, %one)
  ROOT %after = ({state}) tuple(%next, %i)"""
    outer = f"ROOT %after = ({state}) tuple(%next, %i)"
    entry = f"""
        %zero = s32[] constant(0)
        %state = ({state}) tuple(%zero, %zero)
        ROOT %loop = ({state}) while(%state), condition=%outer_condition, body=%outer_body
    """
    assert sorted(trips(text_of(entry, nested(state, condition, inner, outer))), key=str) == [3, None]


def test_a_limit_that_changes_is_unknown():
    body = """
        %i2 = s32[] get-tuple-element(%q), index=0
        %one = s32[] constant(1)
        %next = s32[] add(%i2, %one)
        ROOT %after = (s32[], s32[]) tuple(%next, %i2)
    """
    condition = """
        %i = s32[] get-tuple-element(%p), index=0
        %limit = s32[] get-tuple-element(%p), index=1
        ROOT %go = pred[] compare(%i, %limit), direction=LT
    """
    entry = """
        %zero = s32[] constant(0)
        %state = (s32[], s32[]) tuple(%zero, %zero)
        ROOT %loop = (s32[], s32[]) while(%state), condition=%condition, body=%body
    """
    assert trips(text_of(entry, loop(condition, body, "s32[], s32[]"))) == [None]


@pytest.mark.parametrize("direction", COMPARISONS)
@pytest.mark.parametrize("step", [-3, -1, 0, 1, 2])
def test_counts_equal_those_of_running_the_loop(direction, step):
    for start in range(-4, 5):
        for end in range(-4, 5):
            i, n = start, 0
            while COMPARISONS[direction](i, end) and n < 50:
                i, n = i + step, n + 1
            assert trip_count(start, end, step, direction) == (n if n < 50 else None)
