"""Collectives in every form that the compilers write."""

import pytest
from hlo import read
from hlo_collectives import events, groups_of

MB = 1 << 20
EVEN_ODD = ((0, 2, 4, 6), (1, 3, 5, 7))
HALVES = ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ("channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}", HALVES),
        ("channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}", HALVES),
        ("channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}", EVEN_ODD),
        ("channel_id=1, replica_groups=[4,2]<=[2,2,2]T(0,2,1), x={0}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("channel_id=1, replica_groups=mesh['a'=4,'b'=2] {'a'}, dimensions={0}", EVEN_ODD),
        ("channel_id=1, replica_groups=mesh['a'=2,'b'=4] {'b'}, dimensions={0}", HALVES),
        ("channel_id=1, replica_groups=mesh['a'=2,'b'=4] {'a','b'}, dimensions={0}", (tuple(range(8)),)),
        ("channel_id=1, replica_groups=mesh[a=2,b=4] {b}, dimensions={0}", HALVES),
        ("channel_id=1, replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}, x={0}", EVEN_ODD),
        ("channel_id=1, replica_groups=mesh['a'=2,'b'=2], device_ids=(3,1,0,2) {'a'}, x={0}", ((3, 0), (1, 2))),
        ("channel_id=1, replica_groups=mesh['a'=8] {'a':(1)2}, x={0}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("channel_id=1, replica_groups=mesh['a'=8] {'a':(2)4}, x={0}", HALVES),
        ("channel_id=1, replica_groups=mesh['a'=8] {'a':(2)2}, x={0}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("channel_id=1, replica_groups={}, dimensions={0}", (tuple(range(8)),)),
        ("channel_id=1, source_target_pairs={{0,1},{1,2},{2,0}}", ((0, 1), (1, 2), (2, 0))),
        ('channel_id=1, frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,0}}"}', ((0, 1), (1, 0))),
    ],
)
def test_groups(attributes, groups):
    assert groups_of(attributes, 8) == groups


def collectives_of(lines, inside="", partitions=8):
    """Return (role, kind, payload, wire bytes) of each event of a program, and its keys."""
    module = read(f"HloModule m, num_partitions={partitions}\n\n{inside}\n\nENTRY %main () -> f32[] {{\n{lines}\n}}\n")
    collectives = [event for line in module.entry.instructions for event in events(module, module.entry, line)]
    shown = [
        (event.role, event.collective.kind, event.collective.payload_bytes, event.collective.wire_bytes)
        if event.collective
        else event.role
        for event in collectives
    ]
    return shown, [set(event.keys) for event in collectives]


G = "channel_id=3, replica_groups={{0,1,2,3},{4,5,6,7}}"


@pytest.mark.parametrize(
    ("line", "kind", "payload", "wire"),
    [
        (f"f32[4,262144]{{1,0}} all-gather(%x), {G}, dimensions={{0}}", "all-gather", 4 * MB, 3 * MB),
        (f"f32[65536]{{0}} reduce-scatter(%x), {G}, to_apply=%add", "reduce-scatter", MB, 0.75 * MB),
        (f"f32[262144]{{0}} all-reduce(%x), {G}, to_apply=%add", "all-reduce", MB, 1.5 * MB),
        (f"f32[262144]{{0}} all-to-all(%x), {G}, dimensions={{0}}", "all-to-all", MB, 0.75 * MB),
        (f"f32[262144]{{0}} collective-broadcast(%x), {G}", "collective-broadcast", MB, MB),
        (
            "f32[262144]{0} collective-permute(%x), channel_id=3, source_target_pairs={{0,1},{1,0}}",
            "collective-permute", MB, MB,
        ),
        (f"f32[262144]{{0}} ragged-all-to-all(%x, %x, %i, %i, %i, %i), {G}", "ragged-all-to-all", MB, 0.75 * MB),
        (f"(f32[262144]{{0}}, f32[262144]{{0}}) all-reduce(%x, %x), {G}, to_apply=%add", "all-reduce", 2 * MB, 3 * MB),
        ("f32[8,262144]{1,0} all-gather(%x), replica_groups={}, dimensions={0}", "all-gather", 8 * MB, 7 * MB),
    ],
)  # fmt: skip
def test_synchronous(line, kind, payload, wire):
    shown, keys = collectives_of(
        f"  %x = f32[262144]{{0}} parameter(0)\n  %i = s32[4]{{0}} parameter(1)\n  ROOT %r = {line}"
    )
    assert shown == [("sync", kind, payload, wire)]
    assert keys == [set()]


X = "  %x = f32[262144]{0} parameter(0)\n"
SLICES = (
    'is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="all-reduce.9_0",'
    '_xla_megascale_target="{1,2,3,4}x{0:15}",_xla_megascale_transfer_type="ALL_REDUCE"}'
)
WRAPPED = f"""%wrapped (x: f32[262144]) -> f32[65536] {{
  %y = f32[262144]{{0}} parameter(0)
  ROOT %rs = f32[65536]{{0}} reduce-scatter(%y), {G}, dimensions={{0}}, to_apply=%add
}}"""
REDUCE_SCATTER = ("start", "reduce-scatter", MB, 0.75 * MB)


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (  # the plain pair
            f"  %s = (f32[262144]{{0}}, f32[4,262144]{{1,0}}) all-gather-start(%x), {G}, dimensions={{0}}\n"
            "  ROOT %d = f32[4,262144]{1,0} all-gather-done(%s)",
            [("start", "all-gather", 4 * MB, 3 * MB), "done"],
        ),
        (
            "  %s = (f32[262144]{0}, f32[262144]{0}, u32[], u32[]) collective-permute-start(%x), channel_id=3, "
            "source_target_pairs={{0,1}}\n  ROOT %d = f32[262144]{0} collective-permute-done(%s)",
            [("start", "collective-permute", MB, MB), "done"],
        ),
        (
            f"  %s = ((f32[262144]{{0}}), f32[65536]{{0}}) reduce-scatter-start(%x), {G}, to_apply=%add\n"
            "  ROOT %d = f32[65536]{0} reduce-scatter-done(%s)",
            [REDUCE_SCATTER, "done"],
        ),
        (  # a pair that the backend runs synchronously
            f"  %s = (f32[262144]{{0}}, f32[4,262144]{{1,0}}) all-gather-start(%x), {G}, "
            'backend_config={"collective_backend_config":{"is_sync":true}}\n'
            "  ROOT %d = f32[4,262144]{1,0} all-gather-done(%s)",
            [("sync", "all-gather", 4 * MB, 3 * MB), "done"],
        ),
        (  # an asynchronous computation
            "  %s = ((f32[262144]{0}), f32[65536]{0}, u32[]) async-start(%x), calls=%wrapped\n"
            "  %u = ((f32[262144]{0}), f32[65536]{0}, u32[]) async-update(%s)\n"
            "  ROOT %d = f32[65536]{0} async-done(%u)",
            [REDUCE_SCATTER, "done"],
        ),
        (  # XLA:TPU's sparse cores: the start has the operands
            '  %s = ((f32[262144]{0}), f32[65536]{0}) call-start(%x), async_execution_thread="s", to_apply=%wrapped\n'
            "  ROOT %d = f32[65536]{0} call-done(%s)",
            [REDUCE_SCATTER, "done"],
        ),
        (  # or the update has them
            "  %s = ((), (), (s32[1]{0:T(128)S(2)})) call-start(), to_apply=%wrapped\n"
            "  %u = ((f32[262144]{0}), f32[65536]{0}) call-update(%s, %x)\n"
            "  ROOT %d = f32[65536]{0} call-done(%u)",
            [REDUCE_SCATTER, "done"],
        ),
        (  # a loop carries it from one trip to the next
            "  %p = (f32[262144]{0}) parameter(1)\n  %e = f32[4,262144]{1,0} get-tuple-element(%p), index=0\n"
            "  ROOT %d = f32[4,262144]{1,0} all-gather-done(%e), channel_id=3",
            ["done"],
        ),
        (
            "  %t = token[] after-all()\n"
            "  %s = (f32[262144]{0}, u32[], token[]) send(%x, %t), channel_id=3, "
            'frontend_attributes={_xla_send_recv_source_target_pairs="{{0,1},{1,0}}"}\n'
            "  %r = (f32[262144]{0}, u32[], token[]) recv(%t), channel_id=3\n"
            "  %a = token[] send-done(%s), channel_id=3\n"
            "  ROOT %d = (f32[262144]{0}, token[]) recv-done(%r), channel_id=3",
            [("start", "collective-permute", MB, MB), "done", "done"],
        ),
        (  # between slices, up to the end of the recv
            "  %t = token[] after-all()\n"
            f"  %s = (f32[262144]{{0}}, u32[], token[]) send(%x, %t), channel_id=3, {SLICES}\n"
            f"  %r = (f32[262144]{{0}}, u32[], token[]) recv(%t), channel_id=2, {SLICES}\n"
            "  %a = token[] send-done(%s), channel_id=3\n"
            "  ROOT %d = (f32[262144]{0}, token[]) recv-done(%r), channel_id=2",
            [("start", "all-reduce", MB, 1.5 * MB), "done"],
        ),
        (  # a copy is not a collective
            "  %s = (f32[262144]{0:S(1)}, f32[262144]{0}, u32[]) copy-start(%x)\n"
            "  ROOT %d = f32[262144]{0:S(1)} copy-done(%s)",
            [],
        ),
    ],
)
def test_asynchronous(lines, shown):
    collectives, keys = collectives_of(X + lines, WRAPPED)
    assert collectives == shown
    starts = [key for key, event in zip(keys, collectives, strict=True) if event != "done"]
    ends = [key for key, event in zip(keys, collectives, strict=True) if event == "done"]
    assert all(start & end for start in starts for end in ends if starts and start)


