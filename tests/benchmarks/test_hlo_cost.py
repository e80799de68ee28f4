"""Operations and bytes of instructions."""

import pytest
from hlo import read
from hlo_cost import async_copy_cost, cost, has_unknown_cost


def program(line, inside="", parameters=""):
    """Parse a program of one instruction `r` after the lines `parameters`, with the computations `inside`."""
    return read(f"HloModule m\n\n{inside}\n\nENTRY %main () -> f32[] {{\n{parameters}\n  ROOT %r = {line}\n}}\n")


def parameter_lines(**shapes):
    """Return the lines of named parameters."""
    named = enumerate(shapes.items())
    return "\n".join(f"  %{name} = {shape} parameter({number})" for number, (name, shape) in named)


def cost_of(line, inside="", gpu=False, **shapes):
    module = program(line, inside, parameter_lines(**shapes))
    return cost(module, module.entry, module.entry.named["r"], gpu)


@pytest.mark.parametrize(
    ("line", "shapes", "flops"),
    [
        (
            "f32[4,16,32]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, "
            "rhs_contracting_dims={1}",
            dict(a="bf16[4,16,8]{2,1,0}", b="bf16[4,8,32]{2,1,0}"),
            2 * 4 * 16 * 32 * 8,
        ),
        (  # x [32,1024,2048] @ w [2048,32,64], as XLA:TPU writes it: each of the 32 outputs sees one tap
            "bf16[32,1024,32,64]{1,3,2,0} convolution(%a, %b), window={size=1x32 pad=0_0x31_31 rhs_reversal=0x1}, "
            "dim_labels=0bf1_i1o0->0b1f",
            dict(a="bf16[32,1024,2048,1]{2,1,3,0}", b="bf16[2048,32,64,1]{0,2,1,3}"),
            2 * 32 * 1024 * 2048 * 32 * 64,
        ),
        (  # a matmul batched over 32 x 32: dilation and stride leave one tap in each of the two dimensions
            "bf16[32,32,64,1024]{3,2,1,0} convolution(%a, %b), window={size=32x32 stride=31x31 lhs_dilate=32x32}, "
            "dim_labels=0f1b_01oi->01bf",
            dict(a="bf16[32,1024,32,64]{1,3,2,0}", b="bf16[32,32,1024,1024]{2,3,1,0}"),
            2 * 32 * 32 * 64 * 1024 * 1024,
        ),
        (  # an image: 3 x 3 with padding 1 on 4 x 4: 3 taps for the inner 2 rows, 2 for the outer 2, so 10 in each dim
            "f32[2,4,4,5]{3,2,1,0} convolution(%a, %b), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f",
            dict(a="f32[2,4,4,7]{3,2,1,0}", b="f32[3,3,7,5]{3,2,1,0}"),
            2 * 2 * 5 * 7 * 10 * 10,
        ),
        (
            "(bf16[16,32]{1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target=\"__cublas$gemm\", "
            'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"]}}}',
            dict(a="bf16[8,16]{1,0}", b="bf16[8,32]{1,0}"),
            2 * 16 * 32 * 8,
        ),
        (  # the kernel's gradient for the image above: the result has the kernel's shape
            "(f32[3,3,7,5]{3,2,1,0}, u8[0]{0}) custom-call(%a, %b), window={size=3x3 pad=1_1x1_1}, "
            'dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convBackwardFilter"',
            dict(a="f32[2,4,4,7]{3,2,1,0}", b="f32[2,4,4,5]{3,2,1,0}"),
            2 * 2 * 5 * 7 * 10 * 10,
        ),
        (
            'f32[8,8]{1,0} custom-call(%a), custom_call_target="tpu_custom_call", '
            'backend_config={"custom_call_config":{"body":"x","cost_estimate":{"flops":"77","bytes_accessed":"1"}}}',
            dict(a="f32[8,8]{1,0}"),
            77,
        ),
        (  # 10 of 16 pairs are visible, for each of 2 rows and 8 heads
            '(bf16[2,8,4,64]{3,2,1,0}, f32[2,8,4]{2,1,0}, u8[0]{0}) custom-call(%a, %b, %b), '
            'custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config":'
            '{"mask_type": "CAUSAL", "sliding_window_length": 0}}',
            dict(a="bf16[2,4,8,64]{3,2,1,0}", b="bf16[2,4,2,64]{3,2,1,0}"),
            2 * 8 * 10 * 2 * 2 * 64,
        ),
        (  # 2 + 3 + 3 + 2 of 16 pairs are visible
            '(bf16[2,8,4,64]{3,2,1,0}, u8[0]{0}) custom-call(%a, %b, %b), '
            'custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={"cudnn_fmha_backend_config":'
            '{"mask_type": "NO_MASK", "sliding_window_length": 2}}',
            dict(a="bf16[2,4,8,64]{3,2,1,0}", b="bf16[2,4,2,64]{3,2,1,0}"),
            2 * 8 * 10 * 5 * 2 * 64,
        ),
        ("f32[8]{0} add(%a, %a)", dict(a="f32[8]{0}"), 0),
    ],
)  # fmt: skip
def test_products(line, shapes, flops):
    assert cost_of(line, **shapes).flops == flops


