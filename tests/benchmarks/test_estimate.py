"""The estimate of a step: compute by two measures, and the exposed time of collectives and copies.

A v5e has 1.5e9 cycles, 0.95 x 197e12 operations and 0.8 x 819e9 bytes a second; a link carries 45e9 bytes a second.
"""

import ast
import json
import sys
from pathlib import Path

import pytest
from estimate import estimate
from estimate_report import table

US = 1e-6
MEMORY, FLOPS = 0.8 * 819e9, 0.95 * 197e12
PAIRS = "replica_groups={{0,1},{2,3}}"
WIRE = 9e6 / 2 / 45e9  # seconds of a gather of 9 MB between two neighbours
X = "  %x = f32[1125000]{0} parameter(0)\n"  # 4.5 MB
START = (
    f"  %s = (f32[1125000]{{0}}, f32[2,1125000]{{1,0}}) all-gather-start(%x), channel_id=1, {PAIRS}, dimensions={{0}}\n"
)
DONE = "  %d = f32[2,1125000]{1,0} all-gather-done(%s)\n"
WHOLE = f"  %g = f32[2,1125000]{{1,0}} all-gather(%x), channel_id=2, {PAIRS}, dimensions={{0}}\n"


def busy_line(name, cycles, operand="%small"):
    """An instruction with this number of cycles and few bytes."""
    config = f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'
    return f"  %{name} = f32[8]{{0:S(1)}} negate({operand}), {config}\n"


def estimate_of(lines, inside="", target="v5e:2x2", **more):
    small = "  %small = f32[8]{0:S(1)} parameter(1)\n"
    text = f"HloModule m, num_partitions=4\n\n{inside}\n\nENTRY %main () -> f32[] {{\n{X}{small}{lines}}}\n"
    places = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0)]
    return estimate(text, target, None if target.startswith("h") else places, **more)


def test_measures_of_a_product_and_of_a_copy():
    """The joined measure uses cycles for instructions that are limited by products, and the roofline for all others."""
    dot = "f32[512,512]{1,0%s} dot(%%a, %%a), lhs_contracting_dims={1}, rhs_contracting_dims={0}, %s"
    cycles = 'backend_config={"estimated_cycles":"%d"}'
    estimated = estimate_of(
        "  %a = f32[512,512]{1,0:S(1)} parameter(2)\n"
        f"  %on_chip = {dot % (':S(1)', cycles % 3000)}\n"
        f"  %written = {dot % ('', cycles % 6000)}\n"
        "  %n = f32[1125000]{0} negate(%x)\n"
        f"  %o = f32[1125000]{{0}} exponential(%x), {cycles % 60_000}\n"
    )
    product, written, moved = 2 * 512**3 / FLOPS, 4 * 512**2 / MEMORY, 9e6 / MEMORY
    assert written > product
    assert estimated.compute == pytest.approx({
        "cycles": 2 * US + 4 * US + moved + 40 * US,
        "roofline": product + written + 2 * moved,
        "joined": 2 * US + written + 2 * moved,
    })  # fmt: skip
    assert (estimated.flops, estimated.hbm_bytes) == (4 * 512**3, 4 * 512**2 + 18e6)
    assert (estimated.without_cycles, estimated.without_cycles_seconds) == (1, pytest.approx(moved))


def test_unknown_cycles():
    """2^63 - 1 means that the compiler does not know."""
    estimated = estimate_of(
        f'  %n = f32[1125000]{{0}} negate(%x), backend_config={{"estimated_cycles":"{2**63 - 1}"}}\n'
    )
    assert estimated.compute["cycles"] == estimated.compute["roofline"] == pytest.approx(9e6 / MEMORY)
    assert estimated.without_cycles == 1


@pytest.mark.parametrize(
    ("lines", "exposed"),
    [
        (WHOLE, WIRE),
        (WHOLE + busy_line("n", 15_000), WIRE),
        (START + DONE, WIRE),
        (START + busy_line("n", 15_000) + DONE, WIRE - 10 * US),
        (START + busy_line("n", 300_000) + DONE, 0),
        (busy_line("n", 300_000) + START + DONE + busy_line("m", 300_000), WIRE),
        (START + busy_line("n", 15_000) + DONE + WHOLE, 2 * WIRE - 10 * US),
        # The second gather waits for the link; by then the first one is done.
        (START + WHOLE + DONE, 2 * WIRE),
        (START + busy_line("n", 15_000) + WHOLE + DONE, 2 * WIRE - 10 * US),
    ],
)
def test_exposed(lines, exposed):
    estimated = estimate_of(lines)
    assert estimated.exposed["cycles"] == pytest.approx(exposed)
    assert estimated.step["cycles"] == pytest.approx(estimated.compute["cycles"] + exposed)
    assert sum(each.exposed["cycles"] for each in estimated.traffic) == pytest.approx(exposed)


