"""The HLO parser: shapes, operands, source lines, and trip counts."""

import pytest
from hlo import Array, instruction_of, read, shape_of
from hlo_loops import trips

from tests.sharding.hlo.texts import SPARSE_CORE


@pytest.mark.parametrize(
    ("text", "leaves", "size"),
    [
        ("f32[2,3]{1,0:T(8,128)}", [("f32", (2, 3), 0)], 24),
        ("bf16[1,2048,512]{2,1,0:T(8,128)(2,1)S(1)}", [("bf16", (1, 2048, 512), 1)], 2 << 20),
        ("pred[]{:T(512)}", [("pred", (), 0)], 1),
        ("s4[16]{0:E(4)}", [("s4", (16,), 0)], 8),
        ("f8e4m3fn[4,<=8]{1,0}", [("f8e4m3fn", (4, 8), 0)], 32),
        ("(f32[2]{0}, /*index=1*/(u32[]{:S(2)}, s8[4]{0:S(5)}), token[])", None, 8 + 4 + 4),
    ],
)
def test_shapes(text, leaves, size):
    line = instruction_of(f"  %x = {text} parameter(0)")
    assert sum(leaf.bytes for leaf in line.leaves) == size
    assert leaves is None or list(line.leaves) == [Array(*leaf) for leaf in leaves]


def test_nested_shapes():
    inner = (Array("u32", (), 2), Array("s8", (4,), 5))
    assert shape_of("(f32[2]{0}, (u32[]{:S(2)}, s8[4]{0:S(5)}))") == (Array("f32", (2,)), inner)


@pytest.mark.parametrize(
    "arguments", ["%a.1, %b-2, /*index=2*/%c", "f32[2,3]{1,0} %a.1, (f32[], s32[]) %b-2, f32[] %c", "a.1, b-2, c"]
)
def test_operands(arguments):
    line = instruction_of(f"  ROOT %r = f32[2]{{0}} fusion({arguments}), kind=kLoop, calls=%g, channel_id=7")
    assert line.operands == ("a.1", "b-2", "c")
    assert (line.root, line.opcode, line.called, line.channel) == (True, "fusion", ("g",), "7")


def test_an_attribute_with_line_breaks():
    """The metadata of JAX's splash attention break the line of a kernel before its stated cost."""
    program = read(
        """HloModule step, is_scheduled=true, num_partitions=2

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %k = f32[8]{0} custom-call(%a), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 1024}"
}}, metadata={op_name="jit(step)/splash"}, backend_config={"custom_call_config":{"cost_estimate":{"flops":"77"}}}
  ROOT %r = f32[8]{0} add(%k, %a)
}
"""
    )
    kernel = program.entry.named["k"]
    assert kernel.op_name == "jit(step)/splash" and '"flops":"77"' in kernel.attributes
    assert [i.name for i in program.entry.instructions] == ["a", "k", "r"] and program.partitions == 2


def test_a_computation_of_a_sparse_core():
    """Its last line names the thread. A program without machine code has such computations."""
    program = read(SPARSE_CORE)
    names = [inner.name for _, inner in program.within(program.entry.named["start"])]
    assert names == ["q", "call", "p", "scattered"]


def test_called_computations():
    """A reduction's `to_apply` is a scalar function and does not count; a call's is a computation."""
    reduction = instruction_of("  %r = f32[2]{0} reduce(%a, %z), dimensions={1}, to_apply=%add")
    call = instruction_of("  %r = f32[2]{0} call(%a), to_apply=%f")
    branches = instruction_of("  %r = f32[2]{0} conditional(%i, %a, %b), branch_computations={%f, %g}")
    both = instruction_of("  %r = f32[2]{0} conditional(%p, %a, %b), true_computation=%f, false_computation=%g")
    assert [line.called for line in (reduction, call, branches, both)] == [(), ("f",), ("f", "g"), ("f", "g")]


PROGRAM = """HloModule m, is_scheduled=true, num_partitions=16, frontend_attributes={a="{"}

FileNames
1 "/code/model.py"
2 "/code/step.py"

FunctionNames
1 "layer"

FileLocations
1 {file_name_id=2 function_name_id=1 line=12 end_line=12 column=3 end_column=9}
2 {file_name_id=1 function_name_id=1 line=345 end_line=345 column=3 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

ENTRY %main.1 (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0), metadata={op_name="jit(f)/a \\"b\\", c" stack_frame_id=2}
  %q = f32[4]{0} negate(%p), metadata={op_name="x" source_file="/code/old.py" source_line=7}
  ROOT %r = f32[4]{0} negate(%q)
}
"""


def test_source_lines():
    module = read(PROGRAM)
    assert module.partitions == 16
    assert [module.source(line) for line in module.entry.instructions] == ["/code/model.py:345", "/code/old.py:7", ""]
    assert module.entry.instructions[0].op_name == 'jit(f)/a \\"b\\", c'