@pytest.mark.parametrize(
    ("dtype", "precision", "gpu", "times"),
    [("bf16", "", 0, 1), ("f32", "", 0, 1), ("f32", "highest", 0, 6), ("f32", "", 1, 2), ("s8", "", 0, 0.5)],
)
def test_slower_products(dtype, precision, gpu, times):
    line = "f32[4,4]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    line += f", operand_precision={{{precision},{precision}}}" if precision else ""
    cost = cost_of(line, gpu=bool(gpu), a=f"{dtype}[4,4]{{1,0}}")
    assert (cost.flops, cost.work) == (128, 128 * times)


def test_opaque_kernels():
    unknown = 'f32[8]{0} custom-call(%a), custom_call_target="mine"'
    for line, is_opaque in ((unknown, True), (unknown.replace("mine", "AllocateBuffer"), False)):
        module = program(line, parameters=parameter_lines(a="f32[8]{0}"))
        assert has_unknown_cost(module.entry.named["r"]) is is_opaque
    assert cost_of(unknown, a="f32[8]{0}").hbm_bytes == 64


def test_a_triton_kernel_states_its_cost():
    stated = r"{\22flops\22: \2277.0\22, \22itemsize\22: \222\22, \22moved_bytes\22: \221000\22}"
    line = 'f32[8]{0} custom-call(%a), custom_call_target="__gpu$xla.gpu.triton", backend_config={ir = "ML\\EFR"'
    found = cost_of(f'{line}, serialized_metadata = "{stated}"}}', gpu=True, a="f32[8]{0}")
    assert (found.flops, found.work, found.hbm_bytes) == (77, 77, 1000)
    assert cost_of(f"{line}}}", gpu=True, a="f32[8]{0}").flops == 0


def test_a_kernel_moves_no_bytes_of_arrays_on_the_chip():
    line = (
        'f32[8,8]{1,0} custom-call(%a, %b), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":'
    )
    line += '{"cost_estimate":{"flops":"77","bytes_accessed":"1000"}}}'
    assert cost_of(line, a="f32[8,8]{1,0}", b="f32[8,8]{1,0}").hbm_bytes == 1000
    assert cost_of(line, a="f32[8,8]{1,0}", b="f32[8,8]{1,0:S(1)}").hbm_bytes == 1000 - 256


KB = 1024
STACK = "f32[24,16,16]{2,1,0}"  # 24 layers of 1 KB


@pytest.mark.parametrize(
    ("line", "shapes", "size"),
    [
        ("f32[256]{0} add(%a, %b)", dict(a="f32[256]{0}", b="f32[256]{0}"), 3 * KB),
        ("f32[256]{0} add(%a, %b)", dict(a="f32[256]{0:T(256)S(1)}", b="f32[256]{0}"), 2 * KB),
        ("f32[256]{0:S(1)} copy(%a)", dict(a="f32[256]{0}"), KB),
        ("f32[1,16,16]{2,1,0} dynamic-slice(%a, %i, %i, %i)", dict(a=STACK, i="s32[]{:S(6)}"), 2 * KB),
        (
            f"{STACK} dynamic-update-slice(%a, %u, %i, %i, %i)",
            dict(a=STACK, u="f32[1,16,16]{2,1,0}", i="s32[]"),
            2 * KB,
        ),
        ("f32[2,16,16]{2,1,0} slice(%a), slice={[0:2], [0:16], [0:16]}", dict(a=STACK), 4 * KB),
        ("f32[2,256]{1,0} gather(%a, %i)", dict(a="f32[1000,256]{1,0}", i="s32[2]{0}"), 4 * KB + 8),
        (
            "f32[1000,256]{1,0} scatter(%a, %i, %u), to_apply=%add",
            dict(a="f32[1000,256]{1,0}", i="s32[2]{0}", u="f32[2,256]{1,0}"),
            6 * KB,  # the update is read, its place read and written
        ),
        ("f32[256]{0} bitcast(%a)", dict(a="f32[256]{0}"), 0),
        ("f32[256]{0} all-gather(%a), replica_groups={}", dict(a="f32[128]{0}"), 0),
    ],
)
def test_bytes(line, shapes, size):
    assert cost_of(line, **shapes).hbm_bytes == size


