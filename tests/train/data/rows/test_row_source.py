"""Batches of rows: packed without contamination, the same on any number of processes, and bad rows are named."""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import AutoshardWarning, DataError
from autoshard.models import load_pretrained
from autoshard.train.data.rows.encoding import RowEncoder
from autoshard.train.data.rows.packing import pack
from autoshard.train.data.rows.records import read_records
from autoshard.train.data.rows.row_source import RowSource, row_source
from autoshard.train.data.text_data import Source
from tests.train.data.rows.templates import make_chat_folder, tokenizer

CONTEXT = 24  # of packed rows, in tokens
ROWS = [{"prompt": "hi why ", "completion": " ".join(["so"] * n)} for n in (1, 2, 5, 3, 1, 9, 4, 2, 2, 3)]
PAIR = {"prompt": "hi ", "chosen": "because so", "rejected": "bye"}


def write_rows(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def opened(path: Path, *, seed: int = 1, **options: Any) -> RowSource:
    folder = make_chat_folder(path.parent / "model")
    encoder = RowEncoder.of(folder, folder / "tokenizer.json")
    own: dict[str, Any] = dict(pairs=False, packed=True, held_out=None, context=12, batch_size=4)
    own |= dict(eval_batch_size=2, seed=seed) | options
    return row_source(path, encoder, **own)


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"rows\.parquet needs the package pyarrow: pip install pyarrow"):
        opened(write_rows(tmp_path / "rows.parquet", ROWS))


def test_files_of_a_folder_that_are_named_after_a_split_are_held_out(tmp_path: Path) -> None:
    (folder := tmp_path / "rows").mkdir()
    write_rows(folder / "train-00000-of-00001.jsonl", ROWS[:6])
    write_rows(folder / "more.jsonl", ROWS[6:7])
    write_rows(folder / "testimony.jsonl", ROWS[7:8])
    write_rows(folder / "test-00000-of-00001.jsonl", ROWS[8:])
    source = opened(folder, packed=False)
    assert (len(source.train), len(source.held_out)) == (8, 2)
    write_rows(folder / "validation.jsonl", ROWS[9:])
    assert len(opened(folder, packed=False).held_out) == 1
    for name in ("train-00000-of-00001", "more", "testimony"):
        (folder / f"{name}.jsonl").unlink()
    assert sum(len(part) for part in (opened(folder, packed=False).train, opened(folder, packed=False).held_out)) == 3


def test_texts_beside_rows_are_reported(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "notes.txt").write_text("a text")
    with pytest.warns(AutoshardWarning, match="has rows and 1 .txt files, such as notes.txt. Only the rows are read"):
        assert [record.value["prompt"] for record in read_records(tmp_path)] == ["a"]


@given(st.lists(st.integers(1, 20), max_size=30))
def test_packing_places_each_item_once_and_no_bin_overflows(lengths: list[int]) -> None:
    bins = pack(lengths, 20)
    assert sorted(n for each in bins for n in each) == list(range(len(lengths)))
    loads = sorted(sum(lengths[n] for n in each) for each in bins)
    assert all(load <= 20 for load in loads)
    assert len(loads) < 2 or loads[0] + loads[1] > 20  # no two bins could be one


