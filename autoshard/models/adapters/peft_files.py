"""Adapters in PEFT's format: `adapter_config.json`, and `adapter_model.safetensors` with PEFT's names.

https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from autoshard.ckpt.exchange.lora import CONFIG, WEIGHTS, Adapter, read_adapter
from autoshard.ckpt.exchange.safetensors import Tensor, write
from autoshard.errors import AutoshardError
from autoshard.models.adapters.insert import adapt
from autoshard.models.adapters.lora_config import LoraConfig
from autoshard.models.adapters.rows import MAGNITUDES, PREFIX, A, B, adapters_table, takes_adapter, within_layer
from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.decoder import Decoder
from autoshard.models.pretrained.families import Family, known_families
from autoshard.models.pretrained.parameter_paths import parameters_of
from autoshard.models.pretrained.quantized.kept_codes import weight_shapes
from autoshard.models.pretrained.save import gathered, tensors_of
from autoshard.models.pretrained.tables import Source, sources_of


def adapter_sources(family: Family, cfg: DecoderConfig, shapes: Mapping[str, Sequence[int]]) -> dict[str, Source]:
    """Return the tensors of the factors of adapters, by path. Paths of other parameters are left out."""
    own = {path: shape for path, shape in shapes.items() if path.endswith((f"/{A}", f"/{B}", f"/{MAGNITUDES}"))}
    return sources_of(family.stacks(cfg), adapters_table(family, cfg), own)


def save_adapter(model: Decoder, path: Any, lora: LoraConfig, *, base: str | None = None) -> None:
    """Write the adapters of a model in PEFT's format.

    Args:
        model: a model of `load_pretrained` with adapters.
        path: a new or empty folder.
        lora: the settings with which they were added.
        base: the name or the folder of the pretrained model, for `adapter_config.json`.

    Raises:
        AutoshardError: the model has no adapters, or the folder is not empty.
    """
    values = parameters_of(model)
    sources = adapter_sources(_family(model), model.cfg, {path: leaf.shape for path, leaf in values.items()})
    if not sources:
        raise AutoshardError("save_adapter: the model has no adapters: add some by add_adapters")
    dtypes = {path: str(values[path].dtype) for path in sources}
    tensors = tensors_of(sources, dtypes, lambda path, index: gathered(values[path], index))
    write_adapter(path, lora, tensors, matrices_of(_family(model), model.cfg), base)


def write_adapter(
    path: Any, lora: LoraConfig, tensors: Sequence[Tensor], matrices: Sequence[str], base: str | None
) -> None:
    """Write a new folder of an adapter. It appears when it is complete.

    Args:
        path: a new or empty folder.
        lora: the settings.
        tensors: the factors, with PEFT's names.
        matrices: the names of all modules of the model that can have an adapter.
        base: the name or the folder of the pretrained model.

    Raises:
        AutoshardError: the folder is not empty.
    """
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise AutoshardError(f"{str(folder)!r} exists already: use a new folder")
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": lora.rank,
        "lora_alpha": alpha, "use_rslora": lora.rslora, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
        "use_dora": lora.dora, "init_lora_weights": True, "inference_mode": True, "modules_to_save": None,
        "target_modules": _target_modules([one.name for one in tensors], matrices),
    }  # fmt: skip
    draft = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        nbytes = sum(one.nbytes for one in tensors)
        (file,) = write(draft, tensors, shard_bytes=max(nbytes, 1), metadata={"format": "pt"})
        file.rename(draft / WEIGHTS)
        (draft / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        draft.replace(folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def load_adapter(model: Decoder, path: Any) -> LoraConfig:
    """Add the adapters of a folder in PEFT's format to a model of `load_pretrained`.

    Args:
        model: the model, which is changed. It has no adapters yet.
        path: the folder.

    Returns:
        The settings of the adapters.

    Raises:
        AutoshardError: there is no adapter, it is of a kind that is not built, or it is for another model.
    """
    lora, found = adapter_values(Path(path), _family(model), model.cfg, weight_shapes(model))
    for path, values in found.items():
        a, b, *magnitudes = (jnp.asarray(each) for each in values)
        adapt(model, path, a, b, lora.scale, *magnitudes)
    return lora


Values = tuple[np.ndarray, ...]


def adapter_values(
    folder: Path, family: Family, cfg: DecoderConfig, shapes: Mapping[str, Sequence[int]]
) -> tuple[LoraConfig, dict[str, Values]]:
    """Read the adapters of a folder in PEFT's format.

    Args:
        folder: the folder.
        family: the family of the model.
        cfg: the model's config.
        shapes: the shape of each parameter of the model, by path.

    Returns:
        The settings, whose targets are the paths of the weights; and for each of these paths both factors and, with
        DoRA, the magnitudes, float32 and stacked as the weight is.

    Raises:
        AutoshardError: there is no adapter, it is of a kind that is not built, or it is for another model.
    """
    adapter = read_adapter(folder)
    if adapter.saved or adapter.rank_pattern or adapter.alpha_pattern:
        raise AutoshardError(
            f"the adapter in {adapter.where} has fully trained modules or several ranks: merge it into the model by "
            "`autoshard ckpt merge`, then load the merged model"
        )
    table = family.table(cfg)
    left, values = set(adapter.pairs), {}
    for path, source in sources_of(family.stacks(cfg), table, shapes).items():
        names = {index: name.removesuffix(".weight") for index, name in source.names.items()}
        found = [name for name in names.values() if name in adapter.pairs]
        if not found or not takes_adapter(table[within_layer(path)]):
            continue
        if len(found) < len(names):
            raise AutoshardError(
                f"the adapter in {adapter.where} has {found[0]}, but not {min(set(names.values()) - set(found))}: "
                "stacked layers have adapters in all layers; load the model with scan_layers=False"
            )
        left -= set(found)
        values[path] = _stacked(source, names, adapter)
    if left:
        raise AutoshardError(f"the adapter in {adapter.where} is for another model: this one has no {min(left)}")
    dora = bool(adapter.magnitudes)
    return LoraConfig(adapter.rank, adapter.alpha, tuple(values), adapter.rslora, dora), values


def _stacked(source: Source, names: Mapping[tuple[int, ...], str], adapter: Adapter) -> Values:
    """Return the factors and the magnitudes of a parameter's adapter, stacked as the parameter is."""
    leading, inner = source.shape[: source.leading], len(source.layout.groups[1])
    inputs = source.shape[source.leading :][:inner]
    outputs = source.shape[source.leading :][inner:]
    a = np.empty((*leading, *inputs, adapter.rank), np.float32)
    b = np.empty((*leading, adapter.rank, *outputs), np.float32)
    magnitudes = np.empty((*leading, *outputs), np.float32)
    for index, name in names.items():
        if (problem := adapter.mismatch(name, source.tensor_shape)) is not None:
            raise AutoshardError(f"the adapter in {adapter.where} is for another model: {name}: {problem}")
        one_a, one_b, _ = adapter.pairs[name]
        a[index] = one_a.T.reshape(a[index].shape)
        b[index] = one_b.T.reshape(b[index].shape)
        if adapter.magnitudes:
            magnitudes[index] = adapter.magnitudes[name].reshape(outputs)
    return (a, b, magnitudes) if adapter.magnitudes else (a, b)


