"""Text data: the held-out split, the batches, and the inputs that are refused."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from autoshard.errors import DataError
from autoshard.train.data.text_data import TokenSource, is_held_out, read_split, text_source
from autoshard.train.data.tokenizer import ByteCodec, load_codec


def source(train: int = 500, held_out: int = 101, context: int = 8, rows: int = 4, seed: int = 3) -> TokenSource:
    return TokenSource(
        np.arange(train) % 251,
        np.arange(held_out) % 251,
        256,
        context,
        batch_size=rows,
        eval_batch_size=rows,
        seed=seed,
    )


@given(step=st.integers(0, 10**9), split=st.integers(0, 4))
def test_a_batch_is_a_function_of_the_step_and_can_be_made_in_parts(step: int, split: int) -> None:
    whole = source().batch(step, range(4))
    parts = [source().batch(step, range(split)), source().batch(step, range(split, 4))]
    for name, value in whole.items():
        np.testing.assert_array_equal(value, np.concatenate([part[name] for part in parts]))


def test_targets_follow_inputs() -> None:
    batch = source().batch(5, range(4))
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    assert batch["inputs"].shape == batch["mask"].shape == (4, 8)
    assert (batch["mask"] == 1).all()


def test_steps_and_seeds_give_other_batches() -> None:
    first = source().batch(0, range(4))["inputs"]
    assert not np.array_equal(first, source().batch(1, range(4))["inputs"])
    assert not np.array_equal(first, source(seed=4).batch(0, range(4))["inputs"])


def test_batches_are_stable_across_versions() -> None:
    """A run resumed by a later version must get the same batches."""
    assert source().batch(7, range(4))["inputs"][:, 0].tolist() == [174, 177, 154, 246]


@given(held_out=st.integers(2, 150), context=st.integers(1, 20), rows=st.integers(1, 5))
def test_each_held_out_token_but_the_first_is_a_target_once(held_out: int, context: int, rows: int) -> None:
    made = source(held_out=held_out, context=context, rows=rows)
    targets = []
    for index in range(made.held_out_batches):
        batch = made.held_out_batch(index, range(rows))
        assert batch["inputs"].shape == (rows, context)
        targets += batch["targets"][batch["mask"] == 1].tolist()
    assert targets == made.held_out[1:].tolist()


def test_a_file_keeps_its_last_tenth_for_validation(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("".join(chr(97 + i % 26) for i in range(1000)))
    train, held_out = read_split(path)
    assert (len(train), len(held_out)) == (900, 100)
    assert train + held_out == path.read_text()


def test_a_folder_is_split_by_the_names_of_its_files(tmp_path: Path) -> None:
    names = [f"sub{i % 3}/file{i}.txt" for i in range(60)]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"<{name}>")
    (tmp_path / "image.bin").write_bytes(b"\x00\x01")
    (tmp_path / "latin.txt").write_bytes(b"\xe9t\xe9")
    (tmp_path / ".hidden").write_text("secret")
    train, held_out = read_split(tmp_path)
    expected = [name for name in sorted(names) if is_held_out(name)]
    assert 0 < len(expected) < 12
    assert held_out == "\n".join(f"<{name}>" for name in expected)
    assert sorted(train.split("\n")) == sorted(f"<{name}>" for name in names if name not in expected)


def test_a_small_folder_has_one_held_out_file(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text(name * 10)
    train, held_out = read_split(tmp_path)
    assert len(held_out) == 10 and len(train) == 21


def test_the_standard_library_is_real_text() -> None:
    train, held_out = read_split(None)
    assert "def " in held_out and len(train) > 10 * len(held_out) > 1_000_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"a\0b", "not UTF-8"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_invalid_files_raise(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "data"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as raised:
        read_split(path)
    assert str(path) in str(raised.value)


def test_invalid_folders_raise(tmp_path: Path) -> None:
    (tmp_path / "only.bin").write_bytes(b"\0")
    with pytest.raises(DataError, match="no UTF-8 text file"):
        read_split(tmp_path)


def test_a_text_shorter_than_the_context_raises(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 40)
    with pytest.raises(DataError, match="36 tokens, but context 64 needs at least 65"):
        text_source(tmp_path / "a.txt", context=64, batch_size=1, eval_batch_size=1, seed=0)


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    assert ByteCodec().decode(ByteCodec().encode(text)) == text


def test_a_tokenizer_file(tmp_path: Path, text_file: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train([str(text_file)], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    made = text_source(
        text_file, context=8, batch_size=2, eval_batch_size=2, seed=0, tokenizer=tmp_path / "tokenizer.json"
    )
    codec = load_codec(tmp_path / "tokenizer.json")
    assert made.vocab_size == codec.vocab_size == tokenizer.get_vocab_size()
    assert made.bytes_per_token is not None and made.bytes_per_token > 1.5
    text = "the cat\n" * 20_000  # long enough to be split into several pieces
    assert codec.encode(text).tolist() == tokenizer.encode(text).ids


@pytest.mark.parametrize("content", [None, "{}"])
def test_invalid_tokenizers_raise(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "t.json").write_text(content)
    with pytest.raises(DataError, match="t.json"):
        load_codec(tmp_path / "t.json")
