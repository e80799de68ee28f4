"""Many small leaves in few arrays are saved, restored and checked like other leaves."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from autoshard.ckpt import Checkpointer, DamagedCheckpointError, MismatchError
from autoshard.ckpt.restore.checkpoint_diff import compare
from autoshard.ckpt.restore.restore import read_manifest
from autoshard.ckpt.state import array_packing
from autoshard.ckpt.state.named_leaves import PACKS
from autoshard.ckpt.store import manifest

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:Sharding info not")

LAYERS = 10


@pytest.fixture
def many(make_state: Any) -> Callable[..., dict[str, Any]]:
    """Make a state with every type of leaf ten times, and some unusual leaves."""

    def make(mesh: Mesh, seed: int = 0) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        nibbles = rng.integers(-8, 8, (LAYERS, 6)).astype(ml_dtypes.int4)
        return {
            "layers": [make_state(mesh, seed + layer) for layer in range(LAYERS)],
            "nibbles": [jnp.asarray(nibble) for nibble in nibbles],
            "scalars": [jnp.float32(value) for value in rng.normal(size=LAYERS)],
            "alone": jnp.arange(7),
            "large": jax.device_put(rng.normal(size=(512, 513)).astype(np.float32), NamedSharding(mesh, jax.P("data"))),
        }

    return make


def vectors(mesh: Mesh, count: int = 80, size: int = 16) -> dict[str, jax.Array]:
    """Return leaves of one kind, together too large for Orbax's index."""
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    rng = np.random.default_rng(count)
    leaves = {f"v{i:03}": rng.normal(size=(size, 8)).astype(np.float32) for i in range(count)}
    return jax.device_put(leaves, sharding)


def unpacked(monkeypatch: pytest.MonkeyPatch, directory: Path, state: Any) -> Checkpointer:
    """Write a step without packs, in the older format."""
    with monkeypatch.context() as patch:
        patch.setattr(array_packing, "MAX_UNPACKED_LEAVES", 10**9)
        patch.setattr(manifest, "WITHOUT_TEXTS", 2)
        with Checkpointer(directory) as checkpoints:
            checkpoints.save(0, state)
    text = (directory / "step_00000000" / "_CHECKPOINT_METADATA").read_text()
    assert json.loads(text)["custom_metadata"]["autoshard"]["format"] == 2 and "pack" not in text
    return checkpoints


@pytest.mark.few(1)
@pytest.mark.parametrize("block", [False, True])
def test_every_kind_of_leaf(tmp_path: Path, mesh8: Mesh, many: Any, assert_same: Any, block: bool) -> None:
    state = many(mesh8)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state, block=block)
        restored = checkpoints.restore(like=state)
        assert checkpoints.verify() == []
    assert_same(restored, state)
    for actual, want in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert not isinstance(want, jax.Array) or actual.sharding.is_equivalent_to(want.sharding, want.ndim)
    written = read_manifest(checkpoints.directory / "step_00000000", 0)
    stored = {spec.key for spec in written.leaves if spec.stored}
    narrow = {("nibbles", str(layer)) for layer in range(LAYERS)}  # less than a byte each
    assert stored - written.places.keys() == {("alone",), ("large",)} | narrow
    kinds = {(spec.shape, spec.dtype, written.layouts.get(spec.key)) for spec in written.leaves if spec.stored}
    assert len(written.packs) <= len(kinds)


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", [(4, 1), (1, 8), (1, 1)], ids=str)
def test_restore_on_another_mesh(
    tmp_path: Path, mesh8: Mesh, mesh_of: Any, many: Any, abstract: Any, assert_same: Any, shape: tuple[int, int]
) -> None:
    state = many(mesh8)
    template = abstract(many(mesh_of(data=shape[0], model=shape[1])))
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        restored = checkpoints.restore(like=template)
    assert_same(restored, state)
    for actual, want in zip(jax.tree.leaves(restored), jax.tree.leaves(template), strict=True):
        assert not isinstance(actual, jax.Array) or actual.sharding == want.sharding


def test_leaves_of_one_pack_on_several_shardings(tmp_path: Path, mesh8: Mesh, mesh_of: Any) -> None:
    """Some of the leaves are restored as NumPy arrays."""
    state = vectors(mesh8)
    shardings = [NamedSharding(mesh8, jax.P(None, "model")), NamedSharding(mesh_of(x=4), jax.P("x")), None]
    template = {
        name: np.zeros((16, 8), np.float32)
        if shardings[number % 3] is None
        else jax.ShapeDtypeStruct((16, 8), np.float32, sharding=shardings[number % 3])
        for number, name in enumerate(state)
    }
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        restored = checkpoints.restore(like=template)
    for name, leaf in restored.items():
        np.testing.assert_array_equal(leaf, state[name])
        assert getattr(leaf, "sharding", None) == getattr(template[name], "sharding", None)
        assert isinstance(leaf, jax.Array) or leaf.base is None, "a view would keep the pack"


