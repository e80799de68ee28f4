"""Notices that a cloud sends before it stops a machine.

    Google  `preempted` becomes TRUE, or `maintenance-event` TERMINATE_ON_HOST_MAINTENANCE, at most 60 s before
    Amazon  `spot/instance-action` exists, 120 s before
    Azure   `scheduledevents` has an event for this machine: Preempt, at least 30 s before, or Terminate, Reboot or
            Redeploy, minutes before; a Freeze is over in seconds and does not stop a run

Some machines also get SIGTERM, but containers and machines without a shutdown script do not. A scheduled maintenance is
announced days before, under other names; it does not stop a run.
Sources: the clouds' documentation of their metadata servers.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

from autoshard.train.run.cloud import metadata

NOTICE = "notice of"  # beginning of every notice
POLL_S = 5.0  # between two queries; source: what Amazon recommends

_AZURE_STOPS = {  # event -> what it is
    "Preempt": "a spot interruption",
    "Terminate": "a termination",
    "Reboot": "a reboot",
    "Redeploy": "a move to another host",
}

Read = Callable[[], str | None]


def find_notices() -> Read | None:
    """Return the function that reads the notices of the cloud that this machine belongs to; None elsewhere."""
    cloud = metadata.find_cloud()
    return {"google": google_notice, "amazon": amazon_notice, "azure": azure_notice}[cloud] if cloud else None


def google_notice() -> str | None:
    """Return Google's notice; None if there is none or the server does not answer."""
    if metadata.google("preempted") == "TRUE":
        return f"{NOTICE} a preemption"
    event = metadata.google("maintenance-event") or ""
    return f"{NOTICE} maintenance ({event})" if event.startswith("TERMINATE") else None


def amazon_notice() -> str | None:
    """Return Amazon's notice; None if there is none or the server does not answer."""
    return None if metadata.amazon("spot/instance-action") is None else f"{NOTICE} a spot interruption"


def azure_notice() -> str | None:
    """Return Azure's notice; None if there is none for this machine or the server does not answer."""
    try:
        events = json.loads(metadata.azure("scheduledevents") or "{}").get("Events", [])
    except (ValueError, AttributeError):  # not JSON, or not an object
        return None
    coming = [event for event in events if event.get("EventType") in _AZURE_STOPS]
    if not coming:
        return None
    # The list has the events of the machines of a whole set.
    name = metadata.azure("instance/compute/name", format="text")
    mine = next((event["EventType"] for event in coming if name in event.get("Resources", ())), None)
    return f"{NOTICE} {_AZURE_STOPS[mine]}" if mine else None


class MaintenanceNotices:
    """Query for a notice in a thread while the `with` block runs, and report the first one."""

    def __init__(self, report: Callable[[str], None], read: Read | None, poll_s: float = POLL_S) -> None:
        """Start no thread yet.

        Args:
            report: Called once with the notice, in the thread.
            read: Reads the notice; None for no thread.
            poll_s: Seconds between two queries.
        """
        self._report, self._read, self._poll_s = report, read, poll_s
        self._ended = threading.Event()

    def __enter__(self) -> MaintenanceNotices:
        """Start the thread."""
        if self._read is not None:
            threading.Thread(target=self._poll, args=(self._read,), name="maintenance notices", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread after its query."""
        self._ended.set()

    def _poll(self, read: Read) -> None:
        while not self._ended.is_set():
            if (notice := read()) is not None:
                self._report(notice)
                return
            self._ended.wait(self._poll_s)