FUSIONS = {
    # A slice of a stack is read. The other operand is read whole, and also forwarded.
    "slice": (
        f"""  %p = {STACK} parameter(0)
  %i = s32[] parameter(1)
  %w = f32[256]{{0}} parameter(2)
  %z = s32[] constant(0)
  %s = f32[1,16,16]{{2,1,0}} dynamic-slice(%p, %i, %z, %z), dynamic_slice_sizes={{1,16,16}}
  %b = f32[256]{{0}} bitcast(%s)
  %sum = f32[256]{{0}} add(%b, %w)
  ROOT %t = (f32[256]{{0}}, f32[256]{{0}}) tuple(%sum, %w)""",
        "(f32[256]{0}, f32[256]{0})",
        3 * KB,
    ),
    # A layer is written into a stack in place, which costs the layer's bytes.
    "update": (
        f"""  %p = {STACK} parameter(0)
  %i = s32[]{{:S(6)}} parameter(1)
  %u = f32[256]{{0}} parameter(2)
  %z = s32[] constant(0)
  %b = f32[1,16,16]{{2,1,0}} bitcast(%u)
  ROOT %r = {STACK} dynamic-update-slice(%p, %b, %i, %z, %z)""",
        STACK,
        2 * KB,
    ),
    # An update of zeros writes the whole stack.
    "update of zeros": (
        f"""  %p = f32[1,16,16]{{2,1,0}} parameter(2)
  %i = s32[]{{:S(6)}} parameter(1)
  %z = f32[] constant(0)
  %zeros = {STACK} broadcast(%z), dimensions={{}}
  ROOT %r = {STACK} dynamic-update-slice(%zeros, %p, %i, %i, %i)""",
        STACK,
        25 * KB,
    ),
    # A stack that is read whole and in part counts once, whole.
    "whole": (
        f"""  %p = {STACK} parameter(0)
  %i = s32[] parameter(1)
  %s = f32[1,16,16]{{2,1,0}} dynamic-slice(%p, %i, %i, %i)
  %n = {STACK} negate(%p)
  ROOT %r = f32[16]{{0}} reduce(%n, %s), dimensions={{0,1}}, to_apply=%add""",
        "f32[16]{0}",
        24 * KB + 64,
    ),
}


@pytest.mark.parametrize("name", FUSIONS)
def test_fusions(name):
    body, result, size = FUSIONS[name]
    third = "f32[1,16,16]{2,1,0}" if name == "update of zeros" else "f32[256]{0}"
    cost = cost_of(
        f"{result} fusion(%p, %i, %w), kind=kLoop, calls=%f",
        f"%f (p: f32[]) -> f32[] {{\n{body}\n}}",
        p=STACK, i="s32[]{:S(6)}", w=third,
    )  # fmt: skip
    assert cost.hbm_bytes == size


def test_nested_fusion():
    """A fusion contains a product and another fusion, which slices the operand."""
    inside = f"""%inner (p: f32[]) -> f32[] {{
  %p = {STACK} parameter(0)
  %i = s32[] parameter(1)
  ROOT %s = f32[1,16,16]{{2,1,0}} dynamic-slice(%p, %i, %i, %i)
}}

%outer (p: f32[]) -> f32[] {{
  %p = {STACK} parameter(0)
  %i = s32[] parameter(1)
  %s = f32[1,16,16]{{2,1,0}} fusion(%p, %i), kind=kLoop, calls=%inner
  %b = f32[16,16]{{1,0}} bitcast(%s)
  ROOT %d = f32[16,16]{{1,0}} dot(%b, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}"""
    cost = cost_of("f32[16,16]{1,0} fusion(%p, %i), kind=kOutput, calls=%outer", inside, p=STACK, i="s32[]{:S(6)}")
    assert (cost.flops, cost.hbm_bytes) == (2 * 16**3, 2 * KB)