def test_the_logits_of_a_packed_document_equal_those_alone(tmp_path: Path) -> None:
    source = opened(write_rows(tmp_path / "rows.jsonl", ROWS), context=CONTEXT)
    packed = max(source.train, key=len)
    assert len(packed) > 2
    row = {name: value[None] for name, value in source.make(packed).items()}
    model = load_pretrained(tmp_path / "model", plan="dp:8")
    graph, state = nnx.split(model)
    whole = nnx.merge(graph, jax.device_put(state, jax.devices()[0]))
    model: Any = nnx.jit(lambda *args, **kwargs: whole(*args, **kwargs))
    together = model(row["inputs"], positions=row["positions"], segment_ids=row["segment_ids"])[0]
    start = 0
    for one in packed:
        padding = np.zeros(CONTEXT - len(one.tokens) + 1, one.tokens.dtype)  # one program for documents of all lengths
        alone = model(np.concatenate([one.tokens[:-1], padding])[None])[0][: len(one.tokens) - 1]
        np.testing.assert_allclose(together[start : start + len(alone)], alone, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(row["mask"][0, start : start + len(alone)], one.counts[1:])
        np.testing.assert_array_equal(row["positions"][0, start : start + len(alone)], np.arange(len(alone)))
        start += len(alone)
    assert row["mask"][0, start:].sum() == 0
    wrong = model(row["inputs"], positions=row["positions"])[0]  # what the check would see without segments
    assert np.abs(wrong - together).max() > 1e-2


def test_batches_do_not_depend_on_processes_and_cover_all_rows_in_each_pass(tmp_path: Path) -> None:
    source = opened(write_rows(tmp_path / "rows.jsonl", ROWS), packed=False, batch_size=3)
    assert isinstance(source, Source) and len(source.train) == 9 and len(source.held_out) == 1
    whole = source.batch(4, range(3))
    parts = [source.batch(4, range(0, 1)), source.batch(4, range(1, 3))]
    for name, value in whole.items():
        np.testing.assert_array_equal(value, np.concatenate([part[name] for part in parts]))
    passes = [sorted(source.batch(step, range(3))["mask"].sum(1).tolist() for step in range(n, n + 3)) for n in (0, 3)]
    assert sorted(sum(passes[0], [])) == sorted(sum(passes[1], []))
    first, second = ([source.batch(step, range(3))["inputs"] for step in range(n, n + 3)] for n in (0, 3))
    assert not np.array_equal(first, second)
    assert not np.array_equal(source.batch(0, range(3))["inputs"], opened(tmp_path / "rows.jsonl", packed=False,
                              batch_size=3, seed=2).batch(0, range(3))["inputs"])  # fmt: skip


def test_a_held_out_batch_is_padded_with_rows_that_do_not_count(tmp_path: Path) -> None:
    write_rows(tmp_path / "held.jsonl", ROWS[:3])
    source = opened(write_rows(tmp_path / "rows.jsonl", ROWS), packed=False, held_out=tmp_path / "held.jsonl")
    assert len(source.train) == 10 and source.held_out_batches == 2
    # A completion of n words has n tokens that count, and the end token.
    assert source.held_out_batch(0, range(2))["mask"].sum(1).tolist() == [2, 3]
    assert source.held_out_batch(1, range(2))["mask"].sum(1).tolist() == [6, 0]


def test_all_kinds_of_files_give_the_same_rows(tmp_path: Path) -> None:
    want = opened(write_rows(tmp_path / "rows.jsonl", ROWS)).digest
    writer = ArrayRecordWriter(str(tmp_path / "rows.array_record"), "group_size:1")
    for row in ROWS:
        writer.write(json.dumps(row).encode())
    writer.close()
    assert opened(tmp_path / "rows.array_record").digest == want
    (tmp_path / "parts").mkdir()
    write_rows(tmp_path / "parts" / "a.jsonl", ROWS[:4])
    write_rows(tmp_path / "parts" / "b.jsonl", ROWS[4:])
    assert opened(tmp_path / "parts").digest == want
    assert opened(tmp_path / "rows.jsonl", packed=False).digest != want


def test_parquet_gives_the_same_rows(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    assert opened(tmp_path / "rows.parquet").digest == opened(write_rows(tmp_path / "rows.jsonl", ROWS)).digest


def test_a_saved_dataset_gives_the_same_rows_and_its_test_split_is_held_out(tmp_path: Path) -> None:
    datasets, pyarrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")

    def saved(rows: list[Any]) -> Any:
        return datasets.Dataset(pyarrow.Table.from_pylist(rows), fingerprint=str(len(rows)))

    want = opened(write_rows(tmp_path / "rows.jsonl", ROWS))
    saved(ROWS).save_to_disk(tmp_path / "one")
    assert opened(tmp_path / "one").digest == want.digest
    datasets.DatasetDict({"train": saved(ROWS[2:]), "test": saved(ROWS[:2])}).save_to_disk(tmp_path / "two")
    found = opened(tmp_path / "two", packed=False)
    assert (len(found.train), [len(one.tokens) for row in found.held_out for one in row]) == (8, [4, 5])


def test_pairs_stand_beside_each_other_and_differ_after_the_prompt(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}]
    other = [messages[0], {"role": "assistant", "content": "bye then"}]
    rows = [PAIR, {**PAIR, "prompt": "why "}, {"chosen": messages, "rejected": other}]
    source = opened(write_rows(tmp_path / "rows.jsonl", rows), pairs=True)
    batch = source.batch(0, range(4))
    assert {name: value.shape for name, value in batch.items()} == dict.fromkeys(batch, (4, 2, 12))
    words = tokenizer()
    for row in rows:
        chosen, rejected = RowEncoder.of(tmp_path / "model", tmp_path / "model/tokenizer.json").pair(row)
        same = next(n for n, (a, b) in enumerate(zip(chosen.tokens, rejected.tokens, strict=False)) if a != b)
        assert chosen.counts.tolist().index(True) == rejected.counts.tolist().index(True) == same
        assert words.decode(chosen.tokens[same:].tolist()) in ("because so", "so")


def test_rows_that_cannot_be_used_are_named_with_their_lines(tmp_path: Path) -> None:
    rows = [*ROWS, {"prompt": "hi"}, {"prompt": "hi", "completion": 3}, {"messages": [{"content": "hi"}]}]
    with pytest.raises(DataError) as error:
        opened(write_rows(tmp_path / "rows.jsonl", rows))
    for line in ("line 11: it has prompt; it needs messages", "line 12: its prompt and its completion",
                 "line 13: its messages must be a list"):  # fmt: skip
        assert f"rows.jsonl {line}" in str(error.value)
    file = write_rows(tmp_path / "rows.jsonl", ROWS)
    file.write_text(file.read_text() + "{broken\n")
    with pytest.raises(DataError, match=r"rows\.jsonl has lines that are not rows:\n\s*line 11"):
        opened(file)
    with pytest.raises(DataError, match=r"rows\.jsonl line 1: it has no chosen and no rejected"):
        opened(write_rows(file, ROWS), pairs=True)


def test_cut_rows_and_rows_that_teach_nothing_are_reported(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "hi " * 20, "completion": "so"}])
    with pytest.warns(AutoshardWarning, match="1 of 10 rows are longer than the context of 12.*1 of 10 rows have no"):
        source = opened(file)
    assert all(one.counts[1:].any() for row in source.train for one in row)


def test_lines_that_are_no_rows_are_named_together(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "hi"}\n[1]\n\xff\xfe\n')
    with pytest.raises(DataError, match=r"line 2: it is list; a row must be a table\n  line 3: 'utf-8' codec"):
        opened(tmp_path / "rows.jsonl")


def test_rows_that_are_all_equal_need_held_out_ones(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"all 3 rows of data .* are equal.*--rows\.held-out"):
        opened(write_rows(tmp_path / "rows.jsonl", ROWS[:1] * 3))
