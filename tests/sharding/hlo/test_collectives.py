"""Collectives in every form that XLA's compilers print are found once, with their bytes."""

import pytest

from autoshard.sharding.hlo.collectives import Collectives
from autoshard.sharding.hlo.parser import parse_program
from autoshard.sharding.hlo.slice_groups import Slices
from tests.sharding.hlo.texts import text_of

GROUPS = "channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true"
META = 'metadata={op_name="jit(step)/dot_general" stack_frame_id=1}'


def events(entry, *computations, slices=None):
    program = parse_program(text_of(entry, *computations))
    collectives = Collectives(program, slices)
    return [(i.name, event) for i in program.entry.instructions for event in collectives.events(program.entry, i)]


def only_collective(entry, *computations, slices=None):
    """The only collective that starts in an entry computation."""
    started = [e.collective for _, e in events(entry, *computations, slices=slices) if e.collective]
    assert len(started) == 1
    return started[0]


@pytest.mark.parametrize(
    ("line", "kind", "payload", "wire"),
    [
        (f"%c = f32[64,32] all-gather(%a), {GROUPS}, dimensions={{0}}", "all-gather", 8192, 6144),
        (f"%c = f32[16,32] all-reduce(%a), {GROUPS}, to_apply=%add", "all-reduce", 2048, 3072),
        (f"%c = f32[4,32] reduce-scatter(%a), {GROUPS}, dimensions={{0}}, to_apply=%add", "reduce-scatter", 2048, 1536),
        (f"%c = f32[16,32] all-to-all(%a), {GROUPS}, dimensions={{0}}", "all-to-all", 2048, 1536),
        ("%c = f32[16,32] collective-permute(%a), channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}",
         "collective-permute", 2048, 2048),
        (f"%c = f32[16,32] collective-broadcast(%a), {GROUPS}", "collective-broadcast", 2048, 2048),
        (f"%c = (f32[64,32], f32[32]) all-gather(%a, %b), {GROUPS}, dimensions={{0}}", "all-gather", 8320, 6240),
        (f"%c = (f32[16,32], f32[8]) all-reduce(%a, %b), {GROUPS}, to_apply=%add", "all-reduce", 2080, 3120),
    ],
)  # fmt: skip
def test_synchronous_collectives(line, kind, payload, wire):
    collective = only_collective(
        f"%a = f32[16,32] parameter(0)\n%b = f32[8] parameter(1)\n{line}\nROOT %r = f32[] constant(0)"
    )
    assert (collective.kind, collective.payload_bytes, collective.wire_bytes) == (kind, payload, wire)


def test_a_permute_of_a_slice_of_a_buffer_sends_the_slice():
    collective = only_collective("""
        %a = f32[16,32] parameter(0)
        %b = f32[16,32] parameter(1)
        %i = s32[] constant(0)
        %at = (s32[], s32[]) tuple(%i, %i)
        %c = f32[16,32] collective-permute(%a, %b, %at, %at), source_target_pairs={{0,1},{1,0}}, slice_sizes={{4,32}}
    """)
    assert collective.wire_bytes == 4 * 32 * 4


def test_a_group_of_one_device_sends_nothing():
    for line in ("all-reduce(%a), replica_groups={{0},{1}}, to_apply=%add",
                 "collective-permute(%a), source_target_pairs={{0,0},{1,1}}"):  # fmt: skip
        assert only_collective(f"%a = f32[16,32] parameter(0)\nROOT %c = f32[16,32] {line}").wire_bytes == 0


def roles(entry, *computations):
    return [(name, event.phase) for name, event in events(entry, *computations)]


def test_a_start_and_its_end():
    entry = f"""
        %a = f32[16,32] parameter(0)
        %s = (f32[16,32], f32[64,32]) all-gather-start(%a), {GROUPS}, dimensions={{0}}
        ROOT %d = f32[64,32] all-gather-done(%s)
    """
    collectives = events(entry)
    assert [(n, e.phase) for n, e in collectives] == [("s", "start"), ("d", "done")]
    assert collectives[0][1].key == collectives[1][1].key
    assert only_collective(entry).wire_bytes == 6144


def test_a_start_that_is_marked_as_synchronous():
    entry = f"""
        %a = f32[16,32] parameter(0)
        %s = (f32[16,32], f32[64,32]) all-gather-start(%a), {GROUPS}, backend_config={{"is_sync":true}}
        ROOT %d = f32[64,32] all-gather-done(%s)
    """
    assert roles(entry)[0] == ("s", "whole")


