"""The benchmark of planning at scale: one small measurement, and the ratios of made-up measurements."""

import pytest
from planning_scale import OF_CONFIG, OF_PATTERNS, SMALL, Measured, in_a_process, rows_of


@pytest.mark.slow
def test_a_measurement_is_a_new_process():
    measurement = in_a_process(("plan", SMALL, "layers=1", "context=64", "vocab=256"))
    assert set(measurement.seconds) == {"trace", "plan"}
    assert all(0 < measurement.seconds[what] for what in measurement.seconds)
    assert 1e8 < measurement.peak_bytes < 2e9
    assert measurement.chosen


def test_ratios_and_limits():
    def plan(seconds, peak=1e9):
        return Measured({"trace": 1.0, "plan": seconds}, {"trace": 1.0, "plan": seconds}, peak)

    def search(seconds):
        return Measured({"search": seconds}, {"search": seconds}, 1e9)

    lowered = Measured({"trace": 2.0, "lower": 1.0}, {"trace": 2.0, "lower": 1.0}, 1e9)
    rows = rows_of(
        {"scanned, lowered": lowered, "32 unrolled layers, lowered": lowered}
        | {"scanned, 64 chips": plan(3.0), "scanned, 512 chips": plan(4.5)}
        | {"32 unrolled layers, 64 chips": plan(4.5), "32 unrolled layers, 512 chips": plan(10.0)}
        | {"32 unrolled layers, 512 chips, 1024 rows": plan(8.1)}
        | {"128 unrolled layers, 64 chips": plan(18.0, peak=2.5e9)}
        | {"scanned, 64 chips, all variants": search(4.0), "32 unrolled layers, 64 chips, all variants": search(9.0)}
        | {OF_CONFIG: search(11.0), **{name: search(30.0) for name in OF_PATTERNS}}
    )
    verdicts = {row.name: (row.value, row.verdict) for row in rows if row.target is not None}
    assert verdicts == {
        "scanned, 64 chips: planning beyond the trace": (3.0, "missed"),
        "32 unrolled layers, 64 chips: planning beyond the trace": (4.5, "met"),
        "32 unrolled layers, 64 chips, all variants: tracing and planning": (9.0, "met"),
        f"{OF_CONFIG}: tracing and planning": (11.0, "missed"),
        "32 unrolled layers: planning / (trace + lower)": (1.5, "met"),
        "128 unrolled layers / 32": (4.0, "met"),
        "512 chips / 64, scanned": (1.5, "met"),
        "512 chips / 64, 32 unrolled layers": (10.0 / 4.5, "missed"),
        "512 chips / 64, 8 times the rows": (8.1 / 4.5, "met"),
        "peak memory of the largest process": (2.5, "missed"),
    }
