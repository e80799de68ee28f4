"""Copying a step to another directory, and exporting its model for programs without Orbax."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from autoshard._columns import listing
from autoshard._shown import shown
from autoshard.ckpt.exchange.constants import SHARD_BYTES
from autoshard.ckpt.exchange.safetensors import DTYPES, Tensor, write
from autoshard.ckpt.exchange.schedule_free import B1, Z, average, schedule_free_path
from autoshard.ckpt.restore.restore import damage_error, damaged_leaves, expected_digests, read_manifest, reading
from autoshard.ckpt.state import array_digest
from autoshard.ckpt.state.named_leaves import Key, LeafSpec
from autoshard.ckpt.store import orbax_storage
from autoshard.ckpt.store.argument_checks import is_integer
from autoshard.ckpt.store.directory import StepDirectory, is_committed
from autoshard.errors import CheckpointError, RemovedStepError

MODEL_PARTS = ("params", "frozen", "variables")  # the parts of a train state that belong to the model
AVERAGE = ("ema", "mean"), ("ema", "weight")
INFERENCE_FILE, INFERENCE_FORMAT = "inference.json", 1  # beside the steps: the trainer's description of the model
FAN_IN = "fan_in"  # "first" in the metadata of a safetensors file if weights are known to be `[in, out]`
TOKENIZER_FILE = "tokenizer.json"  # beside the steps: the tokenizer, unless tokens are bytes


@shown
@dataclass(frozen=True)
class Exported:
    """The record of an export.

    Attributes:
        folder: the folder of the files.
        files: the names of the files.
        tensors: the number of tensors.
        nbytes: bytes of the tensors.
        averaged: whether the parameters are their moving average.
    """

    folder: Path
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    averaged: bool = False


def copy_step(source: StepDirectory, step: int, target: StepDirectory) -> None:
    """Copy a step unchanged, and compare the copy with its digests before it is committed.

    Also copies `inference.json` and the tokenizer if the target has no `inference.json`.

    Raises:
        CheckpointError: the target has that step, was not created by autoshard, is being written by another run, or
            cannot be written.
        DamagedCheckpointError: the step is damaged; the target is unchanged.
        RemovedStepError: the step was removed while it was copied; the target is unchanged.
    """
    read_manifest(source.step_path(step), step)
    target.claim()
    if target.step_path(step).exists():
        raise CheckpointError(f"{target.path} has step {step} already, and a committed step is never overwritten.")
    draft = target.draft_path(step)
    try:
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(draft.rmtree, missing_ok=True)
            orbax_storage.copy_tree(source.step_path(step), draft)
            wrong = damaged_leaves(draft, step)
            if wrong:
                names = [(name,) for name in wrong]
                raise damage_error(source.step_path(step), step, "its copy has different values", names)
            parts = []
            for name in _missing_model_files(source.path, target.path):
                part = target.path / f".{name}.{os.getpid()}"
                on_failure.callback(part.unlink, missing_ok=True)
                part.write_bytes((source.path / name).read_bytes())
                parts.append((part, target.path / name))
            target.commit(draft, step)
            for part, file in parts:  # last, so that a failure before leaves the target unchanged
                part.rename(file)
            on_failure.pop_all()
    except OSError as error:
        if not is_committed(source.step_path(step)):
            raise RemovedStepError(step, source.path) from error
        raise CheckpointError(f"step {step} cannot be copied to {target.path}: {error}") from error


def _missing_model_files(source: Any, target: Any) -> list[str]:
    """Return the files that describe the model and that the target does not have, in the order to create them."""
    if (target / INFERENCE_FILE).exists() or not (source / INFERENCE_FILE).exists():
        return []
    # The tokenizer first, because `inference.json` refers to it.
    return [
        name for name in (TOKENIZER_FILE, INFERENCE_FILE) if (source / name).exists() and not (target / name).exists()
    ]


@shown
@dataclass(frozen=True)
class Model:
    """A model as tensors that can be read one at a time.

    Attributes:
        tensors: the tensors, in the order that reads each pack once.
        files: the files to write beside them: name -> JSON values, or bytes.
        where: the step or folder of the model.
        averaged: whether the parameters are their moving average.
        fan_in_first: whether weights are known to be `[in, out]`, as those of the trainer's models.
    """

    tensors: tuple[Tensor, ...]
    files: Mapping[str, Any]
    where: str
    averaged: bool = False
    fan_in_first: bool = False


def step_model(path: Any, step: int, *, use_ema: bool | None = False, dtype: str | None = None) -> Model:
    """Return the model of a step. Each tensor is compared with its digest when it is read. The step stays meanwhile.

    The name of a tensor is its `.`-joined path, without the part of the train state. Reading a tensor with values out
    of the range of `dtype` raises `CheckpointError`.

    Args:
        path: the path of the step.
        step: the number of the step.
        use_ema: whether to use the moving average of the parameters, divided by its weight. None: make the choice of
            the run's evaluations, which `inference.json` records. An evaluation uses the parameters as long as the
            average has no update.
        dtype: the dtype of floating-point tensors; by default the saved one.

    Raises:
        CheckpointError: the dtype is not a floating-point type, there is no moving average, or `inference.json` is
            damaged or of a newer version.
        DamagedCheckpointError: the step is damaged.
    """
    floating = [name for name in DTYPES if "float" in name]
    if dtype not in (None, *floating):
        raise CheckpointError(f"dtype is {dtype!r}; it must be one of {', '.join(floating)}.")
    manifest = read_manifest(path, step)
    digests = expected_digests(path, step, manifest)
    specs = {spec.key: spec for spec in manifest.leaves}
    where = f"step {step} in {path.parent}"
    inference = _inference(path.parent / INFERENCE_FILE)
    with reading(path, step):
        leaves = orbax_storage.LeafReader(path, manifest)

    def read(spec: LeafSpec) -> np.ndarray:
        if not spec.stored:
            return np.zeros(spec.shape, spec.dtype)
        with reading(path, step):
            values = leaves.read(spec.key)
        if array_digest.host_digest(values) != digests[spec.key]:
            raise damage_error(path, step, "values differ from the saved ones", [spec.key])
        return values

    evaluated = use_ema is None and inference is not None and inference["generation"].get("use_ema") is True
    averaged = bool(use_ema) or (evaluated and AVERAGE[1] in specs)
    sources = model_leaves(specs, averaged, where)
    weight = float(read(specs[AVERAGE[1]])) if averaged else 1.0
    if not weight > 0 and use_ema is None:
        averaged, weight, sources = False, 1.0, model_leaves(specs, False, where)
    if not weight > 0:
        raise CheckpointError(
            f"{where} has no moving average of the parameters yet: leave out use_ema=True (--use-ema)."
        )

    # A schedule-free optimizer has no moving average; its own average is the model.
    free = schedule_free_path(specs)
    b1 = read(specs[*free, B1]) if free is not None else None

    def tensor(key: Key, spec: LeafSpec) -> Tensor:
        is_mean = spec.key[: len(AVERAGE[0])] == AVERAGE[0]
        tensor_dtype = _exported_dtype(specs["params", *key] if is_mean else spec, dtype)

        def values() -> np.ndarray:
            saved = read(spec)
            if free is not None and b1 is not None and spec.key == ("params", *key) and (*free, Z, *key) in specs:
                saved = average(saved, read(specs[*free, Z, *key]), b1)
            return cast_values(name, saved / np.float32(weight) if is_mean else saved, tensor_dtype)

        name = ".".join(key)
        return Tensor(name, spec.shape, tensor_dtype, values)

    names = {spec.key: key for key, spec in sources.items()}
    tensors = tuple(tensor(names[spec.key], spec) for spec in leaves.in_order(sources.values()))
    files = _files(manifest.config, tensors, inference)
    tokenizer = path.parent / TOKENIZER_FILE
    if inference is not None and tokenizer.exists():
        files[TOKENIZER_FILE] = tokenizer.read_bytes()
    # The kernels of Flax are fan-in first.
    return Model(tensors, files, where, averaged, fan_in_first=inference is not None)


def write_model(model: Model, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> Exported:
    """Write the tensors of a model as safetensors files, with one tensor in memory at a time, and its JSON files.

    Args:
        model: the model.
        folder: a new or empty folder.
        shard_bytes: largest number of bytes of tensors in one file.

    Raises:
        CheckpointError: the folder is not empty or cannot be written, `shard_bytes` is not positive, or a value is out
            of the range of the tensor's dtype. The files written so far are removed.
    """
    if not is_integer(shard_bytes) or shard_bytes < 1:
        raise CheckpointError(f"shard_bytes is {shard_bytes!r}; it must be an integer of at least 1.")
    with _new_folder(folder) as draft:
        metadata = {"format": "flax", "from": model.where} | ({FAN_IN: "first"} if model.fan_in_first else {})
        files = write(draft, model.tensors, shard_bytes=shard_bytes, metadata=metadata)
        for name, content in model.files.items():
            text = content if isinstance(content, bytes) else (json.dumps(content, indent=1) + "\n").encode()
            (draft / name).write_bytes(text)
    names = (*(file.name for file in files), *model.files)
    nbytes = sum(one.nbytes for one in model.tensors)
    return Exported(folder, names, len(model.tensors), nbytes, model.averaged)


def model_leaves(specs: Mapping[Key, LeafSpec], use_ema: bool, where: str) -> dict[Key, LeafSpec]:
    """Return the saved leaves of the model by their paths in it. The model is a part of a train state, or all arrays.

    Raises:
        CheckpointError: there is no moving average, it has leaves that are not parameters, or there are no arrays.
    """
    specs = {key: spec for key, spec in specs.items() if not spec.is_text}
    if not any(key[:1] == ("params",) for key in specs):
        leaves = {key: spec for key, spec in specs.items() if spec.key_impl is None}
    else:
        leaves = {key[1:]: spec for key, spec in specs.items() if key[0] in MODEL_PARTS and len(key) > 1}
    if use_ema:
        mean, weight = AVERAGE
        means = {key[len(mean) :]: spec for key, spec in specs.items() if key[: len(mean)] == mean}
        if not means or weight not in specs:
            raise CheckpointError(
                f"{where} has no moving average of the parameters: leave out use_ema=True (--use-ema)."
            )
        unknown = ["/".join(spec.key) for key, spec in means.items() if ("params", *key) not in specs]
        if unknown:
            raise CheckpointError(
                f"{where} contains moving averages for leaves that are not parameters:\n{listing(unknown)}"
            )
        leaves |= means
    if not leaves:
        raise CheckpointError(f"{where} has no arrays, so it has no model: give a step that was saved with a model.")
    return leaves


def cast_values(name: str, values: np.ndarray, dtype: str) -> np.ndarray:
    """Cast the values of a tensor.

    Raises:
        CheckpointError: a finite value is not finite in the new dtype.
    """
    with np.errstate(over="ignore"):
        cast = values.astype(dtype, copy=False)
    if cast.dtype == values.dtype or np.issubdtype(cast.dtype, np.integer):
        return cast
    overflow = np.isfinite(values) & ~np.isfinite(cast)
    if overflow.any():
        most, largest = float(np.abs(values[overflow]).max()), float(jnp.finfo(cast.dtype).max)
        raise CheckpointError(
            f"{name} has values of up to {most:.6g}, but the largest {dtype} is {largest:.6g}: "
            "use bfloat16 or float32, or keep the saved dtypes."
        )
    return cast


def _exported_dtype(spec: LeafSpec, dtype: str | None) -> str:
    """Return the dtype of an exported tensor."""
    floating = "float" in spec.dtype
    return dtype if dtype is not None and floating else spec.dtype


def _inference(file: Any) -> dict[str, Any] | None:
    """Return the content of an `inference.json`, or None if there is none.

    Raises:
        CheckpointError: it is damaged or of a newer version.
    """
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_text())
        if content.get("format", INFERENCE_FORMAT) > INFERENCE_FORMAT:
            raise CheckpointError(
                f"{file} has format {content['format']}, this version reads up to {INFERENCE_FORMAT}: upgrade"
            )
        if not isinstance(content["model"], str):
            raise ValueError(f"model is {content['model']!r}; it must be a name")
        if not isinstance(content["config"], dict):
            raise TypeError(f"config is {content['config']!r}; it must be a table")
        _generation(content)
        return content
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{file} is damaged: {type(error).__name__}: {error}") from error


def _files(config: Mapping[str, Any], tensors: Sequence[Tensor], inference: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the JSON files beside the tensors: the model's config, and with an `inference.json` sampling settings.

    They include the `inference.json`, so that `autoshard generate` finds the model, without its moving average.
    """
    model = config.get("model", {})
    model = dict(model) if isinstance(model, Mapping) else {"name": model}
    generation = {}
    if inference is not None:
        model = {"name": inference["model"], **inference["config"]}  # takes precedence over the run's config
        own = {**inference, "generation": {**inference["generation"], "use_ema": False}}
        generation = {"generation_config.json": _generation(inference), INFERENCE_FILE: own}
    name = model.pop("name", None)
    kinds = [one.dtype for one in tensors if "float" in one.dtype]
    head = {"architectures": [name]} if name else {}
    dtype = {"dtype": max(set(kinds), key=kinds.count)} if kinds else {}
    return {"config.json": head | dtype | model} | generation


def _generation(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling settings in the form of Hugging Face's `generate`."""
    temperature, top_k = float(content["generation"]["temperature"]), content["generation"]["top_k"]
    top_k = 0 if top_k is None else int(top_k)  # the default of Hugging Face is 50
    sampling = {"do_sample": True, "temperature": temperature, "top_k": top_k} if temperature else {"do_sample": False}
    return sampling | {"max_length": int(content["max_length"])}


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yield a draft folder that is renamed to `folder` when it is complete."""
    try:
        # Paths without a name, such as `.` and `/`, exist.
        if not folder.name or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
            raise CheckpointError(f"{folder} exists already: use a new folder.")
        draft = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            yield draft
            draft.replace(folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error
