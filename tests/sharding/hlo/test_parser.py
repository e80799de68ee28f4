"""Parsing of compiled programs, line by line."""

import pytest

from autoshard.sharding.hlo.parser import Array, arrays_of, instruction, parse_program
from tests.sharding.hlo.texts import SPARSE_CORE, text_of


@pytest.mark.parametrize(
    ("text", "arrays"),
    [
        ("f32[8,256]{1,0:T(8,128)S(1)}", [Array("f32", (8, 256), 1)]),
        ("bf16[]", [Array("bf16", ())]),
        ("s32[<=8]", [Array("s32", (8,))]),
        ("(f32[4], (bf16[2,3]{1,0}, token[]), /*index=5*/u32[]{:S(2)})",
         [Array("f32", (4,)), Array("bf16", (2, 3)), Array("token", ()), Array("u32", (), 2)]),
    ],
)  # fmt: skip
def test_shapes(text, arrays):
    assert list(arrays_of(text)) == arrays


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [("f32", 64), ("bf16", 32), ("pred", 16), ("f8e4m3fn", 16), ("s4", 8), ("f4e2m1fn", 8), ("c64", 128), ("token", 0)],
)
def test_bytes_of_sixteen_elements(dtype, nbytes):
    assert Array(dtype, (4, 4)).nbytes == nbytes


def test_an_instruction_of_the_tpu_compiler():
    i = instruction(
        "  ROOT %fusion.60 = (f32[8,256]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) fusion(%fusion.59, /*index=1*/%p), "
        'kind=kCustom, calls=%all-reduce-scatter.1, metadata={op_name="jit(step)/dot_general" stack_frame_id=1}, '
        'backend_config={"window_config":{"estimated_cycles":"77"}}'
    )
    assert (i.name, i.opcode, i.is_root, i.operands) == ("fusion.60", "fusion", True, ("fusion.59", "p"))
    assert i.arrays == (Array("f32", (8, 256), 1), Array("u32", (), 2))
    assert (i.called, i.op_name, i.attribute("kind")) == (("all-reduce-scatter.1",), "jit(step)/dot_general", "kCustom")


def test_operands_with_and_without_their_types():
    typed = instruction("  %a.1 = f32[4]{0} add(f32[4]{0} %x, f32[4]{0} %y)")
    bare = instruction("  a.1 = f32[4]{0} add(f32[4]{0} x, f32[4]{0} y)")
    assert typed.operands == bare.operands == ("x", "y")
    assert instruction("  %c = f32[] constant(5)").operands == ()


def test_the_computations_that_an_instruction_runs():
    called = instruction("  %x = f32[] conditional(%a, %b, %c), branch_computations={%one, %two}").called
    assert called == ("one", "two")
    assert instruction("  %x = f32[] reduce(%a, %b), dimensions={0}, to_apply=%add").called == ()
    assert instruction("  %x = ((f32[]), f32[]) call-start(%a), to_apply=%run").called == ("run",)


@pytest.mark.parametrize("line", ["  %a = f32[4]", "  no instruction", "  %a = (f32[4] add(%b)"])
def test_a_line_that_is_not_an_instruction_raises(line):
    with pytest.raises(ValueError):
        instruction(line)


def test_a_program():
    program = parse_program(text_of("%a = f32[] constant(1)\nROOT %b = f32[] negate(%a)", partitions=16))
    assert (program.partitions, program.entry.name, program.entry.root.name) == (16, "main", "b")
    assert set(program.computations) == {"add", "main"}
    assert [i.name for i in program.entry.users["a"]] == ["b"]


def test_an_attribute_with_line_breaks():
    """The metadata of JAX's splash attention break the line of a kernel before its stated cost."""
    program = parse_program(
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
    kernel = program.entry.by_name["k"]
    assert kernel.op_name == "jit(step)/splash" and '"flops":"77"' in kernel.attributes
    assert [i.name for i in program.entry.instructions] == ["a", "k", "r"]


def test_a_computation_of_a_sparse_core():
    """Its last line names the thread. A program without machine code has such computations."""
    program = parse_program(SPARSE_CORE)
    names = [inner.name for _, inner in program.inside(program.entry.by_name["start"])]
    assert names == ["q", "call", "p", "scattered"]


def test_an_asynchronous_slice_of_a_dump():
    """A dump writes it as a call of a computation. It is parsed to what the text of machine code has."""
    text = """HloModule step, is_scheduled=true

%sliced (p: f32[4,8], i: s32[]) -> f32[1,8] {{
  %p = f32[4,8]{{1,0:S(5)}} parameter(0)
  %i = s32[] parameter(1)
  ROOT %slice = f32[1,8]{{1,0}} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={{1,8}}
}}

ENTRY %main (a: f32[4,8], n: s32[]) -> f32[1,8] {{
  %a = f32[4,8]{{1,0:S(5)}} parameter(0)
  %n = s32[] parameter(1)
  %start = ((f32[4,8]{{1,0:S(5)}}, s32[]), f32[1,8]{{1,0}}, u32[]) {0}, metadata={{op_name="layer"}}
  %update = ((f32[4,8]{{1,0:S(5)}}, s32[]), f32[1,8]{{1,0}}, u32[]) {1}-update(%start)
  ROOT %done = f32[1,8]{{1,0}} {1}-done(%update)
}}
"""
    dump = parse_program(text.format("async-start(%a, %n), calls=%sliced", "async"))
    code = parse_program(text.format("dynamic-slice-start(%a, %n)", "dynamic-slice"))
    start, update, done = dump.entry.instructions[2:]
    assert [i.opcode for i in dump.entry.instructions] == [i.opcode for i in code.entry.instructions]
    assert (start.base, update.opcode, done.opcode) == ("dynamic-slice", "dynamic-slice-update", "dynamic-slice-done")
    assert not start.called and start.op_name == "layer" and start.attributes == code.entry.instructions[2].attributes


def test_a_text_that_is_not_a_program_raises():
    with pytest.raises(ValueError, match="no ENTRY"):
        parse_program("not a program")


@pytest.mark.parametrize(
    ("metadata", "line"),
    [
        ('op_name="x" stack_frame_id=1', "/home/me/model.py:12 (loss)"),
        ('op_name="x" stack_frame_id=2', "/home/me/model.py:12 (loss)"),  # frames of the compiling process are skipped
        ('op_name="x" source_file="/home/me/model.py" source_line=12', "/home/me/model.py:12"),
        ('op_name="x" source_file="/home/me/model.py" source_line=12 source_end_line=13', "/home/me/model.py:12"),
        ('op_name="x" stack_frame_id=3', ""),
        ('op_name="x" stack_frame_id=9', ""),
        ('op_name="x"', ""),
    ],
)
def test_source_lines_in_every_form(metadata, line):
    program = parse_program(text_of(f"ROOT %a = f32[] constant(1), metadata={{{metadata}}}"))
    assert program.line(program.entry.root) == line
