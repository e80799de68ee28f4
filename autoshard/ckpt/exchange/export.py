"""A step to another directory, and a model out of a step, for programs that know nothing of Orbax."""

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
from autoshard.ckpt.exchange.safetensors import DTYPES, Tensor, write
from autoshard.ckpt.restore.restore import damaged, damaged_leaves, expected_digests, read_manifest, reading
from autoshard.ckpt.state import array_digest
from autoshard.ckpt.state.named_leaves import Key, LeafSpec
from autoshard.ckpt.store import orbax_storage
from autoshard.ckpt.store.argument_checks import is_integer
from autoshard.ckpt.store.directory import StepDirectory, is_committed
from autoshard.errors import CheckpointError, RemovedStepError

PARAMETERS = ("params", "frozen", "variables")  # the parts of a train state that are the model's
AVERAGE = ("ema", "mean"), ("ema", "weight")
INFERENCE, INFERENCE_FORMAT = "inference.json", 1  # beside the steps: what the trainer says of its model
TOKENIZER = "tokenizer.json"  # and its tokenizer, where tokens are not bytes
SHARD_BYTES = 5_000_000_000  # of a file of tensors, as HF's own


@shown
@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        folder: where.
        files: their names.
        tensors: how many.
        nbytes: bytes of the tensors.
    """

    folder: Path
    files: tuple[str, ...]
    tensors: int
    nbytes: int


def copy_step(source: StepDirectory, step: int, target: StepDirectory) -> None:
    """Copies a step as it is, and compares the copy with its digests before it gets its name.

    Where the target does not say what its model is, it then says what the source does.

    Raises:
        CheckpointError: the target has that step, is not ours, is being written, or cannot be written.
        DamagedCheckpointError: the step is damaged; the target is as it was.
        RemovedStepError: the step was removed meanwhile; the target is as it was.
    """
    read_manifest(source.step_path(step), step)
    target.claim()
    if target.step_path(step).exists():
        raise CheckpointError(f"{target.path} has step {step} already, and a committed step is never overwritten.")
    draft = target.draft_path(step)
    try:
        with contextlib.ExitStack() as failed:
            failed.callback(draft.rmtree, missing_ok=True)
            orbax_storage.copy_tree(source.step_path(step), draft)
            wrong = damaged_leaves(draft, step)
            if wrong:
                raise damaged(source.step_path(step), step, "its copy has other values", [(name,) for name in wrong])
            beside = []
            for name in _missing_beside(source.path, target.path):
                part = target.path / f".{name}.{os.getpid()}"
                failed.callback(part.unlink, missing_ok=True)
                part.write_bytes((source.path / name).read_bytes())
                beside.append((part, target.path / name))
            target.commit(draft, step)
            for part, file in beside:  # after the step: where it fails, the target is as it was
                part.rename(file)
            failed.pop_all()
    except OSError as error:
        if not is_committed(source.step_path(step)):
            raise RemovedStepError(step, source.path) from error
        raise CheckpointError(f"step {step} cannot be copied to {target.path}: {error}") from error


def _missing_beside(source: Any, target: Any) -> list[str]:
    """What a target lacks of the files that say what the model is, in the order in which they are to appear."""
    if (target / INFERENCE).exists() or not (source / INFERENCE).exists():
        return []
    # The tokenizer first: what names it is there only with it.
    return [name for name in (TOKENIZER, INFERENCE) if (source / name).exists() and not (target / name).exists()]


@shown
@dataclass(frozen=True)
class Model:
    """A model as tensors that can be read one at a time.

    Attributes:
        tensors: in the order in which they are best read.
        files: what is written beside them: name -> JSON.
        where: it is from.
    """

    tensors: tuple[Tensor, ...]
    files: Mapping[str, Any]
    where: str


def model_of(path: Any, step: int, *, use_ema: bool = False, dtype: str | None = None) -> Model:
    """The model of a step. Each tensor is compared with its digest when it is read.

    Tensors are called by their paths, `.`-joined, without the part of the train state that they are of.

    Args:
        path: of the step.
        step: its number.
        use_ema: take the parameters' moving average, divided by its weight.
        dtype: of floating-point tensors; as they are saved by default.

    Raises:
        CheckpointError: the dtype is no floating-point one, there is no moving average, or `inference.json` is damaged
            or of a newer version.
        DamagedCheckpointError: the step is not as it was written.

    A tensor that `dtype` cannot hold raises `CheckpointError` when it is read.
    """
    floating = [name for name in DTYPES if "float" in name]
    if dtype not in (None, *floating):
        raise CheckpointError(f"dtype={dtype!r}: floating-point tensors are written as {', '.join(floating)}.")
    manifest = read_manifest(path, step)
    digests = expected_digests(path, step, manifest)
    specs = {spec.key: spec for spec in manifest.leaves}
    where = f"step {step} in {path.parent}"
    sources = model_leaves(specs, use_ema, where)
    leaves = orbax_storage.Leaves(path, manifest)

    def read(spec: LeafSpec) -> np.ndarray:
        if not spec.stored:
            return np.zeros(spec.shape, spec.dtype)
        with reading(path, step):
            values = leaves.read(spec.key)
        if array_digest.host_digest(values) != digests[spec.key]:
            raise damaged(path, step, "other values than were saved", [spec.key])
        return values

    weight = float(read(specs[AVERAGE[1]])) if use_ema else 1.0
    if not weight > 0:
        raise CheckpointError(f"{where} has no moving average of the parameters yet: leave out --use-ema.")

    def tensor(key: Key, spec: LeafSpec) -> Tensor:
        is_mean = spec.key[: len(AVERAGE[0])] == AVERAGE[0]
        kind = _kind(specs["params", *key] if is_mean else spec, dtype)

        def values() -> np.ndarray:
            found = read(spec)
            return cast_values(name, found / np.float32(weight) if is_mean else found, kind)

        name = ".".join(key)
        return Tensor(name, spec.shape, kind, values)

    names = {spec.key: key for key, spec in sources.items()}
    tensors = tuple(tensor(names[spec.key], spec) for spec in leaves.in_order(sources.values()))
    return Model(tensors, _files(manifest.config, tensors, path.parent / INFERENCE), where)


def write_model(model: Model, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> Exported:
    """Writes a model's tensors as safetensors files, one in memory at a time, and the JSON files of what it is.

    Args:
        model: what.
        folder: a new one.
        shard_bytes: of a file at most.

    Raises:
        CheckpointError: the folder holds something, or cannot be written, a file may hold nothing, or a tensor's dtype
            cannot hold its values; nothing is left of what was written.
    """
    if not is_integer(shard_bytes) or shard_bytes < 1:
        raise CheckpointError(f"shard_bytes={shard_bytes!r}: a file holds one byte at least.")
    with _new_folder(folder) as draft:
        files = write(draft, model.tensors, shard_bytes=shard_bytes, metadata={"format": "flax", "from": model.where})
        for name, content in model.files.items():
            (draft / name).write_text(json.dumps(content, indent=1) + "\n")
    names = (*(file.name for file in files), *model.files)
    return Exported(folder, names, len(model.tensors), sum(one.nbytes for one in model.tensors))


def model_leaves(specs: Mapping[Key, LeafSpec], use_ema: bool, where: str) -> dict[Key, LeafSpec]:
    """Which saved leaves are the model's, by their paths in it: of a train state, or else all that there are.

    Raises:
        CheckpointError: there is no moving average, it is one of other leaves, or there is no model.
    """
    specs = {key: spec for key, spec in specs.items() if not spec.is_text}
    if not any(key[:1] == ("params",) for key in specs):
        found = {key: spec for key, spec in specs.items() if spec.key_impl is None}
    else:
        found = {key[1:]: spec for key, spec in specs.items() if key[0] in PARAMETERS and len(key) > 1}
    if use_ema:
        mean, weight = AVERAGE
        means = {key[len(mean) :]: spec for key, spec in specs.items() if key[: len(mean)] == mean}
        if not means or weight not in specs:
            raise CheckpointError(f"{where} has no moving average of the parameters: leave out --use-ema.")
        strange = ["/".join(spec.key) for key, spec in means.items() if ("params", *key) not in specs]
        if strange:
            raise CheckpointError(f"{where} has averages of what is no parameter:\n{listing(strange)}")
        found |= means
    if not found:
        raise CheckpointError(f"{where} has no arrays that could be a model's.")
    return found


def cast_values(name: str, values: np.ndarray, dtype: str) -> np.ndarray:
    """A tensor's values in another dtype.

    Raises:
        CheckpointError: one of them is finite, and not in that dtype.
    """
    with np.errstate(over="ignore"):
        found = values.astype(dtype, copy=False)
    if found.dtype == values.dtype or np.issubdtype(found.dtype, np.integer):
        return found
    lost = np.isfinite(values) & ~np.isfinite(found)
    if lost.any():
        most, largest = float(np.abs(values[lost]).max()), float(jnp.finfo(found.dtype).max)
        raise CheckpointError(
            f"{name} has values of up to {most:.6g}, and {dtype} holds {largest:.6g} at most: "
            "take bfloat16 or float32, or leave the tensors as they are saved."
        )
    return found


def _kind(spec: LeafSpec, dtype: str | None) -> str:
    """The dtype of an exported tensor."""
    floating = "float" in spec.dtype
    return dtype if dtype is not None and floating else spec.dtype


def _files(config: Mapping[str, Any], tensors: Sequence[Tensor], inference: Any) -> dict[str, Any]:
    """The JSON files beside the tensors: what the model is and, where `inference.json` says it, how text is sampled."""
    model = config.get("model", {})
    model = dict(model) if isinstance(model, Mapping) else {"name": model}
    generation = {}
    if inference.exists():
        try:
            told = json.loads(inference.read_text())
            if told.get("format", INFERENCE_FORMAT) > INFERENCE_FORMAT:
                raise CheckpointError(
                    f"{inference} has format {told['format']}, this version reads up to {INFERENCE_FORMAT}: upgrade"
                )
            if not isinstance(told["model"], str):
                raise ValueError(f"model is {told['model']!r}, it must be a name")
            model = {"name": told["model"], **told["config"]}  # a run's settings may be those of another model
            generation = {"generation_config.json": _generation(told)}
        except CheckpointError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"{inference} is not as it was written: {type(error).__name__}: {error}") from error
    name = model.pop("name", None)
    kinds = [one.dtype for one in tensors if "float" in one.dtype]
    head = {"architectures": [name]} if name else {}
    kept = {"dtype": max(set(kinds), key=kinds.count)} if kinds else {}
    return {"config.json": head | kept | model} | generation


def _generation(told: Mapping[str, Any]) -> dict[str, Any]:
    """How text is sampled, as HF's `generate` reads it."""
    temperature, top_k = float(told["generation"]["temperature"]), told["generation"]["top_k"]
    top_k = 0 if top_k is None else int(top_k)  # where it is left out, HF takes 50
    how = {"do_sample": True, "temperature": temperature, "top_k": top_k} if temperature else {"do_sample": False}
    return how | {"max_length": int(told["max_length"])}


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder that gets its name only when all is in it."""
    try:
        # What has no name of its own, such as `.` and `/`, is there as well.
        if not folder.name or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
            raise CheckpointError(f"{folder} is there already: name a new folder.")
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