def test_more_leaves_than_fit_in_one_pack(tmp_path: Path, mesh8: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    state = vectors(mesh8, 101)
    monkeypatch.setattr(array_packing, "MAX_PACK_LEAVES", 25)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        restored = checkpoints.restore(like=state)
        sizes = [len(pack) for pack in read_manifest(checkpoints.directory / "step_00000000", 0).packs.values()]
    assert sizes == [21, 21, 21, 21, 17]
    for name, leaf in state.items():
        np.testing.assert_array_equal(restored[name], leaf)


def test_few_leaves_are_not_packed(tmp_path: Path, mesh8: Mesh) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, vectors(mesh8, array_packing.MAX_UNPACKED_LEAVES))
        checkpoints.wait()
        assert not read_manifest(checkpoints.directory / "step_00000000", 0).places


@pytest.mark.slow
def test_a_leaf_with_the_path_of_packs(tmp_path: Path, mesh8: Mesh, assert_same: Any) -> None:
    state = {PACKS: {"0": jnp.ones(3)}, "v": vectors(mesh8)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        assert_same(checkpoints.restore(like=state), state)


def test_a_partial_restore_with_rename_and_cast(tmp_path: Path, mesh8: Mesh, abstract: Any) -> None:
    state = {"a": vectors(mesh8), "b": vectors(mesh8, 70)}
    template = abstract({"c": {"v003": state["a"]["v003"].astype(jnp.bfloat16)}, "b": {"v001": state["b"]["v001"]}})
    added = {"new": jnp.full(3, 7.0)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        with pytest.raises(MismatchError, match="150 of 151 leaves differ"):
            checkpoints.restore(like={**template, **added}, rename={"a": "c"})
        restored = checkpoints.restore(like={**template, **added}, rename={"a": "c"}, partial=True, allow_cast=True)
        assert checkpoints.restored is not None and len(checkpoints.restored.unread) == 148
    np.testing.assert_array_equal(restored["c"]["v003"], state["a"]["v003"].astype(jnp.bfloat16))
    np.testing.assert_array_equal(restored["b"]["v001"], state["b"]["v001"])
    np.testing.assert_array_equal(restored["new"], added["new"])


def test_experts_of_packed_leaves(tmp_path: Path, mesh8: Mesh) -> None:
    state = {f"layer{i:02}": {"w": leaf} for i, leaf in enumerate(vectors(mesh8).values())}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state, expert_dims={"*/w": 0})
        restored = checkpoints.restore(experts=[3, 0, 3])
    for name, layer in state.items():
        np.testing.assert_array_equal(restored[name]["w"], np.asarray(layer["w"])[[3, 0, 3]])


def test_packed_leaves_may_be_donated_at_once(tmp_path: Path, mesh8: Mesh) -> None:
    advance = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    state = vectors(mesh8)
    expected = jax.tree.map(np.array, state)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state)
        for _ in range(5):
            donated, state = state, advance(state)
            assert all(leaf.is_deleted() for leaf in donated.values())
        restored = checkpoints.restore(like=state)
    for name, leaf in expected.items():
        np.testing.assert_array_equal(restored[name], leaf)


