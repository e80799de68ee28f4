"""Ranges of tensors in a file equal those of the array that was written."""

import numpy as np
import pytest

from autoshard.ckpt.exchange.file_tensors import FileTensor

RANGES = [
    (), (slice(None),) * 3, (slice(1, 3), slice(None), slice(None)), (slice(2, 3), slice(1, 4), slice(None)),
    (slice(3, 4), slice(2, 3), slice(1, 5)), (slice(0, 2), slice(1, 3), slice(2, 6)),
    (slice(0, 4), slice(2, 3), slice(0, 6)), (slice(2, 2), slice(None), slice(1, 2)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "bool", "int64"])
def test_ranges(tmp_path, dtype):
    values = np.random.default_rng(0).integers(0, 100, (4, 5, 6)).astype(dtype)
    (tmp_path / "file").write_bytes(b"header" + values.tobytes() + b"behind")
    tensor = FileTensor(tmp_path / "file", 6, values.shape, dtype)
    for index in RANGES:
        found = tensor.read(index)
        assert found.dtype == values.dtype and found.shape == values[index].shape
        assert found.tobytes() == values[index].tobytes(), index
        assert type(found) is np.ndarray
        into = np.empty(found.shape, dtype)
        assert tensor.read(index, lambda *_, into=into: into) is into and into.tobytes() == found.tobytes()


def test_a_scalar_and_a_file_that_is_too_short(tmp_path):
    (tmp_path / "file").write_bytes(np.float32(2.5).tobytes())
    assert FileTensor(tmp_path / "file", 0, (), "float32").read().tolist() == 2.5
    with pytest.raises(ValueError, match="ends 8 bytes too early"):
        FileTensor(tmp_path / "file", 0, (3,), "float32").read()
    with pytest.raises(ValueError):
        FileTensor(tmp_path / "file", 0, (3, 2), "float32").read((slice(0, 2), slice(0, 1)))
