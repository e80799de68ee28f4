"""A run that starts from a pretrained folder: its model, and the values of its first state."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from autoshard.ckpt.exchange import safetensors
from autoshard.ckpt.exchange.constants import SHARD_BYTES
from autoshard.ckpt.exchange.safetensors import Tensor
from autoshard.errors import ConfigError
from autoshard.models.adapters import add_adapters, trained_parameters
from autoshard.models.adapters.rows import BASE, weights_table
from autoshard.models.decoder.config import DecoderConfig
from autoshard.models.decoder.decoder import Decoder
from autoshard.models.pretrained.copied import copied_tensors, warn_of_copies
from autoshard.models.pretrained.folder import CONFIG, Folder, read_table
from autoshard.models.pretrained.load import Described, read_values
from autoshard.models.pretrained.quantized.kept_codes import (
    Kept,
    codes_of,
    kept_weights,
    put_codes,
    with_codes,
    with_stored,
)
from autoshard.models.pretrained.tables import Source, sources_of
from autoshard.sharding.api.plan import Plan
from autoshard.train.config.merging import replaced
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.program.first_adapters import (
    CODES,
    adapter_start,
    dense_shapes,
    quantized_values,
    with_adapter_settings,
)
from autoshard.train.step.parameter_paths import path_name
from autoshard.train.step.preference import REFERENCE
from autoshard.train.step.train_state import Program, TrainState

KEPT_CODES = "kept_codes.json"  # of the run's copy of the folder: the weights that stay codes and scales
# What other programs read beside the config and the weights.
_OTHER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template*",
    "generation_config.json", "preprocessor_config.json",
)  # fmt: skip


def describe(config: TrainConfig) -> Described:
    """Describe the pretrained model of a run. No weights are read.

    Raises:
        AutoshardError: The folder has no config, or one that is not known.
    """
    own = config.pretrained
    changes: dict[str, Any] = {
        "remat": own.remat, "attention": own.attention, "scan_layers": own.scan_layers, "loss_chunks": own.loss_chunks,
    }  # fmt: skip
    if own.router_loss is not None:
        changes["router_loss"] = own.router_loss
    if own.compute_dtype is not None:
        changes["compute_dtype"] = own.compute_dtype
    described = Described.of(Folder.open(config.model_folder), own.dtype, changes)
    if not isinstance(described.cfg, DecoderConfig):
        raise ConfigError(
            f"{str(config.model_folder)!r} is a {described.family.name}: --from trains models of text alone. Load it "
            "by autoshard.models.load_pretrained in a program of your own"
        )
    if not own.keep_codes:
        return described
    kept, scheme = _kept(config, described), Folder.open(config.model_folder).scheme
    assert scheme is not None  # a run notes weights of quantized folders only
    return described.with_codes(kept, scheme)


def _kept(config: TrainConfig, described: Described) -> Kept:
    """Return the weights of a run that stay codes and scales: those that it has noted, else those of its folder."""
    folder = Folder.open(config.model_folder)
    note = folder.path / KEPT_CODES
    if not note.exists():
        fitted = described.fitted(folder, folder.tensors())
        return kept_weights(fitted.sources, folder.stored_tensors(), folder.scheme, str(folder.path))
    return codes_of({path: described.sources[path] for path in read_table(note)["weights"]}, folder.scheme)


def kept_files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder that a run keeps: its config and its tokenizer."""
    yield folder / CONFIG
    for pattern in _OTHER_FILES:
        yield from (file for file in sorted(folder.glob(pattern)) if file.is_file())


def keep_copied(config: TrainConfig, out: Path) -> None:
    """Write what else a run keeps of its folder: tensors that the model does not use, and which weights stay codes."""
    folder, tensors, described = open_weights(config)
    if config.pretrained.keep_codes:
        (out / KEPT_CODES).write_text(json.dumps({"weights": sorted(described.kept)}, indent=1) + "\n")
    warn_of_copies(described.family, folder, tensors, "`autoshard ckpt export`")
    if described.origin.copied:
        copied = copied_tensors(folder, described.origin.copied)
        safetensors.write(out, copied, shard_bytes=SHARD_BYTES, metadata={"format": "pt"})