STEP = f"""f32[4,262144]{{1,0}} all-gather(%y), {G}, dimensions={{0}}, """
FUSED = f"""%begin (y: f32[262144]) -> (f32[262144], f32[4,262144]) {{
  %y = f32[262144]{{0}} parameter(0)
  %g = {STEP}backend_config={{"async_collective_fusion_config":{{"flag_start":"-1"}}}}
  ROOT %c = (f32[262144]{{0}}, f32[4,262144]{{1,0}}) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}}

%carry_on (y: f32[262144], z: f32[16]) -> (f32[16], f32[4,262144]) {{
  %y = f32[262144]{{0}} parameter(0)
  %z = f32[16]{{0}} parameter(1)
  %n = f32[16]{{0}} negate(%z)
  %h = {STEP}backend_config={{"async_collective_fusion_config":{{"flag_start":"2"}}}}
  ROOT %t = (f32[16]{{0}}, f32[4,262144]{{1,0}}) tuple(%n, %h)
}}

%finish (y: f32[262144]) -> f32[4,262144] {{
  %y = f32[262144]{{0}} parameter(0)
  %k = {STEP}backend_config={{"async_collective_fusion_config":{{"flag_start":"2"}}}}
  ROOT %c = f32[4,262144]{{1,0}} custom-call(%y, %k), custom_call_target="AsyncCollectiveDone"
}}

%all-reduce-scatter.7.clone (y: f32[262144]) -> f32[65536] {{
  %y = f32[262144]{{0}} parameter(0)
  %all = f32[262144]{{0}} all-reduce(%y), channel_id=9, replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}, to_apply=%add
  %i = s32[] partition-id()
  ROOT %s = f32[65536]{{0}} dynamic-slice(%all, %i), dynamic_slice_sizes={{65536}}
}}"""


