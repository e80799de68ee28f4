"""The referee's figures of programs without machine code."""

import pytest
from estimate import estimate
from judged_steps import estimated

from autoshard.sharding.audit import Compiled

PROGRAM = """HloModule jit_step, is_scheduled=true, num_partitions=1

ENTRY %main (a: f32[1024,1024]) -> f32[1024,1024] {
  %a = f32[1024,1024]{1,0} parameter(0)
  ROOT %tanh = f32[1024,1024]{1,0} tanh(%a), backend_config={"window_config":{},"estimated_cycles":"15000000"}
}
"""


def test_a_program_without_machine_code_has_the_roofline_only():
    whole = estimate(PROGRAM, "v5e:1x1", None, dict(argument=4.0, temp=4.0, output=4.0, alias=0.0, peak=8.0))
    scheduled = estimate(PROGRAM, "v5e:1x1", None, {"device": 9.0}, has_code=False)
    assert whole.step["cycles"] == pytest.approx(0.01) and set(scheduled.step) == {"roofline"}
    assert scheduled.step["roofline"] == whole.step["roofline"]
    assert (whole.peak_bytes, scheduled.peak_bytes, scheduled.memory_bytes) == (8.0, 9.0, None)
    assert scheduled.fits and scheduled.without_cycles == 0
    assert not estimate(PROGRAM, "v5e:1x1", None, {"device": 1e12}, has_code=False).fits


@pytest.mark.parametrize(
    ("until", "measures"), [("schedule", {"roofline"}), ("code", {"cycles", "roofline", "joined"})]
)
def test_a_compiled_program_is_judged_by_what_it_has(monkeypatch, until, measures):
    monkeypatch.setattr(Compiled, "text", PROGRAM)
    memory = {"device": 9} if until == "schedule" else {"argument": 4, "temp": 4, "output": 4, "alias": 0, "peak": 9}
    found = estimated(Compiled("ok", memory=memory, until=until), "v5e:1x1")
    assert set(found.step) == measures and found.peak_bytes == 9
