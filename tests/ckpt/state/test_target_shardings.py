"""The shardings of a template: replacing them, and errors for leaves that cannot be placed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.ckpt import Checkpointer, CheckpointError

STATE = {"params": {"w": jnp.ones((4, 8)), "b": jnp.zeros(8)}, "step": jnp.int32(1), "rng": jax.random.key(0)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, STATE)
    return tmp_path


def test_shardings_that_do_not_divide(tmp_path: Path, mesh8: Mesh, files_of: Callable[[Path], Any]) -> None:
    """One error lists each leaf, dimension and axis, whether the template or `shardings` has the sharding."""
    state = {"a": jnp.ones(6), "b": jnp.ones((8, 6)), "k": jax.random.split(jax.random.key(0), 3), "n": jnp.int32(1)}
    specs = {"a": P("model"), "b": P(None, ("data", "model")), "k": P("model"), "n": P()}
    shardings = {name: NamedSharding(mesh8, spec) for name, spec in specs.items()}
    like = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shardings[n]) for n, x in state.items()}
    lines = (
        "a: shape (6,): dim 0 of size 6 is not divisible by 'model' (4)",
        "b: shape (8, 6): dim 1 of size 6 is not divisible by 'data' (2), 'model' (4)",
        "k: shape (3,): dim 0 of size 3 is not divisible by 'model' (4)",
    )
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, block=True)
        before = files_of(tmp_path)
        for template, wanted in ((like, None), (state, shardings), (None, shardings)):
            with pytest.raises(CheckpointError, match="cannot be placed") as caught:
                checkpoints.restore(like=template, shardings=wanted)
            assert all(line in str(caught.value) for line in lines) and "n:" not in str(caught.value)
        with pytest.raises(CheckpointError, match=r"n: shape \(\) has fewer dimensions than") as caught:
            checkpoints.restore(like=state, shardings=shardings["a"])
        assert lines[0] in str(caught.value)
        assert files_of(tmp_path) == before


def test_invalid_shardings(saved: Path, mesh8: Mesh) -> None:
    with Checkpointer(saved) as checkpoints:
        for shardings, message in (
            (P("data"), r"shardings: P(artitionSpec)?\(.*\) needs a mesh: pass NamedSharding\(mesh, "),
            (mesh8, "a Mesh is not a sharding: pass NamedSharding"),
            (
                (NamedSharding(mesh8, P()), None),
                r"a tuple of 2, but .* is a dict: .*plan.in_shardings\(\)\[0\]",
            ),
            (
                {"params": {"w": P(), "b": P()}, "step": None, "rng": None},
                r"/b: P\(\) and 1 more need a mesh",
            ),
            ("data", "a str is not a sharding"),
            ({"params": {"w": P("data"), "b": "x"}, "step": None, "rng": None}, "params/b: a str(?s:.*)params/w: P"),
            (NamedSharding(mesh8.abstract_mesh, P()), "params/b: its mesh is abstract and has no devices"),
            (NamedSharding(mesh8, P(P.UNCONSTRAINED)), "leaves a dimension unconstrained"),
        ):
            with pytest.raises(CheckpointError, match=message):
                checkpoints.restore(like=STATE, shardings=shardings)


def test_devices_and_specs_on_the_current_mesh_as_shardings(saved: Path, mesh8: Mesh) -> None:
    device = jax.devices()[3]
    with Checkpointer(saved) as checkpoints:
        restored = checkpoints.restore(shardings=device)
        assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(restored))
        with jax.set_mesh(mesh8):
            restored = checkpoints.restore(shardings={"params": P("data"), "step": device, "rng": P()})
            with pytest.raises(CheckpointError, match="rows"):
                checkpoints.restore(shardings=P("rows"))
        assert restored["params"]["w"].sharding == NamedSharding(mesh8, P("data")) and restored["step"].devices() == {
            device
        }


def test_no_value_is_truncated_silently(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        wide = jax.ShapeDtypeStruct((), jnp.int64)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"count": np.int64(2**40)}, config={})
        with pytest.raises(CheckpointError, match="needs jax_enable_x64"):
            checkpoints.restore(like={"count": wide})
        assert checkpoints.restore(like={"count": 0}) == {"count": 2**40}
