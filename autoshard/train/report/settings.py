"""The settings on a run's page: those that differ from the defaults, then all of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from autoshard._html.parts import folded, table
from autoshard.train.config.stored_config import to_dict
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.report.run_files import Run

_OWN = ("run_dir", "preset", "config")  # where a run is and how it was called, not what it does


def settings_section(run: Run) -> str:
    """The settings as tables."""
    now, defaults = flat(run.settings), flat(to_dict(TrainConfig()))
    changed = {name: value for name, value in now.items() if name not in _OWN and defaults.get(name) != value}
    head = ["setting", "value", "default"]
    rows = [[f"<code>{escape(n)}</code>", _value(v), _value(defaults.get(n))] for n, v in changed.items()]
    listed = f'<div class="plain">{table(head, rows, wide=())}</div>' if rows else "<p>All have their defaults.</p>"
    every = table(head[:2], [[f"<code>{escape(n)}</code>", _value(v)] for n, v in now.items()], wide=())
    return listed + folded(f"All {len(now)} settings", f'<div class="plain">{every}</div>')


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings under their names on the command line.

    Example:
        >>> flat({"steps": 3, "gpt": {"layers": 2}})
        {'steps': 3, 'gpt.layers': 2}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _value(value: Any) -> str:
    return f"<code>{escape(value if isinstance(value, str) else json.dumps(value))}</code>"
