"""Invalid input: one clear error each, and nothing on disk changes."""

import json
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.ckpt import Checkpointer, CheckpointError, MismatchError
from autoshard.ckpt.restore.checkpoint_diff import compare
from autoshard.errors import AutoshardError

STATE = {"params": {"w": jnp.ones((4, 8)), "b": jnp.zeros(8)}, "step": jnp.int32(1), "rng": jax.random.key(0)}
CONFIG = {"model": {"width": 8, "layers": 2, "head": {"tied": True}}, "train": {"steps": 5}}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, STATE, config=CONFIG)
    return tmp_path


def test_error_classes() -> None:
    assert issubclass(MismatchError, CheckpointError) and issubclass(CheckpointError, AutoshardError)


def test_one_error_lists_all_differences_of_structure_shape_and_dtype(saved: Path) -> None:
    template = {
        "params": {"w": jnp.ones((4, 16)), "c": np.zeros(3)},
        "step": jnp.float32(1),
        "rng": jax.random.key(0, impl="rbg"),
    }
    with Checkpointer(saved) as checkpoints, pytest.raises(MismatchError) as caught:
        checkpoints.restore(like=template)
    text = str(caught.value)
    assert "is a checkpoint of another model: 5 of 5 leaves differ" in text and str(saved) in text
    for line in (
        "params/w: saved float32[4, 8], wanted float32[4, 16]",
        "params/c: not in the checkpoint, wanted float64[3]",
        "params/b: saved float32[8], not in the wanted state",
        "step: saved int32[], wanted float32[]",
        "rng: saved key<fry>[], wanted key<rbg>[]",
    ):
        assert line in text


def test_a_typed_key_is_not_its_bits(saved: Path) -> None:
    with Checkpointer(saved) as checkpoints, pytest.raises(MismatchError, match=r"rng: saved key<fry>\[\]"):
        checkpoints.restore(like=STATE | {"rng": jax.random.PRNGKey(0)})


def test_a_long_list_is_shortened(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {f"w{i:02}": jnp.ones(2) for i in range(25)}, config={})
        with pytest.raises(MismatchError, match="25 of 25 leaves differ") as caught:
            checkpoints.restore(like={f"w{i:02}": jnp.ones(3) for i in range(25)})
    assert str(caught.value).count("saved float32[2]") == 10 and "and 15 more" in str(caught.value)


def test_a_config_of_another_model(saved: Path) -> None:
    with Checkpointer(saved) as checkpoints:
        other = {"model": {"width": 16, "head": {"tied": True}, "bias": False}, "train": {"steps": 5}}
        with pytest.raises(MismatchError) as caught:
            checkpoints.restore(like=STATE, config=other)
        text = str(caught.value)
        assert "model.width: saved 8, wanted 16" in text and "differs in 3 keys" in text
        assert "model.layers: saved 2, wanted nothing" in text and "model.bias: saved nothing, wanted False" in text
        assert "tied" not in text
        # If the config has a section `model`, only that is compared. Otherwise the whole config is.
        checkpoints.restore(like=STATE, config=CONFIG | {"train": {"steps": 99}})
        with pytest.raises(MismatchError, match=r"train\.steps: saved 5, wanted 6"):
            checkpoints.restore(like=STATE, config={"train": {"steps": 6}})


def test_configs_with_nan_and_dots(tmp_path: Path) -> None:
    """NaN equals NaN at any depth; a dot in a name does not separate levels."""
    nan, other = float("nan"), float("nan")
    with Checkpointer(tmp_path) as checkpoints:
        for step, value in ((1, nan), (2, other)):
            config = {"model": {"clip": value, "rates": [1, value, {"a": value}], "a.b": 1, "a": {"b": 2}}}
            checkpoints.save(step, STATE, config=config, metrics={"loss": value}, block=True)
        checkpoints.restore(like=STATE, config=config)
        with pytest.raises(MismatchError, match="differs in 2 keys:\n.*clip: saved nan, wanted 1.0\n.*rates: saved"):
            checkpoints.restore(like=STATE, config={"model": config["model"] | {"clip": 1.0, "rates": [1, 2.0, {}]}})
        with pytest.raises(MismatchError, match=r"differs in 1 keys:\n  model.a.b: saved 1, wanted 3"):
            checkpoints.restore(like=STATE, config={"model": config["model"] | {"a.b": 3}})
        assert compare(checkpoints.describe(1), checkpoints.describe(2)).settings == ()


