r"""Merging LoRA and DoRA adapters of PEFT into a base model.

For a module with weight W, the adapter has :math:`A \in R^{r \times in}` and :math:`B \in R^{out \times r}`, and

.. math:: W' = W + s B A,\quad s = \alpha / r,\ \text{or}\ \alpha / \sqrt r\ \text{if rank-stabilized.}

DoRA then scales each output of W' so that its norm over the inputs is the adapter's magnitude.

W is stored as `[out, in]`, or as `[in, out]` (fan-in first), as in Flax. For an embedding the sum is
:math:`W + s (B A)^T`. In the trainer's models W is fan-in first, whatever the adapter's settings say about the weights
with which it was trained. Their heads are separate dimensions, and the layers of a scan are stacked: the module
`blocks.3.attention.wq` changes `blocks.attention.wq[3]`, of shape `[in, heads, head_dim]`.

Sources: Hu et al. 2021, arXiv:2106.09685; Kalajdzievski 2023, arXiv:2312.03732; Liu et al. 2024, arXiv:2402.09353;
PEFT's checkpoint format, https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors import SafetensorError

from autoshard._columns import listing
from autoshard._shown import shown
from autoshard.ckpt.exchange import safetensors
from autoshard.ckpt.exchange.export import FAN_IN, Model, cast_values
from autoshard.ckpt.exchange.safetensors import INDEX, Tensor
from autoshard.errors import CheckpointError, MismatchError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MAGNITUDES = re.compile(r"(.+)\.lora_magnitude_vector(?:\.weight)?")
_PAIR = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(\.weight)?")
# Parts of the names of fully trained modules, and of embeddings that have a pair.
_WRAPPERS = re.compile(r"\.(modules_to_save|base_layer)\b")
_SUMMED = (
    "float64",
    "float32",
    "bfloat16",
    "float16",
)  # dtypes of weights; others are codes, whose scales are elsewhere
# Settings that would change values in ways that are not implemented here.
_UNSUPPORTED = (
    "bias",
    "lora_bias",
    "use_qalora",
    "alora_invocation_tokens",
    "layer_replication",
    "megatron_config",
    "target_parameters",
    "use_bdlora",
    "kasa_config",
    "monteclora_config",
    "arrow_config",
)
# Initializations for which PEFT subtracts the initial B A from W.
_BASE_CHANGED = ("pissa", "olora", "corda", "loftq", "lora_ga")


@shown
@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: the pair of matrices of each module, and their scales.

    Attributes:
        where: the folder of the adapter.
        pairs: module -> (A `[rank, in]`, B `[out, rank]`, whether the module is an embedding).
        saved: module -> a weight that replaces that of the base. If the module also has a pair, that is added to it.
        rank: the rank of modules that `rank_pattern` does not match.
        alpha: the alpha of modules that `alpha_pattern` does not match.
        rslora: whether alpha is divided by the square root of the rank instead of the rank.
        fan_in_first: whether the base's weights are `[in, out]`.
        rank_pattern: module name, its suffix or a regular expression -> rank.
        alpha_pattern: module name, its suffix or a regular expression -> alpha.
        magnitudes: module -> the magnitudes of DoRA, `[out]`; empty for LoRA.
    """

    where: str
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray, bool]]
    saved: Mapping[str, np.ndarray]
    rank: int
    alpha: float
    rslora: bool
    fan_in_first: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    magnitudes: Mapping[str, np.ndarray] = field(default_factory=dict)

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's pair according to the settings."""
        return _setting_of(self.rank_pattern, module, self.rank)

    def scale(self, module: str) -> float:
        """Return the factor of a module's product B A."""
        rank, alpha = self.rank_of(module), _setting_of(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def mismatch(self, module: str, shape: tuple[int, ...]) -> str | None:
        """Return why a module's pair does not match a weight of this shape; None if it does."""
        a, b, embedding = self.pairs[module]
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            return f"A is {list(a.shape)} and B {list(b.shape)}, which cannot be multiplied"
        first = embedding or self.fan_in_first
        rows, columns = (a.shape[1], b.shape[0]) if first else (b.shape[0], a.shape[1])
        # In Flax the heads of a projection may be separate dimensions.
        leading = [math.prod(shape[:n]) for n in range(1, len(shape))]
        if rows in leading and math.prod(shape) == rows * columns:
            return None
        return f"the base has {list(shape)}, the adapter {[rows, columns]}, fan-{'in' if first else 'out'} first"

    def merged(self, module: str, weight: np.ndarray) -> np.ndarray:
        """Return a module's weight with its adapter, float32 in the weight's shape, which must match."""
        a, b, embedding = self.pairs[module]
        product = self.scale(module) * (b.astype(np.float32) @ a.astype(np.float32))
        first = embedding or self.fan_in_first
        product = product.T if first else product
        found = weight.astype(np.float32).reshape(product.shape) + product
        if module in self.magnitudes:
            factors = self.magnitudes[module].astype(np.float32) / np.linalg.norm(found, axis=0 if first else 1)
            found *= factors if first else factors[:, None]
        return found.reshape(weight.shape)


def _setting_of(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    for name, value in pattern.items():
        if module == name or module.endswith(f".{name}") or re.fullmatch(_expression(name), module):
            return value
    return default


def _expression(name: str) -> str:
    return rf"(.*\.)?({name})"


def read_adapter(folder: Path) -> Adapter:
    """Return an adapter that was written by PEFT.

    Raises:
        CheckpointError: the folder has no adapter, or it is damaged or of an unsupported kind.
    """
    try:
        config = json.loads((folder / CONFIG).read_text())
        with safetensors.open_tensors(folder / WEIGHTS) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is not a LoRA adapter: it has no {Path(error.filename).name}") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"the adapter in {folder} cannot be read: {error}") from error
    _check(folder, config)
    halves: dict[str, dict[str, tuple[np.ndarray, bool]]] = {}
    saved, magnitudes = {}, {}
    for name, values in tensors.items():
        match = _PAIR.fullmatch(name.removeprefix(_PREFIX))
        if found := _MAGNITUDES.fullmatch(name.removeprefix(_PREFIX)):
            magnitudes[found[1]] = values
        elif match is None:
            saved[_WRAPPERS.sub("", name.removeprefix(_PREFIX))] = values
        else:
            halves.setdefault(match["module"], {})[match["side"]] = (values, bool(match["embedding"]))
    single = [module for module, sides in halves.items() if len(sides) < 2]
    if single or not (halves or saved):
        problem = f"only one matrix of a pair:\n{listing(single)}" if single else "no matrices"
        raise CheckpointError(f"the adapter in {folder} has {problem}")
    pairs = {module: (sides["A"][0], sides["B"][0], sides["A"][1]) for module, sides in halves.items()}
    adapter = Adapter(
        where=str(folder),
        pairs=pairs,
        saved=saved,
        rank=config["r"],
        alpha=config["lora_alpha"],
        rslora=bool(config.get("use_rslora")),
        fan_in_first=bool(config.get("fan_in_fan_out")),
        rank_pattern=config.get("rank_pattern") or {},
        alpha_pattern=config.get("alpha_pattern") or {},
        magnitudes=magnitudes,
    )
    _check_magnitudes(adapter, bool(config.get("use_dora")))
    wrong = [
        f"{module}: A has rank {a.shape[0]}, {CONFIG} has {adapter.rank_of(module)}"
        for module, (a, _, _) in pairs.items()
        if a.ndim == 2 and a.shape[0] != adapter.rank_of(module)
    ]
    if wrong:  # the scale would be wrong too
        raise CheckpointError(f"the adapter in {folder} has ranks that differ from its settings:\n{listing(wrong)}")
    return adapter


def _check_magnitudes(adapter: Adapter, dora: bool) -> None:
    """Check that each pair has magnitudes if the adapter is one of DoRA, and none if it is not.

    Raises:
        CheckpointError: some are missing, unexpected or of another shape.
    """
    wrong = [f"{module}: no pair, or not one of DoRA" for module in adapter.magnitudes if module not in adapter.pairs]
    for module, (_, b, embedding) in adapter.pairs.items():
        found = adapter.magnitudes.get(module)
        if dora != (found is not None) or (found is not None and (embedding or found.shape != b.shape[:1])):
            have = "no magnitudes" if found is None else f"magnitudes of shape {list(found.shape)}"
            wrong.append(f"{module}: {have}, and use_dora is {dora}" + (" for an embedding" if embedding else ""))
    if wrong:
        raise CheckpointError(f"the adapter in {adapter.where} cannot be used:\n{listing(wrong)}")


def _check(folder: Path, config: Any) -> None:
    """Check that the settings are supported.

    Raises:
        CheckpointError: they are of another kind of adapter, or damaged.
    """
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / CONFIG} is not as PEFT writes it: it has no JSON object of settings")
    settings = cast(dict[str, Any], config)
    kind = settings.get("peft_type", "LORA")
    off = (None, False, "none", {}, [])
    unsupported = [f"{name}={settings[name]!r}" for name in _UNSUPPORTED if settings.get(name) not in off]
    if kind != "LORA" or unsupported:
        what = f"peft_type={kind!r}" if kind != "LORA" else ", ".join(unsupported)
        raise CheckpointError(
            f"the adapter in {folder} has {what}: only LoRA, rank-stabilized LoRA and DoRA can be merged"
        )
    initialization = settings.get("init_lora_weights")
    if isinstance(initialization, str) and initialization.lower().startswith(_BASE_CHANGED):
        raise CheckpointError(
            f"the adapter in {folder} has init_lora_weights={initialization!r}: it was trained on changed weights of "
            "the base, so it does not fit the base itself. Unless it is LoftQ, convert it to plain LoRA with PEFT: "
            "save_pretrained with path_initial_model_for_weight_conversion."
        )
    wrong = _wrong_settings(settings)
    if wrong:
        raise CheckpointError(f"{folder / CONFIG} is not as PEFT writes it:\n{listing(wrong)}")


def _wrong_settings(config: Mapping[str, Any]) -> list[str]:
    """Return a line for each invalid rank, scale and switch."""
    wrong = []
    for default, patterns, is_valid, what in (
        ("r", "rank_pattern", _is_rank, "a whole number of at least 1"),
        ("lora_alpha", "alpha_pattern", _is_finite, "a finite number"),
    ):
        if not is_valid(config.get(default)):
            wrong.append(f"{default} is {config.get(default)!r}; it must be {what}")
        table = config.get(patterns) or {}
        if not isinstance(table, dict):
            wrong.append(f"{patterns} is {table!r}; it must be an object of modules")
            continue
        for name, value in cast(dict[str, Any], table).items():
            if not is_valid(value):
                wrong.append(f"{patterns} has {name!r}: {value!r}; it must be {what}")
            try:
                re.compile(_expression(name))
            except (re.error, OverflowError) as error:
                wrong.append(f"{patterns} has {name!r}, which is not a regular expression: {error}")
    for name in ("use_rslora", "fan_in_fan_out"):
        if config.get(name) not in (None, True, False):
            wrong.append(f"{name} is {config[name]!r}; it must be true or false")
    return wrong


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_finite(value: Any) -> bool:
    """Return whether a number is in the range of float32, the type of the sums."""
    largest = float(np.finfo(np.float32).max)
    return isinstance(value, int | float) and not isinstance(value, bool) and -largest <= value <= largest


def read_model(folder: Path) -> Model:
    """Return a model from one safetensors file, or several with an index, with the other JSON files of the folder.

    Raises:
        CheckpointError: the folder has no model, or it cannot be read.
    """
    try:
        tensors, metadata = safetensors.read(folder), safetensors.metadata(folder)
        files = {file.name: file.read_bytes() for file in sorted(folder.glob("*.json")) if file.name != INDEX}
        for content in files.values():
            json.loads(content)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no model: there is no {Path(error.filename).name}") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"the model in {folder} cannot be read: {error}") from error
    return Model(tuple(tensors), files, str(folder), fan_in_first=metadata.get(FAN_IN) == "first")


def merge_adapter(base: Model, adapter: Adapter) -> Model:
    """Return the base merged with an adapter. Sums are computed in float32 and cast to the base's dtypes.

    Raises:
        MismatchError: the adapter is for another base; lists every module that does not match.
        CheckpointError: weights of the base are codes of a quantized model, to which nothing can be added.
    """
    by_name = {one.name: one for one in base.tensors}
    adapter = replace(adapter, fan_in_first=adapter.fan_in_first or base.fan_in_first)
    edits: dict[str, list[Callable[[np.ndarray], None]]] = {}
    wrong = []
    for module, values in adapter.saved.items():
        name, index = _place(module.removesuffix(".weight"), by_name)
        shape = _shape_at(by_name.get(name), index)
        if shape != values.shape:
            have = "no such tensor" if shape is None else list(shape)
            wrong.append(f"{module}: the base has {have}, the adapter {list(values.shape)}")
            continue
        edits.setdefault(name, []).append(_replacement(by_name[name], index, values))
    for module in adapter.pairs:
        name, index = _place(module, by_name)
        shape = _shape_at(by_name.get(name), index)
        mismatch = "the base has no such weight" if shape is None else adapter.mismatch(module, shape)
        if mismatch is not None:
            wrong.append(f"{module}: {mismatch}")
            continue
        edits.setdefault(name, []).append(_sum(by_name[name], index, adapter, module))
    if wrong:
        raise MismatchError(
            f"the adapter in {adapter.where} is for another base than {base.where}: {len(wrong)} of "
            f"{len(adapter.pairs) + len(adapter.saved)} modules do not match:\n{listing(wrong)}"
        )
    if coded := [f"{name}: {by_name[name].dtype}" for name in edits if by_name[name].dtype not in _SUMMED]:
        raise CheckpointError(
            f"{base.where} is quantized, and an adapter cannot be added to codes: export a plain model by `autoshard "
            f"ckpt import MODEL RUN` and `autoshard ckpt export RUN PLAIN`, then merge into that:\n{listing(coded)}"
        )
    tensors = tuple(_edited(one, edits[one.name]) if one.name in edits else one for one in base.tensors)
    return replace(base, tensors=tensors, where=f"{base.where} and {adapter.where}")


def _place(module: str, names: Container[str]) -> tuple[str, tuple[int, ...]]:
    """Return the name of a module's weight in the base, and its index in a stack of layers or experts.

    >>> _place("blocks.3.attention.wq", ["blocks.attention.wq"])
    ('blocks.attention.wq', (3,))
    >>> _place("blocks.3.attention.wq", ["blocks.3.attention.wq.weight"])
    ('blocks.3.attention.wq.weight', ())
    """
    levels = module.split(".")
    numbers = [position for position, level in enumerate(levels) if level.isdecimal()]
    for count in range(len(numbers) + 1):
        for stacked in itertools.combinations(numbers, count):
            stem = ".".join(level for position, level in enumerate(levels) if position not in stacked)
            for name in (f"{stem}.weight", stem):
                if name in names:
                    return name, tuple(int(levels[position]) for position in stacked)
    return module, ()


def _shape_at(tensor: Tensor | None, index: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape of a tensor at an index of its leading dimensions; None if it has no such index."""
    if tensor is None or len(tensor.shape) < len(index):
        return None
    in_range = all(number < size for number, size in zip(index, tensor.shape, strict=False))
    return tensor.shape[len(index) :] if in_range else None


def _sum(tensor: Tensor, index: tuple[int, ...], adapter: Adapter, module: str) -> Callable[[np.ndarray], None]:
    """Return an edit that merges a module's adapter at an index of the tensor."""

    def edit(values: np.ndarray) -> None:
        values[index] = cast_values(tensor.name, adapter.merged(module, values[index]), tensor.dtype)

    return edit


def _replacement(tensor: Tensor, index: tuple[int, ...], new: np.ndarray) -> Callable[[np.ndarray], None]:
    def edit(values: np.ndarray) -> None:
        values[index] = cast_values(tensor.name, new, tensor.dtype)

    return edit


def _edited(tensor: Tensor, edits: Sequence[Callable[[np.ndarray], None]]) -> Tensor:
    def read() -> np.ndarray:
        values = np.array(tensor.read())
        for edit in edits:
            edit(values)
        return values

    return replace(tensor, read=read)