@pytest.mark.parametrize(
    ("start", "end"),
    [
        ("async-start(%a), calls=%wrapped", "async-done(%u), calls=%wrapped"),
        ("call-start(%a), to_apply=%wrapped", "call-done(%u), to_apply=%wrapped"),
        ("fusion-start(%a), kind=kLoop, calls=%wrapped", "fusion-done(%u), calls=%wrapped"),
    ],
)
def test_an_asynchronous_computation_with_a_collective(start, end):
    wrapped = f"""
%wrapped (p: f32[16,32]) -> f32[4,32] {{
  %p = f32[16,32] parameter(0)
  ROOT %rs = f32[4,32] reduce-scatter(%p), {GROUPS}, dimensions={{0}}, to_apply=%add
}}
"""
    entry = f"""
        %a = f32[16,32] parameter(0), {META}
        %s = ((f32[16,32]), f32[4,32], u32[]) {start}
        %u = ((f32[16,32]), f32[4,32], u32[]) async-update(%s)
        ROOT %d = f32[4,32] {end}
    """
    collectives = events(entry, wrapped)
    assert [(n, e.phase) for n, e in collectives] == [("s", "start"), ("d", "done")]
    assert collectives[0][1].key == collectives[1][1].key
    collective = only_collective(entry, wrapped)
    assert (collective.kind, collective.wire_bytes) == ("reduce-scatter", 1536)
    assert collective.line == "/home/me/model.py:12 (loss)"  # of its operand: it has no line itself


def test_asynchronous_copies_are_not_collectives():
    assert not events("""
        %a = f32[16,32] parameter(0)
        %s = (f32[16,32]{1,0:S(1)}, f32[16,32], u32[]) copy-start(%a)
        ROOT %d = f32[16,32]{1,0:S(1)} copy-done(%s)
    """)


def fused(name, body, root):
    return f"%{name} (p: f32[16,32]) -> f32[64,32] {{\n  %p = f32[16,32] parameter(0)\n  {body}\n  {root}\n}}\n"


def test_a_collective_in_several_asynchronous_fusions_counts_once():
    gather = f'%g = f32[64,32] all-gather(%p), {GROUPS}, backend_config={{"async_collective_fusion_config":{{}}}}'
    begin = fused("begin", gather, 'ROOT %m = f32[64,32] custom-call(%g), custom_call_target="AsyncCollectiveStart"')
    carry = fused("carry", gather.replace("%g ", "%g2 "), "ROOT %n = f32[16,32] negate(%p)")
    finish = fused("finish", gather.replace("%g ", "%g3 "),
                   'ROOT %e = f32[64,32] custom-call(%p, %g3), custom_call_target="AsyncCollectiveDone"')  # fmt: skip
    entry = f"""
        %a = f32[16,32] parameter(0)
        %s = f32[64,32] fusion(%a), kind=kCustom, calls=%begin, {META}
        %w = f32[16,32] fusion(%a), kind=kOutput, calls=%carry
        ROOT %d = f32[64,32] fusion(%a), kind=kCustom, calls=%finish
    """
    collectives = events(entry, begin, carry, finish)
    assert [(n, e.phase) for n, e in collectives] == [("s", "start"), ("d", "done")]
    assert collectives[0][1].key == collectives[1][1].key
    collective = only_collective(entry, begin, carry, finish)
    assert (collective.kind, collective.wire_bytes, collective.name) == ("all-gather", 6144, "s")
    assert collective.line == "/home/me/model.py:12 (loss)"


def test_a_fusion_of_an_all_reduce_that_is_a_reduce_scatter():
    hidden = f"""
%all-reduce-scatter.3 (p: f32[16,32]) -> f32[4,32] {{
  %p = f32[16,32] parameter(0)
  %ar = f32[16,32] all-reduce(%p), {GROUPS}, to_apply=%add
  %i = s32[] constant(0)
  ROOT %part = f32[4,32] dynamic-slice(%ar, %i, %i), dynamic_slice_sizes={{4,32}}
}}
"""
    entry = f"%a = f32[16,32] parameter(0)\nROOT %f = f32[4,32] fusion(%a), calls=%all-reduce-scatter.3, {META}"
    collective = only_collective(entry, hidden)
    assert (collective.kind, collective.payload_bytes, collective.wire_bytes) == ("reduce-scatter", 2048, 1536)
    assert roles(entry, hidden) == [("f", "whole")]


