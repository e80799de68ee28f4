"""Batches of instruction data: packed documents, or pairs of answers.

The rows of a batch are places in an endless sequence, which Grain shuffles anew in each pass. So a batch is a pure
function of (seed, step), as that of text is: it does not depend on the number of processes, and a run resumes with it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grain
import numpy as np

from autoshard._columns import listing
from autoshard._shown import shown
from autoshard.errors import AutoshardWarning, DataError
from autoshard.train.data.rows.constants import HELD_OUT_ONE_IN
from autoshard.train.data.rows.encoding import Document, RowEncoder
from autoshard.train.data.rows.packing import Row, pack, row_of
from autoshard.train.data.rows.records import TRAIN, Record, has_held_out_split, read_records
from autoshard.train.data.text_data import Batch

Rows = Sequence[tuple[Document, ...]]


@shown
@dataclass(frozen=True)
class RowSource:
    """Rows of instruction data; it is a `text_data.Source`.

    Attributes:
        train: the documents of each training row.
        held_out: those of each held-out row.
        make: makes the arrays of a row from its documents.
        vocab_size: number of token ids.
        batch_size: rows of a training batch.
        eval_batch_size: rows of an evaluation batch.
        seed: seed of the order.
    """

    train: Rows
    held_out: Rows
    make: Callable[[Sequence[Document]], Row]
    vocab_size: int
    batch_size: int
    eval_batch_size: int
    seed: int
    bytes_per_token: float | None = None

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of all tokens, of those that count, and of how they are packed."""
        digest = hashlib.sha256()
        for row in itertools.chain(self.train, [()], self.held_out):
            digest.update(f"{[len(one.tokens) for one in row]}".encode())
            for one in row:
                digest.update(one.tokens.tobytes() + one.counts.tobytes())
        return digest.hexdigest()

    @functools.cached_property
    def _order(self) -> Any:
        return grain.MapDataset.range(len(self.train)).shuffle(seed=self.seed).repeat()

    @property
    def held_out_batches(self) -> int:
        """Number of batches that cover the held-out rows once."""
        return math.ceil(len(self.held_out) / self.eval_batch_size)

    def batch(self, step: int, rows: range) -> Batch:
        """Return rows of a step's training batch."""
        return self._stacked([self.train[self._order[step * self.batch_size + n]] for n in rows])

    def held_out_batch(self, index: int, rows: range) -> Batch:
        """Return rows of a held-out batch; rows beyond the end of the set have mask 0."""
        places = [index * self.eval_batch_size + n for n in rows]
        return self._stacked([self.held_out[n] if n < len(self.held_out) else () for n in places])

    def _stacked(self, rows: Rows) -> Batch:
        made = [self.make(row) for row in rows]
        return {name: np.stack([row[name] for row in made]) for name in self.make(())}


def row_source(
    path: str | Path,
    encoder: RowEncoder,
    *,
    pairs: bool,
    packed: bool,
    held_out: str | Path | None,
    context: int,
    **options: Any,
) -> RowSource:
    """Read, encode and pack the rows of files.

    Args:
        path: a file of rows, or a folder of them.
        encoder: encodes them.
        pairs: whether rows are pairs of answers.
        packed: whether several documents share a row. Pairs never do.
        held_out: rows for evaluation; by default a split of the folder for it, or about one row in 20.
        context: positions of a row.
        **options: further fields of `RowSource`.

    Raises:
        DataError: a file cannot be read, or rows are invalid; the message names the file and the lines.
    """

    def encode(row: Any) -> list[tuple[Document, ...]]:
        return [encoder.pair(row)] if pairs else [(one,) for one in encoder.documents(row)]

    split = has_held_out_split(path) if held_out is None else None
    train = [*_encoded(read_records(path), encode)]
    if held_out is not None or split is not None:
        others = [*_encoded(read_records(path if held_out is None else held_out, split or TRAIN), encode)]
    else:
        train, others = _split(str(path), train)
    make = functools.partial(pair_row if pairs else row_of, context=context)
    parts = [_fitted(where, [one for _, found in part for one in found], context)
             for where, part in ((str(path), train), (str(held_out or path), others))]  # fmt: skip
    if packed and not pairs:
        parts = [_packed(part, context) for part in parts]
    return RowSource(parts[0], parts[1], make, encoder.tokenizer.get_vocab_size(), **options)


def pair_row(pair: Sequence[Document], context: int) -> Row:
    """Make a row of a pair: `inputs`, `targets` and `mask`, each `[2, context]`, the chosen answer first."""
    both = [row_of([one], context) for one in pair] or [row_of([], context)] * 2
    return {name: np.stack([row[name] for row in both]) for name in ("inputs", "targets", "mask")}


def _encoded(
    records: Iterator[Record], encode: Callable[[Any], list[tuple[Document, ...]]]
) -> Iterator[tuple[int, list[tuple[Document, ...]]]]:
    """Yield a hash of each row's content, and what it is encoded as.

    Raises:
        DataError: rows are invalid; the message names the first ones.
    """
    problems: list[str] = []
    for record in records:
        try:
            found = encode(record.value)
        except ValueError as error:
            problems.append(f"{record.where}: {error}")
            continue
        content = json.dumps(record.value, sort_keys=True, default=str).encode()
        yield int.from_bytes(hashlib.sha256(content).digest()[:8], "big"), found
    if problems:
        raise DataError(f"{len(problems)} rows cannot be used:\n{listing(problems)}")


def _split(where: str, rows: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the training rows and the held-out ones. Whether a row is held out depends on its content alone."""
    if len(rows) < 2:
        raise DataError(f"data {where!r} has {len(rows)} rows, and one is held out: give more, or --rows.held-out")
    held_out = [one for one in rows if one[0] % HELD_OUT_ONE_IN == 0]
    if len(held_out) in (0, len(rows)):
        held_out = [min(rows, key=lambda one: one[0])]
    hashes = {one[0] for one in held_out}
    if not (train := [one for one in rows if one[0] not in hashes]):
        raise DataError(f"all {len(rows)} rows of data {where!r} are equal, and one is held out: give --rows.held-out")
    return train, held_out


def _fitted(where: str, rows: Rows, context: int) -> Rows:
    """Cut documents that are longer than a row, and leave out those without a token that counts. Warns about both.

    Raises:
        DataError: no row is left.
    """
    longer = sum(any(len(one.tokens) > context + 1 for one in row) for row in rows)
    cut = [tuple(Document(one.tokens[: context + 1], one.counts[: context + 1]) for one in row) for row in rows]
    kept = [row for row in cut if all(one.counts[1:].any() for one in row)]
    notes = []
    if longer:
        notes.append(f"{longer} of {len(rows)} rows are longer than the context of {context}, so their ends are cut")
    if len(kept) < len(rows):
        notes.append(f"{len(rows) - len(kept)} of {len(rows)} rows have no token that counts, so they are left out")
    if not kept:
        raise DataError(f"data {where!r} has no row with a token that counts" + "".join(f"; {note}" for note in notes))
    if notes:
        warnings.warn(f"data {where!r}: {'; '.join(notes)}", AutoshardWarning, stacklevel=2)
    return kept


def _packed(rows: Rows, context: int) -> Rows:
    documents = [one for row in rows for one in row]
    return [tuple(documents[n] for n in each) for each in pack([len(one.tokens) - 1 for one in documents], context)]
