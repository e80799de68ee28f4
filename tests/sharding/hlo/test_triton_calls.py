"""The cost that a Triton kernel states, read from the text of a compiled program."""

from autoshard.sharding.hlo.kernel_costs import kernel_cost
from autoshard.sharding.hlo.parser import parse_program
from autoshard.spmdrules.custom_ops.kernel_cost import KernelCost
from tests.sharding.hlo.texts import text_of

STATED = (
    r"{\22flops\22: \224096.0\22, \22itemsize\22: \222\22, \22moved_bytes\22: \2264.0\22, \22efficiency\22: \220.5\22}"
)
CALL = (
    'ROOT %i = bf16[8,16]{1,0} custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", '
    r'backend_config={debug = false, ir = "ML\EFR\0D", name = "grouped_product", serialized_metadata = "STATED"}'
)


def cost_of(call):
    program = parse_program(text_of(f"%x = bf16[8,32] parameter(0)\n{call}"))
    return kernel_cost(program.entry, program.entry.root)


def test_the_stated_cost_is_read():
    assert cost_of(CALL.replace("STATED", STATED)) == KernelCost(4096.0, 2, 64.0, efficiency=0.5)


def test_other_kernels_state_none():
    assert cost_of(CALL.replace("STATED", r"{\22of\22: \22another\22}")) is None
    assert cost_of(CALL.replace(', serialized_metadata = "STATED"', "")) is None
    assert cost_of(CALL.replace("STATED", STATED).replace("xla.gpu.triton", "other")) is None
