"""A comparison of two checkouts: the ratio, the noise, the verdict, and revisions that do not exist."""

import subprocess

import against
import pytest
from against import Comparison


def test_ratio_is_the_median_over_the_turns():
    comparison = Comparison("planning", [100, 200, 100, 100, 100], [110, 220, 500, 110, 50])
    assert comparison.ratio == pytest.approx(1.1)


def test_noise_is_the_largest_factor_between_consecutive_old_turns():
    new_us = [1000, 1, 1, 1, 1]
    assert Comparison("planning", [100, 110, 100, 100, 100], new_us).noise == pytest.approx(1.1)
    assert Comparison("planning", [100, 100, 80, 100, 100], new_us).noise == pytest.approx(1.25)
    assert Comparison("planning", [100] * 5, new_us).noise == 1


@pytest.mark.parametrize(
    ("old_us", "new_us", "is_slower"),
    [
        ([100] * 5, [102] * 5, False),  # within the tolerance
        ([100] * 5, [104] * 5, True),
        ([100, 110, 100, 110, 100], [109, 119, 109, 119, 109], False),  # within the noise
        ([100, 110, 100, 110, 100], [112, 123, 112, 123, 112], True),
        ([100] * 5, [50] * 5, False),
    ],
)
def test_verdict(old_us, new_us, is_slower):
    comparison = Comparison("planning", old_us, new_us)
    assert comparison.is_slower is is_slower
    assert str(comparison).endswith("slower" if is_slower else "ok")


def test_times_near_zero_have_no_ratio():
    comparison = Comparison("dispatch", [0.1, -0.2, 0.0, 0.3, 0.1], [0.9, 0.4, -0.1, 0.8, 0.2])
    assert (comparison.ratio, comparison.noise, comparison.is_slower) == (1, 1, False)


@pytest.mark.parametrize("revision", ["no-such-branch", "", "--help", "HEAD^{tree}"])
def test_a_revision_that_does_not_exist(capsys, revision):
    assert against.main([f"--against={revision}"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith(f"against.py: --against {revision!r}: ") and "give a branch, a tag or a hash" in line


def test_fewer_than_five_turns(capsys):
    with pytest.raises(SystemExit):
        against.main(["--against", "HEAD", "--turns", "4"])
    assert "'4' is not a whole number of at least 5" in capsys.readouterr().err


@pytest.fixture
def fake_measurements(monkeypatch):
    """Replaces measurements: 100 us in the old checkout, `new_us` in the new one. No worktree is created."""

    def make(new_us):
        calls = []

        def measured_us(name, checkout):
            calls.append((name, checkout == against.ROOT))
            return new_us if checkout == against.ROOT else 100.0

        monkeypatch.setattr(against, "measured_us", measured_us)
        return calls

    monkeypatch.setattr(against, "commit_of", lambda revision: "0" * 40)
    monkeypatch.setattr(against, "git", lambda *words: subprocess.CompletedProcess(words, 0, "", ""))
    return make


@pytest.mark.parametrize(("new_us", "status"), [(100.0, 0), (150.0, 1)])
def test_checkouts_are_measured_in_turns(fake_measurements, capsys, new_us, status):
    calls = fake_measurements(new_us)
    assert against.main(["--against", "HEAD"]) == status
    assert calls == [(name, is_new) for name in against.NAMES for _ in range(5) for is_new in (False, True)]
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(against.NAMES)


def test_every_measurement_exists():
    assert all(f'"{name}": {name}_us' in against.MEASURE.read_text() for name in against.NAMES)
