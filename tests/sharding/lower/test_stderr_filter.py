"""The filter of the compiler's lines: which lines are kept, however the pipe divides them."""

from types import SimpleNamespace

import pytest

from autoshard.sharding.lower import stderr_filter

MARKER, KEPT, DONE = b"<end 1>", 7, 8
REMARK = b"W1125 00:35:48.133936 9728 spmd.cc:656] [SPMD] Involuntary full rematerialization. And so on\n"
OTHER = b"2025-11-25 00:35:48.133936: W xla.cc:1] another warning\n"


@pytest.fixture
def filtered(monkeypatch):
    """Filters chunks of input; returns standard error, the kept remarks, and the length of the one at each marker."""

    def run(chunks, at_once=1000):
        written, ends, left = {2: b"", KEPT: b""}, [], iter([*chunks, b""])

        def write(descriptor, data):
            if descriptor == DONE:
                ends.append(len(written[2]))
                return len(data)
            written[descriptor] += data[:at_once]
            return len(data[:at_once])

        monkeypatch.setattr(stderr_filter, "os", SimpleNamespace(read=lambda *_: next(left), write=write))
        stderr_filter.main(MARKER, KEPT, DONE)
        return written[2], written[KEPT], ends

    return run


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_chunks_of_any_size_are_filtered_alike(filtered, size):
    text = (
        b"first\n" + REMARK + OTHER + b"Warn\n" + REMARK + b"partly" + MARKER + b"after\n" + REMARK + MARKER + b"last"
    )
    errors, kept, ends = filtered([text[i : i + size] for i in range(0, len(text), size)])
    before = b"first\n" + OTHER + b"Warn\npartly"
    assert errors == before + b"after\nlast" and kept == 3 * REMARK
    assert ends == [len(before), len(before + b"after\n")]


def test_a_line_without_an_end_appears_at_once_unless_it_may_be_a_remark(filtered):
    def chunks():
        yield b"Compiling ..."
        yield b"W"
        yield REMARK[1:]
        yield b"<en"  # the beginning of the marker, or not
        yield b"tity>"

    errors, kept, _ = filtered(chunks())
    assert (errors, kept) == (b"Compiling ...<entity>", REMARK)


@pytest.mark.parametrize(
    ("line", "waits"),
    [(b"Compiling", False), (b"Waiting", False), (b"W", True), (b"2025-", True), (b"E1125", True), (b"x<end", True)],
)
def test_the_beginnings_of_lines_that_wait_for_their_end(filtered, line, waits):
    """What waits is written with the rest of its line, and therefore not if that makes it a remark."""
    rest = b" Involuntary full rematerialization\n"
    errors, kept, _ = filtered([line, rest])
    assert (errors, kept) == ((b"", line + rest) if waits else (line, rest))


def test_the_rest_of_a_compiler_that_aborts_appears(filtered):
    assert filtered([b"F1125 check", b" failed"]) == (b"F1125 check failed", b"", [])


def test_a_pipe_that_takes_little_at_once_loses_nothing(filtered):
    errors, kept, _ = filtered([b"first\n" + REMARK + OTHER], at_once=5)
    assert (errors, kept) == (b"first\n" + OTHER, REMARK)
