"""Leaves that are str or bytes, such as the state of a data iterator."""

import json
from pathlib import Path
from typing import Any

import grain.python as grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.ckpt import Checkpointer, MismatchError
from autoshard.ckpt.restore import checkpoint_diff
from autoshard.cli import main

TEXTS = {
    "bytes": b"\x00\xff{}",
    "str": "f\xfcnf \N{SNOWMAN} \ud800\0",
    "no bytes": b"",
    "no str": "",
    "long": "x" * 100_000,
}


@pytest.mark.parametrize("count", [0, 70])
def test_texts_are_restored_unchanged(tmp_path: Path, count: int) -> None:
    """Texts are saved alone or beside packed texts of equal length. The template may have texts of other lengths."""
    state = {"w": jnp.ones(4), **TEXTS, "many": [f"text {n:03}" for n in range(count)]}
    blank = jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else type(leaf)(), state)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, block=True)
        assert checkpoints.verify() == []
        for like in (state, blank):
            restored = checkpoints.restore(like=like)
            assert {**restored, "w": 0} == {**state, "w": 0}
        restored = checkpoints.restore(shardings=jax.devices()[1])
        assert {name: restored[name] for name in TEXTS} == TEXTS and restored["w"].devices() == {jax.devices()[1]}
        leaves = {leaf.name: leaf for leaf in checkpoints.describe().leaves}
        assert leaves["bytes"].dtype == "bytes" and leaves["bytes"].shape == (4,) and leaves["long"].nbytes == 100_000
        checkpoints.save(2, state | {"str": "other"}, block=True)
        differences = checkpoint_diff.compare(checkpoints.describe(1), checkpoints.describe(2))
        assert differences.kinds and differences.kinds[0].startswith("str: str[")
        with pytest.raises(MismatchError, match=r"bytes: saved bytes\[4\], wanted str\[0\]"):
            checkpoints.restore(1, like=state | {"bytes": ""})
        with pytest.raises(MismatchError, match=r"bytes: saved bytes\[4\], wanted uint8\[4\]"):
            checkpoints.restore(1, like=state | {"bytes": np.zeros(4, np.uint8)}, allow_cast=True)


def test_a_damaged_text_is_detected(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"text": "abc" * 10_000, "w": jnp.ones(2)}, block=True)
        for file in (tmp_path / "step_00000001" / "state").rglob("*"):
            if file.is_file() and file.parent.name == "d":
                file.write_bytes(file.read_bytes().replace(b"abcabcabcabc", b"abcabcabcabd", 1))
        assert checkpoints.verify() == ["text"]


def test_only_steps_with_texts_have_the_newer_format(tmp_path: Path) -> None:
    """Older versions can read steps without texts."""
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)})
        checkpoints.save(2, {"w": jnp.ones(2), "text": "x"}, block=True)
    for step, number in ((1, 3), (2, 4)):
        written = json.loads((tmp_path / f"step_0000000{step}" / "_CHECKPOINT_METADATA").read_text())
        assert written["custom_metadata"]["autoshard"]["format"] == number


def test_an_export_omits_texts(tmp_path: Path) -> None:
    for name, state in (
        ("whole", {"w": jnp.ones(2), "data": "x"}),
        ("train", {"params": {"w": jnp.ones(2), "n": b"x"}}),
    ):
        with Checkpointer(tmp_path / name) as checkpoints:
            checkpoints.save(1, state)
        assert main(["ckpt", "export", str(tmp_path / name), str(tmp_path / "out" / name)]) == 0
        assert Checkpointer(tmp_path / name).model(1).tensors[0].name == "w"
        assert len(Checkpointer(tmp_path / name).model(1).tensors) == 1


def loader() -> Any:
    source: Any = grain.RangeDataSource(0, 64, 1)
    sampler = grain.IndexSampler(64, grain.NoSharding(), shuffle=True, num_epochs=4, seed=3)
    return iter(grain.DataLoader(data_source=source, sampler=sampler, operations=[grain.Batch(4)]))


def dataset() -> Any:
    return iter(grain.MapDataset.range(64).shuffle(seed=3).repeat(4).batch(4).to_iter_dataset())


@pytest.mark.parametrize("make", [loader, dataset])
def test_a_run_resumes_its_grain_iterator(tmp_path: Path, mesh8: Any, make: Any) -> None:
    """The state of a `DataLoader` is bytes, that of a dataset a dict of numbers."""
    iterator, params = make(), {"w": jax.device_put(jnp.ones(8), NamedSharding(mesh8, PartitionSpec("data")))}
    for _ in range(21):
        next(iterator)
    state = {"params": params, "data": iterator.get_state()}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(21, state)
        expected = [next(iterator) for _ in range(5)]
        fresh = make()
        restored = checkpoints.restore(like={"params": params, "data": fresh.get_state()})
    assert restored["data"] == state["data"]
    fresh.set_state(restored["data"])
    np.testing.assert_array_equal([next(fresh) for _ in range(5)], expected)