def fit_pretrained(config: TrainConfig, vocab_size: int) -> TrainConfig:
    """Return the config with the vocabulary of its pretrained model, and the settings of its adapters.

    Raises:
        ConfigError: The data have more tokens, or the sequences are longer than the model's positions.
    """
    described = describe(config)
    cfg, config = described.cfg, with_adapter_settings(config, described)
    if vocab_size > cfg.vocab:
        tokenizer = config.tokenizer_file or "bytes, because the folder has no tokenizer.json"
        raise ConfigError(
            f"the data have {vocab_size} tokens ({tokenizer}), but the pretrained model has {cfg.vocab}: give its own "
            "tokenizer by --tokenizer"
        )
    if config.gpt.context > cfg.context:
        raise ConfigError(
            f"--gpt.context is {config.gpt.context}, but the pretrained model has {cfg.context} positions: give fewer"
        )
    return replaced(config, "gpt", gpt=replace(config.gpt, vocab=cfg.vocab))


def pretrained_builder(config: TrainConfig) -> Callable[[nnx.Rngs], Decoder]:
    """Return the function that makes the pretrained model, with its adapters, from random streams."""
    described = describe(config)

    def build(rngs: nnx.Rngs) -> Decoder:
        model = Decoder(described.cfg, rngs=rngs)
        model.origin = described.origin
        if described.scheme is not None:
            put_codes(model, described.kept, described.scheme, jnp.zeros)
        if config.lora.rank:
            add_adapters(model, described.family, config.lora, rngs.params())
        elif config.loss == "dpo":
            setattr(model, REFERENCE, Decoder(described.cfg, rngs=rngs))
        return model

    return build


def trained_globs(config: TrainConfig) -> tuple[str, ...]:
    """Return the globs over the paths of the parameters that are trained."""
    return trained_parameters if config.lora.rank else ("*",)


def frozen_globs(config: TrainConfig) -> tuple[str, ...]:
    """Return the globs over the paths of the reference's parameters, which are not trained."""
    return (f"{REFERENCE}/*",) if config.loss == "dpo" and not config.lora.rank else ()


def with_dtype_note(plan: Plan, config: TrainConfig, state: TrainState) -> Plan:
    """Return the plan of a run with a note about trained parameters, and moments, of fewer than 32 bits."""
    short = sorted({str(leaf.dtype) for leaf in jax.tree.leaves(state.params) if leaf.dtype.itemsize < 4})
    note = (
        f"trained parameters and their moments are {' and '.join(short)}, so small updates are lost to rounding; "
        "--pretrained.dtype float32 --pretrained.compute-dtype bfloat16 keeps them"
    )
    missing = short and config.pretrained.folder is not None and note not in plan.notes
    return plan.where(notes=(*plan.notes, note)) if missing else plan


def sources_in(described: Described, shapes: dict[str, tuple[int, ...]]) -> dict[str, Source]:
    """Return the tensors of each parameter that a folder of this model has; adapters are not among them.

    Args:
        described: The model.
        shapes: The shape of each parameter, by path.
    """
    weights = {
        path: shape for path, shape in shapes.items()
        if path.replace(f"/{BASE}/", "/") in described.shapes or path.endswith(f"/{BASE}")
    }  # fmt: skip
    table = with_codes(weights_table(described.family, described.cfg, described.origin.spelling))
    return sources_of(described.family.stacks(described.cfg), table, weights)