@pytest.mark.parametrize(("whole", "size"), [(False, 1.5 * KB), (True, 36 * KB)])
def test_relayout_before_a_slice(whole, size):
    """A fusion that relayouts a stack and returns a slice reads one layer; one that returns the stack reads it all."""
    slice_line = "" if whole else "\n  ROOT %s = bf16[1,16,16]{1,2,0} dynamic-slice(%n, %i, %i, %i)"
    inside = f"""%inner (p: f32[]) -> f32[] {{
  %p = {STACK} parameter(0)
  %b = {STACK} bitcast(%p)
  ROOT %c = {STACK.replace("2,1,0", "1,2,0")} copy(%b)
}}

%outer (p: f32[]) -> f32[] {{
  %p = {STACK} parameter(0)
  %i = s32[] parameter(1)
  %a = {STACK.replace("2,1,0", "1,2,0")} fusion(%p), kind=kLoop, calls=%inner
  {"ROOT " if whole else ""}%n = bf16[24,16,16]{{1,2,0}} convert(%a){slice_line}
}}"""
    result = "bf16[24,16,16]{1,2,0}" if whole else "bf16[1,16,16]{1,2,0}"
    cost = cost_of(f"{result} fusion(%p, %i), kind=kLoop, calls=%outer", inside, p=STACK, i="s32[]{:S(6)}")
    assert cost.hbm_bytes == size


@pytest.mark.parametrize(
    ("line", "shapes", "hbm", "host"),
    [
        ("(f32[256]{0:S(1)}, f32[256]{0}, u32[]{:S(2)}) copy-start(%a)", dict(a="f32[256]{0}"), KB, 0),
        ("(f32[256]{0}, f32[256]{0}, u32[]{:S(2)}) copy-start(%a)", dict(a="f32[256]{0}"), 2 * KB, 0),
        ("(f32[256]{0:S(5)}, f32[256]{0}, u32[]{:S(2)}) copy-start(%a)", dict(a="f32[256]{0}"), KB, KB),
        (
            f"(({STACK}), f32[6,16,16]{{2,1,0:S(1)}}, s32[]{{:S(2)}}) slice-start(%a), slice={{[0:6], [0:16], [0:16]}}",
            dict(a=STACK), 6 * KB, 0,
        ),
        (  # one iteration's values go into a stack on the host: over the link once
            "((f32[6,256]{1,0:S(5)}, f32[1,256]{1,0}, s32[], s32[]), f32[6,256]{1,0:S(5)}, u32[]{:S(2)}) "
            "dynamic-update-slice-start(%a, %b, %i, %i)",
            dict(a="f32[6,256]{1,0:S(5)}", b="f32[1,256]{1,0}", i="s32[]"), KB, KB,
        ),
    ],
)  # fmt: skip
def test_asynchronous_copies(line, shapes, hbm, host):
    module = program(line, parameters=parameter_lines(**shapes))
    copies = async_copy_cost(module, module.entry, module.entry.named["r"])
    assert (copies.hbm_bytes, copies.host_bytes) == (hbm, host)


@pytest.mark.parametrize("call", ["fusion-start(%p, %i), kind=kLoop, calls=%f", "call-start(%p, %i), to_apply=%f"])
def test_asynchronous_computations(call):
    """A slicing fusion, or a call, which is how the compiler runs scatters on other cores."""
    inside = f"""%f (p: f32[]) -> f32[] {{
  %p = {STACK} parameter(0)
  %i = s32[] parameter(1)
  ROOT %s = f32[1,16,16]{{2,1,0}} dynamic-slice(%p, %i, %i, %i)
}}"""
    line = f"(({STACK}, s32[]), f32[1,16,16]{{2,1,0}}, u32[]) {call}"
    module = program(line, inside, parameter_lines(p=STACK, i="s32[]"))
    assert async_copy_cost(module, module.entry, module.entry.named["r"]).hbm_bytes == 2 * KB + 4


@pytest.mark.parametrize(("alias", "size"), [(", output_to_operand_aliasing={{}: (0, {})}", 2), ("", 1 + 24)])
def test_an_update_of_a_buffer_in_another_tiling_is_in_place(alias, size):
    """XLA:TPU shows the buffer as an aliased copy in the fusion. Without the alias it is written whole."""
    inside = f"""%retiled (p: f32[]) -> f32[] {{
  %p = {STACK} parameter(0)
  ROOT %c = {STACK} copy(%p)
}}

%outer (p: f32[]) -> f32[] {{
  %p = {STACK} parameter(0)
  %i = s32[]{{:S(6)}} parameter(1)
  %u = f32[1,16,16]{{2,1,0}} parameter(2)
  %q = {STACK} fusion(%p), kind=kLoop{alias}, calls=%retiled
  ROOT %r = {STACK} dynamic-update-slice(%q, %u, %i, %i, %i)
}}"""
    line = f"{STACK} fusion(%p, %i, %u), kind=kLoop, calls=%outer"
    found = cost_of(line, inside, p=STACK, i="s32[]{:S(6)}", u="f32[1,16,16]{2,1,0}")
    assert found.hbm_bytes == size * KB
