"""A trace beside the plan, with made-up events; notes and errors of traces that are not as expected."""

import json

import pytest

from autoshard.errors import ConfigError
from autoshard.train.profile.comparison import compare
from autoshard.train.profile.trace import trace_of
from tests.train.profile.planes import HOST_ONLY, cpu, gpu, planes_of, tpu


def names(instruction="all-gather.2", ends=(), steps=(5,), **changes):
    """What `collectives.json` says of a step with a fusion and a gather."""
    gather = {
        "instruction": instruction, "ends": list(ends), "name": "all-gather over fsdp of 0/w, m.py:1 (f)",
        "kind": "all-gather", "axes": ["fsdp"], "tensors": ["0/w"], "module": "0", "line": "m.py:1 (f)",
        "is_planned": True, "step_bytes": 64.0, "runs": 1.0, "predicted_us": 2.0, "exposed_us": 1.0,
    }  # fmt: skip
    return {
        "module": "jit_train_step", "strategy": "fsdp:2", "target": "cpu:2", "steps": list(steps), "compute_us": 0.5,
        "planned": {"step_time_us": 4.0, "compute_us": 1.0, "kinds": {"all-gather": 3.0, "reduce-scatter": 1.0}},
        "collectives": [gather], "modules": {"m.py (f)": ["fusion.1"], "0": [instruction]}, "compiled": False,
    } | changes  # fmt: skip


def test_times_are_of_one_step_on_one_device():
    found = compare(trace_of(planes_of(cpu(steps=2))), names(steps=(5, 6)))
    compute, gather, absent = found.kinds
    assert (found.devices, found.steps, found.platform) == (2, (5, 6), "CPU")
    assert (compute.kind, compute.planned_us, compute.predicted_us, compute.measured_us) == ("compute", 1.0, 0.5, 2.0)
    assert (gather.kind, gather.planned_us, gather.predicted_us) == ("all-gather", 3.0, 2.0)
    assert (gather.measured_us, gather.waiting_us, gather.runs) == (3.0, 1.0, 1.0)  # 4 and 2 us; one waits 2 us
    assert (absent.kind, absent.planned_us, absent.predicted_us, absent.measured_us) == ("reduce-scatter", 1.0, None, 0)
    assert found.step_us == 10.0  # from the begin of one step to that of the next
    modules = [(row.module, row.compute_us, row.measured_us) for row in found.modules]
    assert modules == [("0", 0, 3.0), ("m.py (f)", 2.0, 0)]
    assert json.loads(found.to_json())["kinds"][0]["measured_us"] == 2.0


def test_an_asynchronous_collective_is_its_start_and_its_end():
    given = names("all-gather-start.2", ["all-gather-done.2"], steps=(1, 2))
    found = compare(trace_of(planes_of(tpu(0), tpu(1, slow=4))), given)
    (gather,) = found.collectives
    assert gather.measured_us == pytest.approx((2 + 10 + 2 + 14) / 2 / 1000) and gather.runs == 1.0
    assert gather.waiting_us == pytest.approx(4 / 2 / 1000)
    assert found.step_us == pytest.approx(1.0) and not found.notes  # the step of evaluation is another program
    assert found.kinds[0].measured_us == pytest.approx(0.03)


def test_a_gpu_has_one_event_for_an_asynchronous_collective():
    found = compare(trace_of(planes_of(gpu(0))), names("all-gather-start.2", ["all-gather-done.2"]))
    assert found.collectives[0].measured_us == pytest.approx(0.02) and found.platform == "GPU"


def test_loops_are_not_counted_beside_their_bodies():
    trace = trace_of(planes_of(cpu()))
    for events in trace.ops.values():
        events.append(type(events[0])(0, "while.3", "8", 0.0, 1e9))
    assert compare(trace, names()).kinds[0].measured_us == 2.0


def test_a_step_that_was_compiled_again_is_reported():
    (note, _) = compare(trace_of(planes_of(cpu(programs=(8, 9)))), names()).notes
    assert note == "the step was compiled again: the trace has 2 programs of it. The figures are of one of them"
    notes = compare(trace_of(planes_of(cpu())), names("all-gather.7")).notes
    assert "the step was compiled again: the recorded program has no all-gather.2" in notes
    assert any(note.startswith("1 collectives of the program have no event, all-gather.7") for note in notes)
    assert any("step 5 was the first of its attempt" in note
               for note in compare(trace_of(planes_of(cpu())), names(compiled=True)).notes)  # fmt: skip


def test_a_trace_without_events_of_devices_is_an_error():
    with pytest.raises(ConfigError, match="has events of the host only, none of devices"):
        compare(trace_of(planes_of(HOST_ONLY)), names())
    with pytest.raises(ConfigError, match="no events of 'jit_other'; its programs are jit_train_step"):
        compare(trace_of(planes_of(cpu())), names(module="jit_other"))