def open_weights(config: TrainConfig) -> tuple[Folder, Mapping[str, Tensor], Described]:
    """Open the folder that a run starts from, and check its tensors. No values are read.

    Returns:
        The folder, its tensors by name, and its model.

    Raises:
        AutoshardError: A tensor is missing, unexpected, truncated, or has another shape or dtype.
    """
    assert config.pretrained.folder is not None
    folder = Folder.open(config.pretrained.folder)
    described = describe(config)
    tensors = with_stored(folder.tensors(), folder.stored_tensors(), described.kept, described.scheme)
    described = described.fitted(folder, tensors)
    if config.pretrained.dtype is None:
        dtypes = {path: leaf.dtype for path, leaf in described.shapes.items()}
        _check_dtypes(described.sources, tensors, dtypes, folder)
    return folder, tensors, described


def first_state(config: TrainConfig, program: Program, like: TrainState) -> TrainState:
    """Make the first state of a run from the folder's values, which are read straight onto their shards.

    Args:
        config: The run.
        program: Its model and optimizer.
        like: Shapes, dtypes and shardings of the state.

    Raises:
        AutoshardError: A tensor is missing, unexpected, damaged, or has another shape or dtype.
    """
    folder, tensors, described = open_weights(config)
    leaves = {
        path_name(path): leaf
        for part in (like.params, like.frozen, like.variables)
        for path, leaf in jax.tree_util.tree_flatten_with_path(part)[0]
    }
    sources = sources_in(described, {path: leaf.shape for path, leaf in leaves.items()})
    dtypes = {path: leaves[path].dtype for path in sources}
    shardings = {path: leaves[path].sharding for path in sources}
    values = read_values(folder, sources, tensors, dtypes, shardings)
    dense = sources_in(described, dense_shapes(described, leaves))
    for path, source in dense.items():
        given = {path: leaves[f"{path}/{CODES}"].sharding}
        dtype = {path: described.shapes[path.removesuffix(f"/{BASE}")].dtype}
        (weight,) = read_values(folder, {path: source}, tensors, dtype, given).values()
        values |= quantized_values(config.lora, path, weight, source, leaves)
    values |= adapter_start(config, described, leaves, sources, values)
    values |= {
        f"{REFERENCE}/{path}": _copy(values[path], leaf.sharding)
        for path in sources
        if (leaf := leaves.get(f"{REFERENCE}/{path}")) is not None
    }

    def rest(key: jax.Array, values: dict[str, jax.Array]) -> list[Any]:
        return _others(program.create_state(key, values), values)

    made = jax.jit(rest, out_shardings=[leaf.sharding for leaf in _others(like, values)])(
        jax.random.key(config.seed), values
    )
    others = iter(made)
    flat, tree = jax.tree_util.tree_flatten_with_path(like)
    return tree.unflatten([values[name] if (name := _model_path(path)) in values else next(others) for path, _ in flat])


def _copy(value: jax.Array, sharding: Any) -> jax.Array:
    """Copy an array into memory of its own, because a step donates its state."""
    return jax.jit(jnp.copy, out_shardings=sharding)(value)


def _check_dtypes(
    sources: Mapping[str, Source], tensors: Mapping[str, Tensor], dtypes: Mapping[str, Any], folder: Folder
) -> None:
    """Refuse tensors of several dtypes, unless one is requested for all."""
    for path, source in sources.items():
        for name in source.names.values():
            if tensors[name].dtype != str(dtypes[path]):
                raise ConfigError(
                    f"{name} in {str(folder.path)!r} is {tensors[name].dtype}, but its {CONFIG} says {dtypes[path]}: "
                    "give the dtype of all parameters by --pretrained.dtype"
                )


def _others(state: TrainState, values: Any) -> list[Any]:
    """Return the leaves of a state that the folder does not have."""
    return [leaf for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0] if _model_path(path) not in values]


def _model_path(path: Any) -> str | None:
    """Return the path of a state's leaf within the model; None if it is not of the model."""
    part, _, within = path_name(path).partition("/")
    return within if part in ("params", "frozen", "variables") else None
