"""Notices that a cloud sends before it stops a machine.

    Google  `preempted` becomes TRUE, or `maintenance-event` TERMINATE_ON_HOST_MAINTENANCE, at most 60 s before
    Amazon  `spot/instance-action` exists, 120 s before

Some machines also get SIGTERM, but containers and machines without a shutdown script do not. A scheduled maintenance is
announced days before, under other names; it does not stop a run.
Sources: the clouds' documentation of their metadata servers.
"""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

GOOGLE = "http://metadata.google.internal/computeMetadata/v1/instance/"
AMAZON = "http://169.254.169.254/latest/"
NOTICE = "notice of"  # beginning of every notice
POLL_S = 5.0  # between two queries; source: what Amazon recommends
TIMEOUT_S = 2.0  # of a query; chosen: the server is on the machine's own host
_TOKEN_S = "21600"  # lifetime of Amazon's session token; source: its longest
_HARDWARE = Path("/sys/class/dmi/id")
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # metadata servers are never behind one

Read = Callable[[], str | None]


def find_notices(hardware: Path = _HARDWARE) -> Read | None:
    """Return the function that reads the notices of the cloud that this machine belongs to; None elsewhere.

    Args:
        hardware: The folder in which Linux describes the machine's hardware.
    """
    product, vendor = _text(hardware / "product_name"), _text(hardware / "sys_vendor")
    if product.startswith("Google"):
        return google_notice
    if vendor.startswith("Amazon"):
        return amazon_notice
    return None


def google_notice(server: str = GOOGLE) -> str | None:
    """Return Google's notice; None if there is none or the server does not answer."""
    headers = {"Metadata-Flavor": "Google"}
    if _get(f"{server}preempted", headers) == "TRUE":
        return f"{NOTICE} a preemption"
    event = _get(f"{server}maintenance-event", headers) or ""
    return f"{NOTICE} maintenance ({event})" if event.startswith("TERMINATE") else None


def amazon_notice(server: str = AMAZON) -> str | None:
    """Return Amazon's notice; None if there is none or the server does not answer."""
    token = _get(f"{server}api/token", {"X-aws-ec2-metadata-token-ttl-seconds": _TOKEN_S}, method="PUT")
    if token is None:
        return None
    action = _get(f"{server}meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token})
    return None if action is None else f"{NOTICE} a spot interruption"


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


def _get(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with _NO_PROXY.open(request, timeout=TIMEOUT_S) as response:
            return response.read().decode(errors="replace").strip()
    except (OSError, ValueError):  # HTTPError of a missing entry is an OSError
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
