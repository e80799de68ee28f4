"""Add the plan's names of collectives to a trace, as lines that XProf shows.

A compiled program calls its collectives `all-gather.12`, and so does a trace. A file of the trace is a serialized
`XSpace` (`xplane.proto` of XLA). Bytes that are appended to it merge with it, so the new plane changes nothing that is
there. The plane `/device:CUSTOM:autoshard` has a line for each device, with an event for each run of a collective.
XProf shows planes whose names begin with `/device:CUSTOM:` in its trace viewer. It leaves them out of its tables.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from autoshard.train.profile.trace import OpEvent, main_program, trace_of

PLANE = "/device:CUSTOM:autoshard"
PLANE_ID = 1 << 20  # chosen: far above the numbers that profilers give to planes


def add_named_lines(session: Path, names: Mapping[str, Any]) -> int:
    """Add a plane with the plan's names to each file of a trace, and return the number of events.

    Args:
        session: The folder of the session, which has the files `HOST.xplane.pb`.
        names: What `collectives.json` says of the compiled step.
    """
    called = collective_names(names["collectives"])
    count = 0
    for file in sorted(session.glob("*.xplane.pb")):
        events, _ = main_program(trace_of(ProfileData.from_file(str(file)).planes).of(names["module"]))
        found = [event for event in events if event.op in called]
        if found:
            _append(file, named_plane(found, called))
        count += len(found)
    return count


def _append(file: Path, data: bytes) -> None:
    """Append bytes to a file. If that fails, as on a full disk, the file is as it was."""
    size = file.stat().st_size
    try:
        with file.open("ab") as stream:
            stream.write(data)
    except OSError:
        os.truncate(file, size)
        raise


def collective_names(collectives: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return instruction -> the plan's name of the collective. The last instruction of an asynchronous one is its end.

    >>> collective_names([{"instruction": "all-gather-start.2", "ends": ["all-gather-done.2"], "name": "all-gather"}])
    {'all-gather-start.2': 'start of all-gather', 'all-gather-done.2': 'end of all-gather'}
    """
    called = {}
    for each in collectives:
        called[each["instruction"]] = f"start of {each['name']}" if each["ends"] else each["name"]
        called |= {end: f"end of {each['name']}" for end in each["ends"]}
    return called


def named_plane(events: Iterable[OpEvent], called: Mapping[str, str]) -> bytes:
    """Return a serialized `XSpace` with one plane: a line for each device, with its events.

    Args:
        events: Runs of collectives.
        called: Instruction -> the name of its events.
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(called.values()), 1)}
    lines: dict[int, list[OpEvent]] = defaultdict(list)
    for event in events:
        lines[event.device].append(event)
    text = [f'planes {{ id: {PLANE_ID} name: "{PLANE}"']
    for device, found in sorted(lines.items()):
        begin = int(min(event.start_ns for event in found))
        text.append(f'lines {{ id: {device} name: "device {device}" timestamp_ns: {begin}')
        for event in sorted(found, key=lambda event: event.start_ns):
            offset, duration = round(1e3 * (event.start_ns - begin)), round(1e3 * event.duration_ns)
            number = numbers[called[event.op]]
            text.append(f"events {{ metadata_id: {number} offset_ps: {offset} duration_ps: {duration} }}")
        text.append("}")
    for name, number in numbers.items():
        quoted = json.dumps(name, ensure_ascii=False)
        text.append(f"event_metadata {{ key: {number} value {{ id: {number} name: {quoted} }} }}")
    return ProfileData.text_proto_to_serialized_xspace("\n".join([*text, "}"]))