@pytest.mark.slow
@pytest.mark.whole
def test_an_unpacked_step_of_the_older_format(
    tmp_path: Path, mesh8: Mesh, many: Any, assert_same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step can be restored, and its digests equal those of the packed state."""
    state = many(mesh8)
    old = unpacked(monkeypatch, tmp_path / "old", state)
    assert_same(old.restore(like=state), state)
    with Checkpointer(tmp_path / "new") as new:
        new.save(0, state)
        new.wait()
        assert compare(old.describe(), new.describe()).equal
        new.save(1, many(mesh8, 1))
        new.wait()
        difference = compare(new.describe(0), new.describe(1))
    assert len(difference.values) > 100 and difference.kinds == () and "layers/3/params/w" in difference.values


def test_export_and_copy_of_packed_leaves(tmp_path: Path, mesh8: Mesh, assert_same: Any) -> None:
    state = {"params": vectors(mesh8), "step": jnp.int32(1)}
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(0, state, block=True)
        checkpoints.export(0, tmp_path / "out")
        checkpoints.copy(0, tmp_path / "kept")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() == state["params"].keys()
    for name, leaf in tensors.items():
        np.testing.assert_array_equal(leaf, state["params"][name])
    assert_same(Checkpointer(tmp_path / "kept").restore(like=state), state)


def test_plain_orbax_reads_the_packs(tmp_path: Path, mesh8: Mesh) -> None:
    from orbax.checkpoint import v1 as ocp

    state = vectors(mesh8)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state, block=True)
    step = tmp_path / "step_00000000"
    leaves = json.loads((step / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]["autoshard"]["leaves"]
    loaded = ocp.load_checkpointables(str(step))["state"]["%packs"]
    for leaf in leaves:
        name, index = leaf["pack"]
        np.testing.assert_array_equal(loaded[name][index], state[leaf["key"][0]])


def test_damage_in_a_pack_names_its_leaves(tmp_path: Path, mesh8: Mesh) -> None:
    state = vectors(mesh8, size=64)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state, block=True)
        files = [file for file in (tmp_path / "step_00000000" / "state").rglob("d/*") if file.is_file()]
        file = max(files, key=lambda file: file.stat().st_size)
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 4]) + whole[len(whole) // 2 + 1 :])
        with pytest.raises(DamagedCheckpointError, match="values differ from the saved ones in 1 leaves") as caught:
            checkpoints.restore(0, state)
        assert len(caught.value.leaves) == 1 and caught.value.leaves[0] in state
        assert checkpoints.verify(0) == list(caught.value.leaves)
        with pytest.raises(DamagedCheckpointError, match=caught.value.leaves[0]):
            checkpoints.restore(0, jax.tree.map(np.asarray, state))
        with pytest.raises(DamagedCheckpointError, match=caught.value.leaves[0]):
            checkpoints.export(0, tmp_path / "out")
        undamaged = {name: leaf for name, leaf in state.items() if name not in caught.value.leaves}
        checkpoints.restore(0, undamaged, partial=True)
        file.unlink()
        with pytest.raises(DamagedCheckpointError, match=r"%packs\.0/(?s:.*)in 80 leaves") as caught:
            checkpoints.restore(0, state)
        assert checkpoints.verify(0) == sorted(state) == sorted(caught.value.leaves)


@pytest.mark.slow
def test_the_number_of_programs_does_not_grow_with_the_leaves(
    tmp_path: Path, mesh8: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    def compiled(count: int) -> list[str]:
        jax.clear_caches()
        state = vectors(mesh8, count, 24)
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING), Checkpointer(tmp_path / str(count)) as checkpoints:
            checkpoints.save(0, state, block=True)
            checkpoints.restore(like=state)
        return [one.getMessage() for one in caplog.records if "Finished XLA compilation" in one.getMessage()]

    few, many = compiled(100), compiled(800)
    assert 0 < len(few) == len(many), (few, many)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "float8_e3m4", "float8_e8m0fnu", "float32", "complex64"],
)
@pytest.mark.parametrize("kind", ["mesh", "device", "numpy"])
def test_every_bit_of_packed_floats(tmp_path: Path, mesh8: Mesh, assert_same: Any, dtype: str, kind: str) -> None:
    """Every bit pattern of 8-bit floats is tested; of wider floats, random patterns and signalling NaNs."""
    size = np.dtype(dtype).itemsize
    words = np.random.default_rng(0).integers(0, 256, (80, 32, 8 * size), np.uint8)
    if size == 1:
        words[:] = np.arange(256).reshape(32, 8)
    else:
        for first, high in (40, 0x7F81), (50, 0x7C01), (60, 0xFFF5), (70, 0xFC07):
            words[first:, :, size - 2 :: size], words[first:, :, size - 1 :: size] = high & 255, high >> 8
    leaves = list(words.view(dtype))
    state = {
        "mesh": lambda: [jax.device_put(leaf, NamedSharding(mesh8, PartitionSpec("data"))) for leaf in leaves],
        "device": lambda: jax.device_put(leaves),
        "numpy": lambda: leaves,
    }[kind]()
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state, block=True)
        restored = checkpoints.restore(like=state)
        assert checkpoints.verify() == []
    assert len(read_manifest(tmp_path / "step_00000000", 0).places) == 80
    assert_same(restored, state)


def test_every_bit_of_wide_floats(mesh8: Mesh) -> None:
    words = np.array([0x7FF0000000000001, 0xFFF8000000000123, 0xFFF4000000000000, 1 << 63], np.uint64)
    sharding = NamedSharding(mesh8, PartitionSpec("data"))
    with jax.enable_x64(True):
        leaves = [jax.device_put(np.roll(words, i).view(np.float64), sharding) for i in range(20)]
        pack = array_packing.stack_leaves(leaves)
        template = {i: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for i, leaf in enumerate(leaves)}
        unpacked_leaves = array_packing.unpack_leaves(pack, template)
    assert pack.shape == (20, 4) and pack.sharding == array_packing.pack_sharding(sharding)
    for i in range(20):
        np.testing.assert_array_equal(np.asarray(unpacked_leaves[i]).view(np.uint64), np.roll(words, i))


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", ["int4", *(pytest.param(each, marks=pytest.mark.slow) for each in ("int2", "float4_e2m1fn"))]
)
def test_types_of_less_than_a_byte_are_not_packed(tmp_path: Path, assert_same: Any, dtype: str) -> None:
    values = np.random.default_rng(0).integers(-2, 2, (80, 6)).astype(dtype)
    state = {"narrow": [jnp.asarray(value) for value in values], "wide": [jnp.float32(i) for i in range(80)]}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state, block=True)
        assert_same(checkpoints.restore(like=state), state)
    assert {key[0] for key in read_manifest(tmp_path / "step_00000000", 0).places} == {"wide"}
