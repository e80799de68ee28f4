"""The servers at which machines of Google, Amazon and Microsoft ask about themselves.

Sources: the clouds' documentation of their metadata servers.
"""

from __future__ import annotations

import urllib.parse
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Literal

GOOGLE = "http://metadata.google.internal/computeMetadata/v1/instance/"
AMAZON = "http://169.254.169.254/latest/"
AZURE = "http://169.254.169.254/metadata/"
HARDWARE = Path("/sys/class/dmi/id")  # where Linux describes the machine's hardware
_AZURE_ASSET = "7783-7084-3265-9085-8269-3286-77"  # `chassis_asset_tag` of Azure's machines, not of others on Hyper-V
_TIMEOUT_S = 2.0  # of a query; chosen: the server is on the machine's own host
_TOKEN_S = "21600"  # lifetime of Amazon's session token; source: its longest
_AZURE_VERSION = "2020-07-01"  # the newest with events
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # metadata servers are never behind one


def find_cloud() -> Literal["google", "amazon", "azure"] | None:
    """Return the cloud that this machine belongs to, by its hardware, without a query."""
    if _text(HARDWARE / "product_name").startswith("Google"):
        return "google"
    if _text(HARDWARE / "sys_vendor").startswith("Amazon"):
        return "amazon"
    return "azure" if _text(HARDWARE / "chassis_asset_tag") == _AZURE_ASSET else None


def google(name: str) -> str | None:
    """Return an entry of Google's server, such as `maintenance-event`; None if there is none, or no answer."""
    return _get(f"{GOOGLE}{name}", {"Metadata-Flavor": "Google"})


def amazon(name: str) -> str | None:
    """Return an entry of Amazon's server, such as `spot/instance-action`; None if there is none, or no answer."""
    token = _get(f"{AMAZON}api/token", {"X-aws-ec2-metadata-token-ttl-seconds": _TOKEN_S}, method="PUT")
    return None if token is None else _get(f"{AMAZON}meta-data/{name}", {"X-aws-ec2-metadata-token": token})


def azure(name: str, **query: str) -> str | None:
    """Return an entry of Azure's server, such as `scheduledevents`; None if there is none, or no answer.

    Args:
        name: The entry.
        **query: More parameters of the query, such as `format`. The server's version is set.
    """
    given = urllib.parse.urlencode({"api-version": _AZURE_VERSION, **query})
    return _get(f"{AZURE}{name}?{given}", {"Metadata": "true"})


def _get(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    try:
        with _NO_PROXY.open(request, timeout=_TIMEOUT_S) as response:
            return response.read().decode(errors="replace").strip()
    except (OSError, HTTPException, ValueError):  # the error for a missing entry is an OSError
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