def test_send_and_recv_are_a_permute():
    pairs = 'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,2}}"}'
    collectives = events(f"""
        %a = f32[16,32] parameter(0)
        %t = token[] after-all()
        %r = (f32[16,32], u32[], token[]) recv(%t), channel_id=3, {pairs}
        %s = (f32[16,32], u32[], token[]) send(%a, %t), channel_id=3, {pairs}
        %sd = token[] send-done(%s), channel_id=3
        ROOT %rd = (f32[16,32], token[]) recv-done(%r), channel_id=3
    """)
    assert [(n, e.phase) for n, e in collectives] == [("s", "start"), ("sd", "done"), ("rd", "done")]
    assert len({e.key for _, e in collectives}) == 1
    collective = collectives[0][1].collective
    assert collective is not None
    assert (collective.kind, collective.wire_bytes, collective.groups) == ("collective-permute", 2048, ((0, 1), (1, 2)))


def test_a_collective_between_slices():
    attributes = ('is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="all-gather.4_0",'
            '_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_GATHER"}')  # fmt: skip
    entry = f"""
        %a = f32[16,32] parameter(0)
        %t = token[] after-all()
        %r = (f32[32,32], u32[], token[]) recv(%t), channel_id=3, {attributes}
        %s = (f32[16,32], u32[], token[]) send(%a, %t), channel_id=4, {attributes}
        %sd = token[] send-done(%s), channel_id=4, is_host_transfer=true
        ROOT %rd = (f32[32,32], token[]) recv-done(%r), channel_id=3, is_host_transfer=true
    """
    slices = Slices(tuple(range(8)), 2)
    program = parse_program(text_of(entry))
    collectives = [e for i in program.entry.instructions for e in Collectives(program, slices).events(program.entry, i)]
    assert [e.phase for e in collectives] == ["start", "done"]  # it ends at the recv
    assert collectives[0].key == collectives[1].key
    collective = only_collective(entry, slices=slices)
    groups = ((0, 4), (1, 5), (2, 6), (3, 7))
    assert (collective.kind, collective.groups, collective.payload_bytes) == ("all-gather", groups, 4096)
    pairs = entry.replace("ALL_GATHER", "ONE_TO_ONE").replace('"{1,2}x{0:3}"', "{{100001->200000},{200000->100001}}")
    collective = only_collective(pairs, slices=slices)
    assert (collective.kind, collective.groups, collective.wire_bytes) == ("collective-permute", ((1, 4), (4, 1)), 2048)


@pytest.mark.parametrize(
    ("partitions", "groups"), [(4, ((0, 2), (4, 6), (1, 3), (5, 7))), (8, ((0, 1), (2, 3)))], ids=["slice", "machine"]
)
def test_the_module_of_a_slice_numbers_its_own_partitions(partitions, groups):
    entry = "%a = f32[16,32] parameter(0)\nROOT %r = f32[16,32] all-reduce(%a), replica_groups={{0,1},{2,3}}"
    program = parse_program(text_of(entry, partitions=partitions))
    found = Collectives(program, Slices((0, 4, 1, 5, 2, 6, 3, 7), 2)).events(program.entry, program.entry.root)
    assert [e.collective.groups for e in found if e.collective] == [groups]


def test_a_transfer_to_the_host_is_not_a_collective():
    assert not events("""
        %a = f32[16,32] parameter(0)
        %t = token[] after-all()
        %s = (f32[16,32], u32[], token[]) send(%a, %t), channel_id=4, is_host_transfer=true
        ROOT %d = token[] send-done(%s), channel_id=4, is_host_transfer=true
    """)


@pytest.mark.parametrize(
    ("source", "sums", "widened"),
    [("bf16[16,32]", "add", True), ("f32[16,32]", "add", False), ("f32[16,32]", "add.clone_promoted", True)],
)
def test_16_bit_operands_that_are_sent_as_32_bit_numbers(source, sums, widened):
    collective = only_collective(f"""
        %n = {source} parameter(0)
        %a = f32[16,32] convert(%n)
        %b = f32[512] bitcast(%a)
        ROOT %c = f32[512] all-reduce(%b), {GROUPS}, to_apply=%{sums}
    """)
    assert collective.widened == widened
