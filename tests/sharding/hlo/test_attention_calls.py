"""The cost of cuDNN's attention in a compiled program, compared with values counted by hand."""

import pytest

from autoshard.kernels.constants import CUDNN_BACKWARD, CUDNN_CAUSAL_FORWARD, CUDNN_FORWARD, VECTOR_OPS
from autoshard.sharding.hlo.attention_calls import attention_cost
from autoshard.sharding.hlo.kernel_costs import Kernels, kernel_cost
from autoshard.sharding.hlo.link_times import ProgramLinks
from autoshard.sharding.hlo.parser import parse_program
from autoshard.sharding.hlo.schedule import Schedule
from autoshard.sharding.machines.chips import CHIPS
from autoshard.sharding.machines.targets import find_target
from tests.sharding.hlo.texts import text_of

B, S, H, G, D = 2, 256, 8, 2, 64  # rows, positions, heads, heads of keys and values, head size
Q, KV, LOG_SUM = f"bf16[{B},{S},{H},{D}]", f"bf16[{B},{S},{G},{D}]", f"f32[{B},{H},{S}]"
OPERANDS = f"%q = {Q} parameter(0)\n%k = {KV} parameter(1)\n%v = {KV} parameter(2)\n"
WHOLE = 2 * B * S * D * (H + 2 * G)  # bytes of the operands


def config(mask="NO_MASK", window=0):
    return (
        f'backend_config={{"cudnn_fmha_backend_config": {{"mask_type": "{mask}", "sliding_window_length": {window}}}}}'
    )


def forward(**options):
    return (
        f"{OPERANDS}ROOT %i = (bf16[{B},{H},{S},{D}], {LOG_SUM}, u8[4096]) custom-call(%q, %k, %v), "
        f'custom_call_target="__cudnn$fmhaSoftmax", {config(**options)}'
    )


BACKWARD = (
    f"{OPERANDS}%l = {LOG_SUM} parameter(3)\n%d = {Q} parameter(4)\n%o = {Q} parameter(5)\n"
    f"ROOT %i = ({Q}, {KV}, {KV}, u8[0]) custom-call(%q, %k, %v, %l, %d, %o), "
    f'custom_call_target="__cudnn$fmhaSoftmaxBackward", {config("CAUSAL")}'
)


def cost_of(text):
    program = parse_program(text_of(text))
    return attention_cost(program.entry, program.entry.by_name["i"])


def cost(text):
    found = cost_of(text)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("options", "visible"),
    [
        ({}, S * S),
        ({"mask": "CAUSAL"}, S * (S + 1) // 2),
        ({"mask": "CAUSAL", "window": 16}, 16 * S - 16 * 15 // 2),
    ],
)
def test_the_forward_pass_multiplies_the_visible_pairs_twice(options, visible):
    found = cost(forward(**options))
    assert found.flops == B * H * visible * 2 * 2 * D and found.itemsize == 2
    assert found.vector_ops == B * H * visible * VECTOR_OPS
    assert found.moved_bytes == WHOLE + 2 * B * S * H * D + 4 * B * H * S  # without scratch space


def test_the_gradients_take_five_products():
    found = cost(BACKWARD)
    assert found.flops == B * H * S * (S + 1) // 2 * 5 * 2 * D
    assert found.moved_bytes == 2 * WHOLE + 2 * 2 * B * S * H * D + 4 * B * H * S


def test_the_kernels_reach_the_flops_that_were_measured():
    programs = (forward(), forward(mask="CAUSAL"), BACKWARD)
    published = [CUDNN_FORWARD, CUDNN_CAUSAL_FORWARD, CUDNN_BACKWARD]
    assert [cost(text.replace(f",{D}]", ",128]")).efficiency for text in programs] == published
    # Heads of 64: half of the products, and all of softmax, which takes 0.38 of the time of heads of 128.
    assert [cost(text).efficiency for text in programs] == pytest.approx([x * 0.5 / 0.69 for x in published])


def test_other_calls_have_no_such_cost():
    assert cost_of(forward().replace("__cudnn$fmhaSoftmax", "__cudnn$convForward")) is None
    assert cost_of(f"{OPERANDS}ROOT %i = {Q} add(%q, %q)") is None


def test_the_schedule_counts_the_kernel():
    program, target = parse_program(text_of(forward(mask="CAUSAL"))), find_target("h100:8")
    schedule = Schedule(program, Kernels(program, CHIPS["h100"]), ProgramLinks(target.topology, tuple(range(8))))
    schedule.run()
    assert kernel_cost(program.entry, program.entry.by_name["i"]) == cost(forward(mask="CAUSAL"))
    assert schedule.kernel_runs == {"i": (1.0, schedule.totals.compute_us)} and schedule.totals.compute_us > 0
