"""FLOPs and bytes of single instructions, compared with values counted by hand."""

import numpy as np
import pytest

from autoshard.sharding.hlo.kernel_costs import Kernels, cycles_of, flops_of, kernel_cost
from autoshard.sharding.hlo.parser import parse_program
from autoshard.sharding.machines.chips import CHIPS
from tests.sharding.hlo.texts import text_of


def price(entry, *computations, chip="v5e"):
    """The entry computation, its instruction `%i`, and the prices of the program."""
    program = parse_program(text_of(entry, *computations))
    return program.entry, program.entry.by_name["i"], Kernels(program, CHIPS[chip])


CUBLAS = (
    'f32[16,64] custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":'
    '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
)


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        ("f32[16,64] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}", 2 * 16 * 64 * 32),
        ("f32[16,64] convolution(%a, %b), dim_labels=bf_io->bf", 2 * 16 * 64 * 32),
        (CUBLAS, 2 * 16 * 64 * 32),
        ('f32[16,64] custom-call(%a, %b), custom_call_target="other"', 0),
        ("f32[16,32] add(%a, %a)", 0),
    ],
)  # fmt: skip
def test_flops_of_products(line, flops):
    where, i, _ = price(f"%a = f32[16,32] parameter(0)\n%b = f32[32,64] parameter(1)\nROOT %i = {line}")
    assert flops_of(where, i) == flops


@pytest.mark.parametrize(
    ("size", "taps", "stride", "pad", "spread", "gap"),
    [
        (16, 3, 1, 1, 1, 1),
        (16, 3, 2, 1, 1, 1),
        (16, 5, 1, 0, 1, 1),
        (9, 3, 1, 2, 2, 1),
        (16, 3, 1, 2, 1, 2),
        (4, 4, 1, 3, 1, 1),
    ],
)
def test_flops_of_convolutions_exclude_padding_and_holes(size, taps, stride, pad, spread, gap):
    spaced = np.zeros((size - 1) * spread + 1)
    spaced[::spread] = 1
    padded = np.pad(spaced, pad)
    reach = (taps - 1) * gap + 1
    out = (len(padded) - reach) // stride + 1
    pairs = sum(padded[o * stride + t * gap] for o in range(out) for t in range(taps))
    window = f"size={taps} stride={stride} pad={pad}_{pad} lhs_dilate={spread} rhs_dilate={gap}"
    where, i, _ = price(f"""
        %a = f32[2,{size},3] parameter(0)
        %b = f32[{taps},3,5] parameter(1)
        ROOT %i = f32[2,{out},5] convolution(%a, %b), window={{{window}}}, dim_labels=b0f_0io->b0f
    """)
    assert flops_of(where, i) == 2 * 2 * 5 * 3 * pairs


def test_a_product_inside_a_fusion_and_its_precision():
    inner = """
%inner (a: bf16[16,32], b: bf16[32,64]) -> bf16[16,64] {
  %a = bf16[16,32] parameter(0)
  %b = bf16[32,64] parameter(1)
  ROOT %d = bf16[16,64] dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}PRECISION
}
"""
    entry = """
        %a = bf16[16,32]{1,0:S(1)} parameter(0)
        %b = bf16[32,64]{1,0:S(1)} parameter(1)
        ROOT %i = bf16[16,64]{1,0:S(1)} fusion(%a, %b), kind=kOutput, calls=%inner
    """
    where, i, kernels = price(entry, inner.replace("PRECISION", ""))
    once = 2 * 16 * 64 * 32 / (197e12 * CHIPS["v5e"].efficiency) * 1e6
    assert kernels.times_us(where, i) == (pytest.approx(once), 0)  # on-chip memory costs nothing
    where, i, kernels = price(entry, inner.replace("PRECISION", ", operand_precision={highest,highest}"))
    assert kernels.times_us(where, i)[0] == pytest.approx(6 * once)


A, B = 1024 * 4, 4 * 64 * 4
MOVED = [
    ("ROOT %i = f32[1024] add(%a, %a)", 3 * A),
    ("ROOT %i = f32[1024] bitcast(%a)", 0),
    ("ROOT %i = f32[64] slice(%a), slice={[0:64]}", 2 * 256),
    ("ROOT %i = f32[1,64] dynamic-slice(%b, %n, %n), dynamic_slice_sizes={1,64}", 2 * 256 + 8),
    ("%u = f32[1,64] constant(0)\nROOT %i = f32[4,64] dynamic-update-slice(%b, %u, %n, %n)", 2 * 256),
    ("ROOT %i = f32[1024]{0:S(1)} copy(%a)", A),
    ("ROOT %i = (f32[1024]{0:S(1)}, f32[1024], u32[]) copy-start(%a)", A),
    ("%s = (f32[1024]{0:S(1)}, f32[1024], u32[]) copy-start(%a)\nROOT %i = f32[1024]{0:S(1)} copy-done(%s)", 0),
    ("ROOT %i = f32[1024] all-reduce(%a), to_apply=%add", 0),
    ('ROOT %i = (f32[1024], s8[4096]) custom-call(%a), custom_call_target="__cublas$gemm"', 2 * A),
    ('ROOT %i = (f32[1024], s8[4096]) custom-call(%a), custom_call_target="mine"', 2 * A + 4096),
]


