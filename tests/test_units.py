"""Numbers, source lines and ratios as text."""

import math

import pytest

from autoshard._units import bytes_text, duration_text, line_text, percent_text, ratio_text, time_text


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (7.4, "7 B"),
        (1023, "1023 B"),
        (1023.9, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1020 * 2**10, "1020 KiB"),
        (1023.9 * 2**10, "1.00 MiB"),
        (80 * 2**30, "80.0 GiB"),
        (3 * 2**60, "3072 PiB"),
        (math.inf, "inf"),
    ],
)
def test_bytes_have_a_unit_and_three_digits(n, text):
    assert bytes_text(n) == text


@pytest.mark.parametrize(
    ("us", "text"),
    [(0, "0 us"), (12.34, "12.3 us"), (999.9, "1.00 ms"), (1.5e5, "150 ms"), (1e6, "1.00 s"), (9e9, "9000 s")],
)
def test_times_have_a_unit_and_three_digits(us, text):
    assert time_text(us) == text


def test_ratios_and_percentages_handle_zero():
    assert ratio_text(3, 2) == "1.50x" and ratio_text(1002, 1000) == "1.002x"
    assert ratio_text(1, 0) == "-" == percent_text(1, 0)
    assert percent_text(1, 1000) == "<1 %" and percent_text(0, 10) == "0 %" and percent_text(1, 3) == "33 %"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("/work/a/models/gpt.py:171:8 (_project)", "models/gpt.py:171 (_project)"),
        (r"C:\code\gpt.py:3 (f.<locals>.<lambda>)", "code/gpt.py:3 (f.<locals>.<lambda>)"),
        ("gpt.py:3", "gpt.py:3"),
        ("updated parameters", "updated parameters"),
        ("", "(no source line)"),
    ],
)
def test_source_lines_are_shortened(line, text):
    assert line_text(line) == text


def test_durations_have_units_that_people_read():
    assert [duration_text(seconds) for seconds in (0.5, 119.0, 150.0, 7199.0, 9000.0)] == [
        "500 ms", "119 s", "2.50 min", "120 min", "2.50 h",
    ]  # fmt: skip
