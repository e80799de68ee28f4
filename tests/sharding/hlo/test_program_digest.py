"""Digests of compiled programs ignore source lines and nothing else."""

from autoshard.sharding.hlo.program_digest import program_digest

TEXT = """HloModule jit_step, is_scheduled=true

FileNames
1 "/home/me/step.py"

%body (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %add = f32[8] add(%p, %p), metadata={op_name="jit(f)/while/body{1}\\"" stack_frame_id=2}, backend_config={"a":{}}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  ROOT %call = f32[8]{0} call(%x), to_apply=%body, metadata={op_name="jit(f)"}
}
"""


def test_source_lines_do_not_count():
    moved = TEXT.replace("/home/me", "/tmp").replace("body{1}", "body{2}").replace("jit_step", "jit_other")
    assert moved != TEXT and program_digest(moved) == program_digest(TEXT)


def test_instructions_and_their_configuration_count():
    assert program_digest(TEXT.replace('{"a":{}}', '{"b":{}}')) != program_digest(TEXT)
    assert program_digest(TEXT.replace("add(%p, %p)", "multiply(%p, %p)")) != program_digest(TEXT)