@pytest.mark.parametrize(("lines", "nbytes"), MOVED)
def test_bytes_of_instructions(lines, nbytes):
    entry = f"%a = f32[1024] parameter(0)\n%b = f32[4,64] parameter(1)\n%n = s32[] parameter(2)\n{lines}"
    where, i, kernels = price(entry)
    assert kernels.moved_bytes(where, i) == nbytes


FUSED = """
%inner (a: f32[8,64], n: s32[], b: f32[8,64], c: f32[64]) -> (f32[8,64], f32[64]) {
  %a = f32[8,64] parameter(0)
  %n = s32[] parameter(1)
  %z = s32[] constant(0)
  %row = f32[1,64] dynamic-slice(%a, %n, %z), dynamic_slice_sizes={1,64}
  %flat = f32[64] bitcast(%row)
  %c = f32[64] parameter(3)
  %sum = f32[64] add(%flat, %c)
  %up = f32[1,64] bitcast(%sum)
  %b = f32[8,64] parameter(2)
  %put = f32[8,64] dynamic-update-slice(%b, %up, %n, %z)
  ROOT %out = (f32[8,64], f32[64]) tuple(%put, %sum)
}
"""


def test_bytes_of_a_fusion_that_slices_and_updates_in_place():
    where, i, kernels = price(
        """
        %a = f32[8,64] parameter(0)
        %n = s32[] parameter(1)
        %b = f32[8,64] parameter(2)
        %c = f32[64] parameter(3)
        ROOT %i = (f32[8,64], f32[64]) fusion(%a, %n, %b, %c), kind=kLoop, calls=%inner
        """,
        FUSED,
    )
    row = 64 * 4
    assert kernels.moved_bytes(where, i) == 4 * row + 4  # a row of a, c, the sum and a row of b, then the index


RELAYOUTED = """
%retiled (x: bf16[8,64]) -> f32[8,64] {
  %x = bf16[8,64] parameter(0)
  ROOT %y = f32[8,64] INNER(%x)
}

%inner (a: bf16[8,64], n: s32[]) -> f32[1,64] {
  %a = bf16[8,64] parameter(0)
  %n = s32[] parameter(1)
  %wide = f32[8,64] fusion(%a), kind=kLoop, calls=%retiled
  ROOT %row = f32[1,64] SLICED
}
"""


@pytest.mark.parametrize(
    ("inside", "sliced", "rows"),
    [
        ("convert", "dynamic-slice(%wide, %n, %n), dynamic_slice_sizes={1,64}", 1),
        ("negate", "dynamic-slice(%wide, %n, %n), dynamic_slice_sizes={1,64}", 8),  # computed from the whole array
        ("convert", 'custom-call(%wide), custom_call_target="mine"', 8),
    ],
)
def test_a_fusion_that_converts_before_it_slices_reads_the_slice(inside, sliced, rows):
    where, i, kernels = price(
        """
        %a = bf16[8,64] parameter(0)
        %n = s32[] parameter(1)
        ROOT %i = f32[1,64] fusion(%a, %n), kind=kLoop, calls=%inner
        """,
        RELAYOUTED.replace("INNER", inside).replace("SLICED", sliced),
    )
    index = 4 if "dynamic" in sliced else 0
    assert kernels.moved_bytes(where, i) == 64 * 4 + rows * 64 * 2 + index


def test_a_fusion_that_only_converts_reads_the_whole_array():
    inner = """
%inner (a: bf16[8,64]) -> f32[8,64] {
  %a = bf16[8,64] parameter(0)
  ROOT %wide = f32[8,64] convert(%a)
}
"""
    entry = "%a = bf16[8,64] parameter(0)\nROOT %i = f32[8,64] fusion(%a), kind=kLoop, calls=%inner"
    where, i, kernels = price(entry, inner)
    assert kernels.moved_bytes(where, i) == 8 * 64 * (2 + 4)


def test_cycle_estimates():
    where, i, _ = price('ROOT %i = f32[] add(%a), backend_config={"window_config":{"estimated_cycles":"1234"}}')
    assert cycles_of(i) == 1234
    where, i, _ = price(f'ROOT %i = f32[] add(%a), backend_config={{"estimated_cycles":"{2**63 - 1}"}}')
    assert cycles_of(i) is None
    where, i, _ = price("ROOT %i = f32[] add(%a)")
    assert cycles_of(i) is None


def test_a_kernel_moves_no_bytes_of_arrays_on_the_chip():
    def moved(layout):
        where, i, _ = price(f"""
            %a = f32[8,8]{{1,0}} parameter(0)
            %b = f32[8,8]{layout} parameter(1)
            ROOT %i = f32[8,8]{layout} custom-call(%a, %b), custom_call_target="tpu_custom_call", \
backend_config={{"custom_call_config":{{"cost_estimate":{{"flops":"77","bytes_accessed":"1000"}}}}}}
        """)
        cost = kernel_cost(where, i)
        return cost and cost.moved_bytes

    assert moved("{1,0}") == 1000
    assert moved("{1,0:S(1)}") == 1000 - 2 * 256
