"""The text of an audit about transfers of host memory."""

from autoshard.sharding.audit import Audit
from autoshard.sharding.audit.host_traffic import compiled_transfers, transfer_lines
from autoshard.sharding.hlo.host_transfers import TransferRuns

OUT = TransferRuns(
    "out.1", "bf16[8,128]", True, 2048.0, 100.0, "model.py:12 (loss)", distance=7, compute_us=400.0, trips=5
)


def with_(**changes):
    return TransferRuns(**{**vars(OUT), **changes})


def test_transfers_that_wait_come_first_and_have_a_reason():
    found = compiled_transfers([
        OUT,
        with_(name="short", exposed_us=250.0, compute_us=50.0),
        with_(name="busy", exposed_us=200.0),
        with_(name="idle", exposed_us=150.0, compute_us=0.0),
        with_(name="at once", exposed_us=500.0, distance=0, is_asynchronous=False),
        with_(name="never", trips=0.0),
    ])  # fmt: skip
    assert [t.name for t in found] == ["at once", "short", "busy", "idle", "out.1"]
    assert [t.reason for t in found] == [
        "it starts where it is needed: the device waits for all of it",
        "it takes 100 us, with 50.0 us of compute beside it",
        "the link is busy with earlier transfers when it starts",
        "no compute among the 7 instructions between its start and its end",
        "",
    ]
    text = str(Audit("ok", transfers=found))
    assert "host memory: 25 transfers per step, 50.0 KiB to the host, 0 B from it" in text
    assert "the device waits for 4 of them:" in text
    assert "short, bf16[8,128] to host: it takes 100 us" in text


def test_transfers_without_a_wait():
    lines = transfer_lines(compiled_transfers([OUT, with_(to_host=False, distance=None, line="")]))
    assert lines[-1].strip() == "the device waits for none of them"
    assert lines[2].split()[-2:] == ["model.py:12", "(loss)"] and lines[3].split()[-2:] == ["-", "-"]
    assert transfer_lines(()) == []