def merged(
    weight: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float, magnitudes: np.ndarray | None = None
) -> np.ndarray:
    """Return a weight merged with its adapter, in float32.

    Args:
        weight: `[*inputs, *outputs]`.
        a: the first factor, `[*inputs, rank]`.
        b: the second factor, `[rank, *outputs]`.
        scale: the factor of their product.
        magnitudes: those of DoRA, `[*outputs]`.
    """
    found = weight.astype(np.float32) + np.float32(scale) * np.tensordot(a.astype(np.float32), b.astype(np.float32), 1)
    if magnitudes is None:
        return found
    return found * (magnitudes.astype(np.float32) / np.sqrt(np.square(found).sum(tuple(range(a.ndim - 1)))))


def _family(model: Decoder) -> Family:
    origin: Any = model.origin
    if origin is None:
        raise AutoshardError("the model was not loaded by load_pretrained, so its family is not known")
    return known_families()[origin.family]


def matrices_of(family: Family, cfg: DecoderConfig) -> list[str]:
    """Return the names of all modules of a model that can have an adapter."""
    rows = [row for row in family.table(cfg).values() if takes_adapter(row)]
    return [row.name.removesuffix(".weight").format(layer=layer) for row in rows for layer in range(cfg.layers)]


def _target_modules(tensors: Sequence[str], matrices: Sequence[str]) -> list[str]:
    """Return the names by which PEFT finds the modules: last parts, or whole names if only some layers have one."""
    modules = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in tensors}
    last = {name.rpartition(".")[2] for name in modules}
    complete = all(name in modules for name in matrices if name.rpartition(".")[2] in last)
    return sorted(last if complete else modules)
