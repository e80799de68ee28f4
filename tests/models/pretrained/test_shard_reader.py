"""Shards are read in pieces by several threads: values, memory, and pieces that cannot be read."""

import dataclasses
import threading

import numpy as np
import pytest

from autoshard.ckpt.exchange.file_tensors import FileTensor
from autoshard.ckpt.exchange.safetensors import Tensor
from autoshard.errors import AutoshardError
from autoshard.models.pretrained import shard_reader
from autoshard.models.pretrained.folder import Folder
from autoshard.models.pretrained.host_memory import Reused
from autoshard.models.pretrained.layouts import Layout
from autoshard.models.pretrained.shard_reader import Shard, ShardReader, pieces_of
from autoshard.models.pretrained.tables import Source

LAYERS = 3


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(shard_reader, "PIECE_BYTES", 64)


def stored(tmp_path, layout, shape):
    """Return the source of stacked layers of this shape, their tensors in a file, and the values of the tensors."""
    tensor_shape = layout.tensor_shape(shape)
    values = np.arange(LAYERS * np.prod(tensor_shape)).reshape(LAYERS, *tensor_shape).astype("float32")
    (tmp_path / "file").write_bytes(values.tobytes())
    found = {}
    for n in range(LAYERS):
        one = FileTensor(tmp_path / "file", n * values[0].nbytes, tensor_shape, "float32")
        found[f"layer {n}"] = Tensor(f"layer {n}", tensor_shape, "float32", one.read, one.read)
    return Source((LAYERS, *shape), {(n,): f"layer {n}" for n in range(LAYERS)}, 1, layout), found, values


def test_values_of_whole_and_partial_shards(tmp_path):
    source, tensors, values = stored(tmp_path, Layout("(h part d) e -> e h d", 1, 2), (6, 4, 5))
    whole = values.reshape(LAYERS, 4, 2, 5, 6)[:, :, 1].transpose(0, 3, 1, 2)
    with ShardReader(Folder(tmp_path, {}), tensors) as reader:
        for ranges in [
            ((0, 3), (0, 6), (0, 4), (0, 5)),
            ((1, 3), (2, 5), (1, 3), (0, 5)),
            ((2, 3), (0, 1), (0, 1), (4, 5)),
        ]:
            for dtype in ("float32", "bfloat16"):
                shard = Shard(source, ranges, dtype)
                wanted = whole[tuple(slice(*one) for one in ranges)].astype(dtype)
                assert np.array_equal(reader.read(shard), wanted), (ranges, dtype)
                assert max(piece.nbytes for piece in pieces_of(shard, tensors)) <= 64
                assert sum(piece.nbytes for piece in pieces_of(shard, tensors)) == wanted.nbytes


def test_one_number_a_layer(tmp_path):
    source, tensors, values = stored(tmp_path, Layout("1 ->"), ())
    with ShardReader(Folder(tmp_path, {}), tensors) as reader:
        assert np.array_equal(reader.read(Shard(source, ((0, 3),), "float32")), values[:, 0])


def test_values_in_order_are_read_to_their_place(tmp_path):
    """No other memory is used. A cast needs some."""

    class NoMemory(Reused):
        def empty(self, shape, dtype):
            raise AssertionError("other memory is used")

    source, tensors, values = stored(tmp_path, Layout("v e -> v e"), (9, 8))
    shard = Shard(source, ((0, 3), (0, 9), (0, 8)), "float32")
    read = np.zeros(shard.shape, "float32")
    for piece in pieces_of(shard, tensors):
        piece.read_into(read, NoMemory())
    assert np.array_equal(read, values)
    cast = next(pieces_of(Shard(source, shard.ranges, "bfloat16"), tensors))
    with pytest.raises(AssertionError, match="other memory"):
        cast.read_into(np.zeros(shard.shape, "bfloat16"), NoMemory())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_that_float16_does_not_hold_are_refused(tmp_path, dtype):
    source, tensors, _ = stored(tmp_path, Layout("f e -> e f"), (16, 40))
    large = np.full((40, 16), np.inf, dtype)
    tensors |= {"layer 2": Tensor("layer 2", (40, 16), dtype, lambda: large)}
    shard = Shard(source, ((0, 3), (0, 16), (0, 40)), "float16")
    with ShardReader(Folder(tmp_path, {}), tensors) as reader:
        assert np.isinf(reader.read(shard)[2]).all()
        large[30, 2] = 1e6
        with pytest.raises(AutoshardError, match="layer 2 has values of up to .*, but the largest float16 is 65504"):
            reader.read(shard)


def test_a_piece_that_cannot_be_read_stops_all_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_reader.os, "cpu_count", lambda: 2)
    source, tensors, _ = stored(tmp_path, Layout("f e -> e f"), (16, 4000))
    shard = Shard(source, ((0, 3), (0, 16), (0, 4000)), "float32")
    reads, stored_part = [], tensors["layer 0"].part

    def part(*arguments):
        reads.append(1)
        if threading.current_thread().name.endswith("_1"):  # the result of the other thread is waited for first
            raise OSError("the disk is gone")
        return stored_part(*arguments)

    tensors |= {"layer 0": dataclasses.replace(tensors["layer 0"], part=part)}
    with (
        ShardReader(Folder(tmp_path, {}), tensors) as reader,
        pytest.raises(AutoshardError, match="layer 0 in .* gone"),
    ):
        reader.read(shard)
    assert len(reads) < len(list(pieces_of(shard, tensors))) / LAYERS