def test_other_links_do_not_wait():
    """Rows and columns of a torus have different links, so gathers along them run at the same time."""
    columns = WHOLE.replace("%g", "%h").replace("{{0,1},{2,3}}", "{{0,2},{1,3}}")
    assert estimate_of(START + columns + DONE).exposed["cycles"] == pytest.approx(WIRE)


LOOP = """%condition (s: (s32[], f32[1125000])) -> pred[] {{
  %s = (s32[], f32[1125000]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant({trips})
  ROOT %c = pred[] compare(%i, %n), direction=LT
}}

%body (p: (s32[], f32[1125000])) -> (s32[], f32[1125000]) {{
  %p = (s32[], f32[1125000]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[1125000]{{0}} get-tuple-element(%p), index=1
  %small = f32[8]{{0:S(1)}} constant(0)
{lines}  %one = s32[] constant(1)
  %j = s32[]{{:S(6)}} add(%i, %one), backend_config={{"estimated_cycles":"0"}}
  ROOT %t = (s32[], f32[1125000]{{0}}) tuple(%j, %x)
}}
"""
RUN = """  %zero = s32[] constant(0)
  %t = (s32[], f32[1125000]{0}) tuple(%zero, %x)
  %loop = (s32[], f32[1125000]{0}) while(%t), condition=%condition, body=%body
"""


@pytest.mark.parametrize("trips", [0, 1, 2, 7])
def test_loops(trips):
    estimated = estimate_of(RUN, LOOP.format(trips=trips, lines=START + busy_line("n", 15_000) + DONE))
    assert estimated.compute["cycles"] == pytest.approx(trips * 10 * US)
    assert estimated.exposed["cycles"] == pytest.approx(trips * (WIRE - 10 * US))
    assert sum(each.trips for each in estimated.traffic) == trips
    assert estimated.wire_bytes == trips * 4.5e6
    assert not estimated.unknown_loops


def test_loop_with_unknown_trips_counts_once():
    estimated = estimate_of(
        RUN.replace("%zero = s32[] constant(0)", "%zero = s32[] parameter(2)"), LOOP.format(trips=9, lines=WHOLE)
    )
    assert estimated.exposed["cycles"] == pytest.approx(WIRE)
    assert estimated.unknown_loops == ["loop"]


def test_collective_across_trips():
    """A gather starts at a trip's end and ends in the next trip. The compute before its end hides it."""
    waited = "  %d = f32[2,1125000]{1,0} all-gather-done(%x), channel_id=1\n"
    estimated = estimate_of(RUN, LOOP.format(trips=5, lines=busy_line("n", 15_000) + waited + START))
    # Four gathers end inside the loop, each after 10 us of compute. The last one ends after the loop, unhidden.
    assert estimated.exposed["cycles"] == pytest.approx(4 * (WIRE - 10 * US) + WIRE)


def test_calls_and_branches():
    """The longer branch counts. A called computation counts as if it were inlined."""
    inside = "\n".join(
        f"%{name} (q: f32[8]) -> f32[8] {{\n  %q = f32[8]{{0:S(1)}} parameter(0)\n{busy_line('n', count, '%q')}}}\n"
        for name, count in (("short", 1500), ("long", 15_000), ("called", 3000))
    )
    lines = """  %p = pred[] parameter(2)
  %c = f32[8]{0} call(%small), to_apply=%called
  %b = f32[8]{0} conditional(%p, %small, %small), true_computation=%short, false_computation=%long
"""
    assert estimate_of(lines, inside).compute["cycles"] == pytest.approx(12 * US)


def test_asynchronous_copies():
    """A copy to the chip moves while the memory is idle."""
    start = "  %s = (f32[1125000]{0:S(1)}, f32[1125000]{0}, u32[]{:S(2)}) copy-start(%x)\n"
    done = "  %d = f32[1125000]{0:S(1)} copy-done(%s)\n"
    alone_seconds, instruction_seconds = 4.5e6 / MEMORY, 9e6 / MEMORY
    reading = '  %n = f32[1125000]{0} negate(%x), backend_config={"estimated_cycles":"15000"}\n'
    assert estimate_of(start + done).copies["cycles"] == pytest.approx(alone_seconds)
    assert estimate_of(start + busy_line("n", 1500) + done).copies["cycles"] == pytest.approx(alone_seconds - US)
    assert estimate_of(start + busy_line("n", 15_000) + done).copies["cycles"] == 0
    # The instruction's own traffic takes more than its 10 us, so no bandwidth is left for the copy.
    assert instruction_seconds > 10 * US and estimate_of(start + reading + done).copies["cycles"] == pytest.approx(
        alone_seconds
    )
    host = start.replace("%s = (f32[1125000]{0:S(1)}", "%s = (f32[1125000]{0:S(5)}")
    assert estimate_of(host + busy_line("n", 15_000) + done).copies["cycles"] == pytest.approx(4.5e6 / 15e9 - 10 * US)