def test_in_fusions():
    """An asynchronous gather in three fusions counts once. A reduce-scatter may be written as an all-reduce."""
    lines = """  %x = f32[262144]{0} parameter(0)
  %z = f32[16]{0} parameter(1)
  %s = (f32[262144]{0}, f32[4,262144]{1,0}) fusion(%x), kind=kCustom, calls=%begin
  %w = f32[262144]{0} get-tuple-element(%s), index=0
  %m = (f32[16]{0}, f32[4,262144]{1,0}) fusion(%w, %z), kind=kOutput, calls=%carry_on
  %d = f32[4,262144]{1,0} fusion(%w), kind=kCustom, calls=%finish
  ROOT %r = f32[65536]{0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.7.clone"""
    collectives, keys = collectives_of(lines, FUSED)
    gathered = ("start", "all-gather", 4 * MB, 3 * MB)
    assert collectives == [gathered, "done", ("sync", "reduce-scatter", MB, 0.75 * MB)]
    assert keys[0] & keys[1] == {"channel 3"}


@pytest.mark.parametrize(
    ("target", "kind", "groups"),
    [
        ('"{1,2}x{0:1}"', "ALL_GATHER", ((100000, 200000), (100001, 200001))),
        ("{{100000,300000},{100001,300001}}", "ALL_TO_ALL", ((100000, 300000), (100001, 300001))),
        ("{{100000->200001},{200001->100000}}", "ONE_TO_ONE", ((100000, 200001), (200001, 100000))),
    ],
)
def test_devices_of_other_slices(target, kind, groups):
    attributes = SLICES.replace('"{1,2,3,4}x{0:15}"', target).replace("ALL_REDUCE", kind)
    lines = f"{X}  %t = token[] after-all()\n  ROOT %s = (f32[262144]{{0}}, token[]) send(%x, %t), {attributes}"
    module = read(f"HloModule m, num_partitions=2\n\nENTRY %main () -> f32[] {{\n{lines}\n}}\n")
    (event,) = events(module, module.entry, module.entry.root)
    assert event.collective and event.collective.groups == groups
    assert event.collective.kind == {"ONE_TO_ONE": "collective-permute"}.get(kind, kind.lower().replace("_", "-"))
