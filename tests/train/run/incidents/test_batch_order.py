"""Which batch each step has after rollbacks."""

from pathlib import Path

from autoshard.train.run.incidents.batch_order import BatchOrder, Rollback


def test_every_rollback_leaves_out_its_batches(tmp_path: Path) -> None:
    order = BatchOrder(tmp_path)
    assert order.roll_back(bad_step=4, step=2) == Rollback(4, 2, first=2, last=3)
    assert order.roll_back(bad_step=3, step=2) == Rollback(3, 2, first=4, last=4)
    assert [order.batch_of(step) for step in range(5)] == [0, 1, 5, 6, 7]
    assert BatchOrder(tmp_path).rollbacks == order.rollbacks


def test_a_line_that_a_crash_left_incomplete_takes_no_other_with_it(tmp_path: Path) -> None:
    (tmp_path / "rollbacks.jsonl").write_text('{"bad_step": 4, "st')  # of a full disk
    made = BatchOrder(tmp_path).roll_back(bad_step=4, step=2)
    assert BatchOrder(tmp_path).rollbacks == [made]