def test_configs_with_empty_dicts(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, STATE, config={"model": {}}, block=True)
        with pytest.raises(MismatchError, match="differs in 1 keys:\n  model.width: saved nothing, wanted 8\n"):
            checkpoints.restore(like=STATE, config={"model": {"width": 8}})
        with pytest.raises(MismatchError, match="differs in 1 keys:\n  model: saved {}, wanted 8\n"):
            checkpoints.restore(like=STATE, config={"model": 8})


def test_the_path_of_a_single_step(saved: Path, files_of: Callable[[Path], Any]) -> None:
    before = files_of(saved)
    with pytest.raises(CheckpointError, match=f"is a single step: open {saved}, and step 1 in it"):
        Checkpointer(saved / "step_00000001")
    assert files_of(saved) == before


def test_tuples_in_a_config_equal_lists(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, STATE, config={"model": {"shape": (1, 2)}})
        checkpoints.restore(like=STATE, config={"model": {"shape": (1, 2)}})


def test_a_step_that_exists_is_never_overwritten(saved: Path, files_of: Callable[[Path], Any]) -> None:
    before = files_of(saved)
    with Checkpointer(saved) as checkpoints, pytest.raises(CheckpointError, match="has step 1 already"):
        checkpoints.save(1, STATE, config={})
    assert files_of(saved) == before


def test_a_step_that_does_not_exist(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with (
        Checkpointer(saved) as checkpoints,
        pytest.raises(CheckpointError, match="no step 7 in .* Its steps: 1"),
    ):
        checkpoints.restore(7, STATE)
    nowhere = tmp_path_factory.mktemp("empty") / "new"
    with Checkpointer(nowhere) as checkpoints:
        assert checkpoints.steps() == [] and checkpoints.latest() is None
        for call in (checkpoints.config, checkpoints.verify, lambda: checkpoints.restore(like=STATE)):
            with pytest.raises(CheckpointError, match="no checkpoint in"):
                call()
    assert not nowhere.exists()


def test_folders_with_unusual_step_names_are_ignored(saved: Path) -> None:
    shutil.copytree(saved / "step_00000001", saved / "step_0000000001")
    shutil.copytree(saved / "step_00000001", saved / "step_0000000\N{ARABIC-INDIC DIGIT TWO}")
    assert Checkpointer(saved).steps() == [1]


def test_a_foreign_directory_is_left_alone(tmp_path: Path, files_of: Callable[[Path], Any]) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(CheckpointError, match=r"not a checkpoint directory of autoshard: it contains thesis\.tex"):
        Checkpointer(tmp_path)
    assert files_of(tmp_path) == {"thesis.tex": b"mine"}


def test_a_directory_that_another_program_fills_before_the_first_save(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "run") as checkpoints:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "mine").write_text("x")
        with pytest.raises(CheckpointError, match="it contains mine"):
            checkpoints.save(1, STATE, config={})
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine"]


def test_a_file_instead_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="is a file"):
        Checkpointer(tmp_path / "file")
    with (
        Checkpointer(tmp_path / "file" / "below") as checkpoints,
        pytest.raises(CheckpointError, match="cannot"),
    ):
        checkpoints.save(1, STATE, config={})


def test_a_newer_or_broken_marker(saved: Path) -> None:
    marker = saved / "autoshard.json"
    marker.write_text(json.dumps({"format": "autoshard checkpoints", "version": 99}))
    with pytest.raises(CheckpointError, match="newer version"):
        Checkpointer(saved)
    marker.write_text("{")
    with pytest.raises(CheckpointError, match="not as autoshard writes it"):
        Checkpointer(saved)