def test_gpu_has_no_cycles():
    estimated = estimate_of(START + "  %n = f32[1125000]{0} negate(%x)\n" + DONE, target="h100:1x4")
    gather, moved = max(4.5e6 / 405e9, 10 * US), 9e6 / (0.8 * 3350e9)
    assert estimated.compute == pytest.approx({"roofline": moved})
    assert estimated.exposed == pytest.approx({"roofline": gather - moved})
    assert estimated.without_cycles == 0


def test_memory_report_and_json():
    memory = {"argument": 10 << 30, "temp": 7 << 30, "output": 9 << 30, "alias": 8 << 30}
    estimated = estimate_of(WHOLE + busy_line("n", 15_000), memory=memory)
    assert (estimated.memory_bytes, estimated.fits) == (18 << 30, False)
    assert estimate_of(WHOLE, memory=memory | {"peak": 15 << 30}).fits
    assert estimate_of(WHOLE, memory=memory | {"peak": 40 << 30}).peak_bytes == 18 << 30  # 40 includes the host's
    on_host = estimate_of(WHOLE, memory=memory | {"peak": 40 << 30, "device": 15 << 30})
    assert (on_host.peak_bytes, on_host.fits) == (15 << 30, True)
    assert estimate_of(WHOLE).fits is None
    data = json.loads(json.dumps(estimated.to_json()))
    assert data["step"]["cycles"] == pytest.approx(WIRE + 10 * US)
    assert data["traffic"][0]["kind"] == "all-gather" and data["traffic"][0]["wire_bytes"] == 4.5e6
    assert "all-gather" in table(estimated) and "18.00 GiB" in table(estimated)


def test_split_by_origin():
    attention = busy_line("a", 1500).replace("), backend", '), metadata={op_name="jit(f)/bqk->bq/exp"}, backend')
    estimated = estimate_of(attention + busy_line("b", 3000)).split({"attention": "bqk"})
    assert {name: spent["cycles"] for name, spent in estimated.items()} == pytest.approx(
        {"attention": US, "other": 2 * US}
    )
    assert [row.name for row in estimate_of(attention + busy_line("b", 3000)).top(1, "cycles")] == ["b"]


def test_the_module_of_a_slice_numbers_the_partitions_of_its_slice():
    """Partition 0 of the whole program and its partition 2 are in the first slice, as neighbours along y."""
    gather = "all-gather(%x), channel_id=1, replica_groups={{0,1}}, dimensions={0}"
    text = f"""HloModule m, is_scheduled=true, num_partitions=2

ENTRY %main () -> f32[] {{
  %x = f32[1125000]{{0}} parameter(0)
  ROOT %g = f32[2,1125000]{{1,0}} {gather}
}}
"""
    places = [(0, 0, 0, 0, 0), (0, 0, 0, 0, 1), (0, 1, 0, 0, 0), (0, 1, 0, 0, 1)]
    (found,) = estimate(text, "v5e:1x2*2", places).traffic
    assert found.over == "y2:1"


def test_machine_with_too_few_devices():
    with pytest.raises(ValueError, match="1 devices, the program 4 partitions"):
        estimate(
            "HloModule m, num_partitions=4\n\nENTRY %main () -> f32[] {\n  ROOT %x = f32[] parameter(0)\n}\n", "v5e:1x1"
        )


def test_nothing_of_autoshard_is_imported():
    """The estimate is independent of autoshard: it and the modules that it imports read only compiled programs."""
    visited, to_visit = set(), ["estimate"]
    folder = Path(sys.modules["estimate"].__file__ or "").parent
    while to_visit:
        name = to_visit.pop()
        visited.add(name)
        tree = ast.parse((folder / f"{name}.py").read_text())
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not any(module.split(".")[0] == "autoshard" for module in imported), name
        to_visit += [module for module in imported - visited if (folder / f"{module}.py").exists()]
    assert {"hlo", "hlo_schedule", "links", "estimate_report", "estimate_result"} <= visited