LOOP = """HloModule m, is_scheduled=true

%add_one (x: s32[]) -> s32[] {{
  %x = s32[] parameter(0)
  %one = s32[] constant({step})
  ROOT %y = s32[] add(%x, %one)
}}

%both (x: s32[], z: f32[4]) -> (f32[4], s32[]) {{
  %x = s32[] parameter(0)
  %z = f32[4]{{0}} parameter(1)
  %one = s32[] constant({step})
  %y = s32[] add(%x, %one)
  ROOT %t = (f32[4]{{0}}, s32[]) tuple(%z, %y)
}}

%less (x: s32[], y: s32[]) -> pred[] {{
  %x = s32[] parameter(0)
  %y = s32[] parameter(1)
  ROOT %c = pred[] compare(%x, %y), direction=LT
}}

%condition (s: (s32[], f32[4], s32[])) -> pred[] {{
  %s = (s32[], f32[4]{{0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] get-tuple-element(%s), index=2
  %limit = s32[]{{:T(128)}} constant({limit})
  ROOT %c = pred[] {comparison}
}}

%body (s: (s32[], f32[4], s32[])) -> (s32[], f32[4], s32[]) {{
  %s = (s32[], f32[4]{{0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %copy = s32[]{{:S(6)}} copy(%i)
  %x = f32[4]{{0}} get-tuple-element(%s), index=1
  %n = s32[] get-tuple-element(%s), index=2
  %one = s32[] constant({step})
  %pair = (f32[4]{{0}}, s32[]) fusion(%copy, %x), kind=kLoop, calls=%both
  %next = s32[] {next}
  ROOT %t = (s32[], f32[4]{{0}}, s32[]) tuple(%next, %x, {carried})
}}

%outer_condition (s: (s32[], f32[4], s32[])) -> pred[] {{
  %s = (s32[], f32[4]{{0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %limit = s32[] constant(2)
  ROOT %c = pred[] compare(%i, %limit), direction=LT
}}

%outer (s: (s32[], f32[4], s32[])) -> (s32[], f32[4], s32[]) {{
  %s = (s32[], f32[4]{{0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[4]{{0}} get-tuple-element(%s), index=1
  %n = s32[] get-tuple-element(%s), index=2
  %start = s32[] constant({start})
  %again = s32[] copy(%start)
  %t = (s32[], f32[4]{{0}}, s32[]) tuple(%again, %x, %n)
  %inner = (s32[], f32[4]{{0}}, s32[]) while(%t), condition=%condition, body=%body{config}
  %one = s32[] constant(1)
  %next = s32[] add(%one, %i)
  ROOT %u = (s32[], f32[4]{{0}}, s32[]) tuple(%next, %x, %n)
}}

ENTRY %main (x: f32[4]) -> (s32[], f32[4], s32[]) {{
  %x = f32[4]{{0}} parameter(0)
  %zero = s32[] constant(0)
  %many = s32[] constant(9)
  %t = (s32[], f32[4]{{0}}, s32[]) tuple(%zero, %x, %many)
  ROOT %loop = (s32[], f32[4]{{0}}, s32[]) while(%t), condition=%outer_condition, body=%outer
}}
"""
PLAIN = dict(
    start=0, limit=24, step=1, comparison="compare(%i, %limit), direction=LT", next="add(%copy, %one)",
    carried="%n", config="",
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 24),
        ({"start": 4, "step": 3}, 7),  # 4, 7, ..., 22
        ({"comparison": "compare(%i, %limit), direction=LE"}, 25),
        ({"comparison": "compare(%limit, %i), direction=GT"}, 24),
        ({"comparison": "compare(%i, %limit), direction=NE"}, 24),
        ({"start": 24, "limit": 0, "step": -1, "comparison": "compare(%i, %limit), direction=GT"}, 24),
        ({"start": 23, "limit": 0, "step": -2, "comparison": "compare(%i, %limit), direction=GE"}, 12),
        ({"start": 24, "limit": 0, "step": -4, "comparison": "compare(%i, %limit), direction=NE"}, 6),
        ({"start": 24, "limit": 0, "step": 4, "next": "subtract(%copy, %one)"}, 0),  # the first comparison LT is false
        ({"comparison": "fusion(%i, %limit), kind=kLoop, calls=%less"}, 24),
        ({"comparison": "compare(%i, %n), direction=LT"}, 9),  # carried by this loop and the enclosing one
        ({"next": "fusion(%copy), kind=kLoop, calls=%add_one"}, 24),
        ({"next": "get-tuple-element(%pair), index=1"}, 24),
        ({"config": ', backend_config={"known_trip_count":{"n":"5"}}'}, 5),
        ({"comparison": "compare(%i, %n), direction=LT", "carried": "%copy"}, None),  # the limit changes
        ({"next": "multiply(%copy, %one)"}, None),
        ({"step": 0}, None),
        ({"comparison": "compare(%i, %limit), direction=GT"}, 0),
        ({"start": 25, "comparison": "compare(%i, %limit), direction=GT"}, None),  # counts up for ever
    ],
)
def test_trips(changes, count):
    module = read(LOOP.format(**PLAIN | changes))
    outer = module.computations["outer"]
    assert trips(module, outer, outer.named["inner"]) == count
    assert trips(module, module.entry, module.entry.named["loop"]) == 2