def test_steps_without_a_marker(saved: Path, files_of: Callable[[Path], Any]) -> None:
    """Writing the text that the error gives to the file that it names repairs the directory."""
    whole = (saved / "autoshard.json").read_text()
    (saved / "autoshard.json").unlink()
    before = files_of(saved)
    with pytest.raises(CheckpointError, match=r"has step_00000001 but no autoshard\.json, which") as caught:
        Checkpointer(saved)
    assert files_of(saved) == before
    [text, file] = re.findall(r"write (\{.*\}) into (.*); else", str(caught.value))[0]
    Path(file).write_text(text)
    assert json.loads(text) == json.loads(whole)
    with Checkpointer(saved) as checkpoints:
        assert checkpoints.verify() == []


def test_one_writer_at_a_time(saved: Path) -> None:
    with Checkpointer(saved) as first, Checkpointer(saved) as second:
        first.save(2, STATE, config={})
        with pytest.raises(CheckpointError, match="another run is writing"):
            second.save(3, STATE, config={})
        first.close()
        second.save(3, STATE, config={})
        second.wait()
        assert first.steps() == [1, 2, 3]


@pytest.mark.parametrize("step", [-1, 1.5, True, "3", None, np.arange(2), jnp.arange(2)])
def test_steps_are_natural_numbers(tmp_path: Path, step: Any) -> None:
    with (
        Checkpointer(tmp_path / "run") as checkpoints,
        pytest.raises(CheckpointError, match="it must be an integer of at least 0"),
    ):
        checkpoints.save(step, STATE, config={})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("step", [-1, 1.0, True, "1"])
def test_steps_that_are_read_are_natural_numbers(saved: Path, step: Any) -> None:
    with Checkpointer(saved) as checkpoints:
        for read in (checkpoints.restore, checkpoints.verify, checkpoints.describe, checkpoints.config):
            with pytest.raises(CheckpointError, match="it must be an integer of at least 0"):
                read(step)


@pytest.mark.parametrize("keep", [0, True, 2.5, "3"])
def test_keep_is_positive(tmp_path: Path, keep: Any) -> None:
    with pytest.raises(CheckpointError, match=f"keep is {keep!r}; it must"):
        Checkpointer(tmp_path, keep=keep)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"config": [1]}, r"config is \[1\]; it must be a dict such as \{'model'"),
        ({"config": "small"}, "config is 'small'; it must be a dict"),
        ({"config": {"a": {1: 2, "1": 3}}}, "two keys of a dict have the same name: 1, 1"),
        (
            {"metrics": [1], "expert_dims": ["w"]},
            r"metrics is \[1\]; it must be a dict .*; expert_dims is \['w'\]; it must be a dict",
        ),
        ({"metrics": {1: 2, "1": 3}}, "two metrics have the same name: 1, 1"),
        ({"metrics": {"loss": 10**400}}, "metrics must be numbers: loss="),
        ({"expert_dims": {"params/*": "0"}}, "its values integers"),
        ({"expert_dims": {"experts/*": 0}}, "'experts/\\*' matches no leaf"),
        ({"plan": "{"}, "the plan is not JSON"),
    ],
    ids=str,
)
def test_arguments_of_save(tmp_path: Path, argument: Any, message: str) -> None:
    with Checkpointer(tmp_path / "run") as checkpoints, pytest.raises(CheckpointError, match=message):
        checkpoints.save(1, STATE, **argument)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"experts": 3}, r"experts is 3; it must be a list of numbers such as \[0, 3\]"),
        ({"experts": "3", "rename": ["w"]}, "rename is .*; it must be a dict.*; experts is '3'; it must be a list"),
        ({"rename": {"w": 1}}, "rename: 'w' -> 1: paths must be strings"),
        ({"config": [1]}, "config is .*; it must be a dict"),
        ({"upcycle": ["w"]}, "upcycle is .*; it must be a dict"),
        ({"expert_dims": {"w": 0.5}}, "its values integers"),
    ],
    ids=str,
)
def test_arguments_of_restore(saved: Path, argument: Any, message: str) -> None:
    with Checkpointer(saved) as checkpoints, pytest.raises(CheckpointError, match=message):
        checkpoints.restore(like=STATE, **argument)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (ValueError("no array"), "leaf 'a/1' is a ValueError: only arrays"),
        pytest.param(
            jax.nn.relu,
            r"leaf 'a/1' is a .*: only arrays.* save equinox.filter\(state, equinox.is_array\)",
            id="a function",  # its text has an address, which differs between processes
        ),
        (np.array(["a"]), "leaf 'a/1' is a ndarray of <U1: only arrays"),
        (np.array([None]), "leaf 'a/1' is a ndarray of object: only arrays"),
        (2**70, "leaf 'a/1' is an integer of 71 bits, and at most 64 can be saved"),
        (np.zeros(2, [("x", "f4")]), r"leaf 'a/1' is a ndarray of \[\('x', '<f4'\)\]: only arrays"),
        (np.zeros((0, 2), jax.dtypes.float0), r"leaf 'a/1' is a ndarray of \[\('float0', 'V'\)\]: only arrays"),
        (jax.ShapeDtypeStruct((2,), jnp.float32), "a/1: a ShapeDtypeStruct is not an array"),
        (np.ones((1,) * 32), "more than 31 dimensions(?s:.*)a/1: float64"),
        (np.ma.array([1.0, 2.0], mask=[False, True]), "a/1: a masked array would lose its mask"),
    ],
    ids=str,
)
def test_leaves_that_cannot_be_saved(tmp_path: Path, leaf: Any, message: str) -> None:
    """The failed save does not create the directory."""
    with Checkpointer(tmp_path / "run") as checkpoints, pytest.raises(CheckpointError, match=message):
        checkpoints.save(1, {"a": [jnp.ones(2), leaf]}, config={})
    assert not (tmp_path / "run").exists()


