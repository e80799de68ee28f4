"""The memory of the fullest device."""

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from autoshard.train.run.device_memory import fullest_device

PLAN = SimpleNamespace(estimate=SimpleNamespace(peak_memory_bytes=7.0))


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        ([None, None], {"predicted_memory_bytes": 7.0}),
        ([{"peak_bytes_in_use": 3}, {"peak_bytes_in_use": 5}], {"memory_bytes": 5.0}),
        ([{"bytes_in_use": 4}], {"memory_bytes": 4.0}),
    ],
)
def test_measured_or_predicted(monkeypatch: pytest.MonkeyPatch, stats: list[Any], expected: dict[str, float]) -> None:
    devices = [SimpleNamespace(memory_stats=lambda found=found: found) for found in stats]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert fullest_device(PLAN, 1) == expected
