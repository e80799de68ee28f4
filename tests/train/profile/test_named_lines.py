"""Lines with the plan's names in a trace, read back by JAX's reader and by XProf."""

import errno
import io
import json

import pytest
from jax.profiler import ProfileData

from autoshard.train.profile.named_lines import PLANE, add_named_lines
from autoshard.train.profile.trace import read_trace
from tests.train.profile import planes

GATHER = 'all-gather over fsdp of state/params/"wq" ß'
NAMES = {
    "module": "jit_train_step",
    "collectives": [
        {"instruction": "all-gather.2", "ends": [], "name": GATHER},
        {"instruction": "all-gather-start.2", "ends": ["all-gather-done.2"], "name": GATHER},
    ],
}


@pytest.fixture
def write(tmp_path):
    def write_file(*texts):
        data = ProfileData.text_proto_to_serialized_xspace("\n".join(texts))
        (tmp_path / "host.xplane.pb").write_bytes(data)
        return tmp_path

    return write_file


def named_events(session):
    found = ProfileData.from_file(str(session / "host.xplane.pb")).find_plane_with_name(PLANE)
    return found and {
        line.name: [(event.name, event.start_ns, event.duration_ns) for event in line.events] for line in found.lines
    }


def test_each_run_of_a_collective_has_an_event_with_its_name(write):
    session = write(planes.cpu(steps=2))
    before = read_trace(session)
    assert add_named_lines(session, NAMES) == 4
    assert named_events(session) == {
        "device 0": [(GATHER, 1100, 4000), (GATHER, 11100, 4000)],
        "device 1": [(GATHER, 3100, 2000), (GATHER, 13100, 2000)],
    }
    assert read_trace(session) == before  # what was there is unchanged


def test_start_and_end_of_an_asynchronous_collective_are_told_apart(write):
    session = write(planes.tpu(0), planes.tpu(1, slow=5))
    assert add_named_lines(session, NAMES) == 8
    start, end = f"start of {GATHER}", f"end of {GATHER}"
    assert named_events(session)["device 1"] == [(start, 1030, 2), (end, 1100, 15), (start, 2030, 2), (end, 2100, 15)]


def test_only_the_program_that_ran_most_has_names(write):
    session = write(planes.cpu(programs=(8,), steps=2), planes.cpu(programs=(9,)))
    assert add_named_lines(session, NAMES) == 4


@pytest.mark.parametrize("text", [planes.HOST_ONLY, planes.gpu(0).replace("all-gather-start.2", "copy.3")])
def test_a_trace_without_collectives_stays_as_it_is(write, text):
    session = write(text)
    before = (session / "host.xplane.pb").read_bytes()
    assert add_named_lines(session, NAMES) == 0
    assert (session / "host.xplane.pb").read_bytes() == before


@pytest.mark.slow
def test_xprof_shows_the_names(write):
    xprof = pytest.importorskip("xprof.convert.raw_to_tool_data")
    session = write(planes.cpu())
    add_named_lines(session, NAMES)
    found, _ = xprof.xspace_to_tool_data([str(session / "host.xplane.pb")], "trace_viewer", {})
    events = json.loads(found)["traceEvents"]
    processes = {each["pid"]: each["args"]["name"] for each in events if each.get("name") == "process_name"}
    shown = [(processes[each["pid"]], each["ts"], each["dur"]) for each in events if each.get("name") == GATHER]
    assert sorted(shown) == [(PLANE, 1.1, 4.0), (PLANE, 3.1, 2.0)]


def test_a_file_is_as_it_was_if_its_lines_cannot_be_written(write, monkeypatch):
    session = write(planes.cpu())
    before = (session / "host.xplane.pb").read_bytes()

    class Full(io.FileIO):
        def write(self, data):
            super().write(data[:5])
            raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
        patch.setattr(type(session), "open", lambda path, mode: Full(path, mode))
        add_named_lines(session, NAMES)
    assert (session / "host.xplane.pb").read_bytes() == before