def test_a_traced_state(tmp_path: Path) -> None:
    with (
        Checkpointer(tmp_path / "run") as checkpoints,
        pytest.raises(CheckpointError, match="a: is being traced: save the result of the compiled function"),
    ):
        jax.jit(lambda x: checkpoints.save(1, {"a": x}))(jnp.ones(2))


X = jnp.ones(2)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({1: X, "1": X}, "cannot be flattened: .* 1 and '1' are not"),
        (OrderedDict([(1, X), ("1", X)]), "two leaves of the state have the path '1'"),
        (OrderedDict([(1, X), ("1", {"b": X})]), "the leaf '1' of the state is also a parent of the leaf '1/b'"),
        (OrderedDict([("1", {"b": X}), (1, X)]), "the leaf '1' of the state is also a parent of the leaf '1/b'"),
        ({"a": {"\ud800": X}}, r"path 'a/\\ud800', which is not valid Unicode"),
    ],
    ids=["not sortable", "same path", "parent first", "child first", "not Unicode"],
)
def test_invalid_paths(tmp_path: Path, state: Any, message: str) -> None:
    with Checkpointer(tmp_path / "run") as checkpoints, pytest.raises(CheckpointError, match=message):
        checkpoints.save(1, state)
    assert not (tmp_path / "run").exists()


def test_a_state_without_leaves_and_a_config_that_is_not_json(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match="no leaves"):
            checkpoints.save(1, {"a": None}, config={})
        with pytest.raises(CheckpointError, match="JSON"):
            checkpoints.save(1, STATE, config={"a": object()})
        assert checkpoints.steps() == []


def test_a_state_donated_before_the_save(tmp_path: Path) -> None:
    state = {"w": jnp.ones(8)}
    jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(state)
    with (
        Checkpointer(tmp_path) as checkpoints,
        pytest.raises(CheckpointError, match="donated before the save:\n  w"),
    ):
        checkpoints.save(1, state, config={})


def test_the_bare_name_cannot_be_imported(root: Path, run_python: Callable[..., Any]) -> None:
    completed = run_python(f"import sys; sys.path.insert(0, {str(root / 'autoshard')!r}); import ckpt")
    assert completed.returncode == 1 and "import autoshard.ckpt" in completed.stderr
