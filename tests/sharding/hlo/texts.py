"""Handwritten programs in the text form that XLA's compilers print, for tests."""

HEAD = "HloModule jit_step, is_scheduled=true, entry_computation_layout={{()->()}}, num_partitions={}"

# libtpu schedules a reduce-scatter on a sparse core. The last line of its computations names the thread.
SPARSE_CORE = """HloModule step, is_scheduled=true, num_partitions=2

%called (p: f32[8]) -> f32[4] {
  %p = f32[8]{0} parameter(0)
  ROOT %scattered = f32[4]{0} reduce-scatter(%p), replica_groups={{0,1}}, dimensions={0}, to_apply=%add
}, execution_thread="sparsecore"

%wrapped (q: f32[8]) -> f32[4] {
  %q = f32[8]{0} parameter(0)
  ROOT %call = f32[4]{0} call(%q), to_apply=%called
}, execution_thread="sparsecore"

ENTRY %main (a: f32[8]) -> f32[4] {
  %a = f32[8]{0} parameter(0)
  %start = ((f32[8]{0}), f32[4]{0}, s32[]) async-start(%a), async_execution_thread="sparsecore", calls=%wrapped
  ROOT %done = f32[4]{0} async-done(%start)
}
"""

TABLES = """
FileNames
1 "/home/me/model.py"
2 "/site-packages/autoshard/sharding/audit/compiler_process.py"
3 "C:\\autoshard\\sharding\\audit\\export.py"

FunctionNames
1 "loss"
2 "flat"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=4 end_column=9}
2 {file_name_id=2 function_name_id=2 line=180 end_line=180 column=4 end_column=9}
3 {file_name_id=3 function_name_id=2 line=70 end_line=70 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}
3 {file_location_id=3}
"""

ADD = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""


def text_of(entry: str, *computations: str, partitions: int = 8, tables: str = TABLES) -> str:
    """A program whose entry computation has these lines."""
    body = "\n".join(f"  {line.strip()}" for line in entry.strip().splitlines())
    return "\n".join([HEAD.format(partitions), tables, ADD, *computations, f"ENTRY %main () -> f32[] {{\n{body}\n}}\n"])


def loop(condition: str, body: str, state: str = "s32[], f32[64]") -> str:
    """The condition and body computations of a loop."""
    lines = {name: "\n".join(f"  {line.strip()}" for line in text.strip().splitlines())
             for name, text in (("condition", condition), ("body", body))}  # fmt: skip
    return (
        f"%condition (p: ({state})) -> pred[] {{\n  %p = ({state}) parameter(0)\n{lines['condition']}\n}}\n\n"
        f"%body (q: ({state})) -> ({state}) {{\n  %q = ({state}) parameter(0)\n{lines['body']}\n}}\n"
    )
