r"""LoRA adapters, as PEFT writes them, folded into a base.

Of a module with weight W, the adapter has :math:`A \in R^{r \times in}` and :math:`B \in R^{out \times r}`, and

.. math:: W' = W + s B A,\quad s = \alpha / r,\ \text{or}\ \alpha / \sqrt r\ \text{where it is rank-stabilised,}

with W stored `[out, in]`, or `[in, out]` (fan-in first), as Flax has it. An embedding's pair makes :math:`s (B A)^T`.

Sources: Hu et al. 2021, arXiv:2106.09685; Kalajdzievski 2023, arXiv:2312.03732; PEFT's checkpoint format,
https://huggingface.co/docs/peft/developer_guides/checkpoint.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors import SafetensorError

from autoshard._columns import listing
from autoshard._shown import shown
from autoshard.ckpt.exchange import safetensors
from autoshard.ckpt.exchange.export import Model, cast_values
from autoshard.ckpt.exchange.safetensors import INDEX, Tensor
from autoshard.errors import CheckpointError, MismatchError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PAIR = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(\.weight)?")
_WRAPPERS = re.compile(r"\.(modules_to_save|base_layer)\b")  # of a module that is trained, of an embedding with a pair
# What else would change values.
_UNKNOWN = (
    "use_dora",
    "bias",
    "lora_bias",
    "use_qalora",
    "alora_invocation_tokens",
    "layer_replication",
    "megatron_config",
)
_BASE_CHANGED = ("pissa", "olora", "corda", "loftq", "lora_ga")  # PEFT takes what such an adapter starts with from W


@shown
@dataclass(frozen=True)
class Adapter:
    """An adapter: for each module its pair of matrices, and how they are scaled.

    Attributes:
        where: its folder.
        pairs: module -> (A `[rank, in]`, B `[out, rank]`, whether it is an embedding's).
        saved: module -> a weight that takes the base's place; where it has a pair as well, that is added to it.
        rank: of a module that `rank_pattern` does not name.
        alpha: of a module that `alpha_pattern` does not name.
        rslora: whether alpha is divided by the square root of the rank.
        fan_in_first: whether the base's weights are `[in, out]`.
        rank_pattern: module or its ending -> rank.
        alpha_pattern: module or its ending -> alpha.
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

    def rank_of(self, module: str) -> int:
        """The rank that the adapter says a module's pair has."""
        return _named(self.rank_pattern, module, self.rank)

    def scale(self, module: str) -> float:
        """What a module's product is multiplied with."""
        rank, alpha = self.rank_of(module), _named(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def unfit(self, module: str, shape: tuple[int, ...]) -> str | None:
        """Why a module's pair is not one for a weight of this shape; None where it is."""
        a, b, embedding = self.pairs[module]
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            return f"A is {list(a.shape)} and B {list(b.shape)}, which do not multiply"
        first = embedding or self.fan_in_first
        rows, columns = (a.shape[1], b.shape[0]) if first else (b.shape[0], a.shape[1])
        # Flax may have the heads of a projection as dimensions of their own.
        leading = [math.prod(shape[:n]) for n in range(1, len(shape))]
        if rows in leading and math.prod(shape) == rows * columns:
            return None
        return f"the base has {list(shape)}, the adapter {[rows, columns]}, fan-{'in' if first else 'out'} first"

    def change(self, module: str, shape: tuple[int, ...]) -> np.ndarray:
        """What is added to a module's weight, float32 in the weight's shape, which fits."""
        a, b, embedding = self.pairs[module]
        product = self.scale(module) * (b.astype(np.float32) @ a.astype(np.float32))
        return (product.T if embedding or self.fan_in_first else product).reshape(shape)


def _named(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    for name, value in pattern.items():
        if module == name or module.endswith(f".{name}") or re.fullmatch(_expression(name), module):
            return value
    return default


def _expression(name: str) -> str:
    return rf"(.*\.)?({name})"


def read_adapter(folder: Path) -> Adapter:
    """An adapter that PEFT wrote.

    Raises:
        CheckpointError: it is none, it is damaged, or it changes the base in a way that is not known here.
    """
    try:
        config = json.loads((folder / CONFIG).read_text())
        with safetensors.opened(folder / WEIGHTS) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is no LoRA adapter: it has no {Path(error.filename).name}") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"the adapter in {folder} cannot be read: {error}") from error
    _check(folder, config)
    halves: dict[str, dict[str, tuple[np.ndarray, bool]]] = {}
    saved = {}
    for name, values in tensors.items():
        found = _PAIR.fullmatch(name.removeprefix(_PREFIX))
        if found is None:
            saved[_WRAPPERS.sub("", name.removeprefix(_PREFIX))] = values
        else:
            halves.setdefault(found["module"], {})[found["side"]] = (values, bool(found["embedding"]))
    single = [module for module, sides in halves.items() if len(sides) < 2]
    if single or not (halves or saved):
        told = f"one matrix of two:\n{listing(single)}" if single else "no matrices"
        raise CheckpointError(f"the adapter in {folder} has {told}")
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
    )
    other = [
        f"{module}: A has rank {a.shape[0]}, {CONFIG} says {adapter.rank_of(module)}"
        for module, (a, _, _) in pairs.items()
        if a.ndim == 2 and a.shape[0] != adapter.rank_of(module)
    ]
    if other:  # the scale would be another one, too
        raise CheckpointError(f"the adapter in {folder} has ranks that its settings do not have:\n{listing(other)}")
    return adapter


def _check(folder: Path, config: Any) -> None:
    """Refuses settings that cannot be applied.

    Raises:
        CheckpointError: they are of another kind of adapter, or not as PEFT writes them.
    """
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder / CONFIG} is not as PEFT writes it: it holds no table of settings")
    told = cast(dict[str, Any], config)
    kind = told.get("peft_type", "LORA")
    unknown = [f"{name}={told[name]!r}" for name in _UNKNOWN if told.get(name) not in (None, False, "none", {}, [])]
    if kind != "LORA" or unknown:
        what = f"peft_type={kind!r}" if kind != "LORA" else ", ".join(unknown)
        raise CheckpointError(f"the adapter in {folder} has {what}: only plain and rank-stabilised LoRA can be merged")
    start = told.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_BASE_CHANGED):
        raise CheckpointError(
            f"the adapter in {folder} has init_lora_weights={start!r}: it was trained on a base from whose weights its "
            "own first values had been taken, and does not fit the base as it is. PEFT makes plain LoRA of it, "
            "except of LoftQ: save_pretrained with path_initial_model_for_weight_conversion."
        )
    wrong = _wrong_settings(told)
    if wrong:
        raise CheckpointError(f"{folder / CONFIG} is not as PEFT writes it:\n{listing(wrong)}")


def _wrong_settings(config: Mapping[str, Any]) -> list[str]:
    """What is wrong with ranks, scales and switches, one line each."""
    wrong = []
    for default, patterns, fits, what in (
        ("r", "rank_pattern", _is_rank, "a whole number of at least 1"),
        ("lora_alpha", "alpha_pattern", _is_finite, "a finite number"),
    ):
        if not fits(config.get(default)):
            wrong.append(f"{default} is {config.get(default)!r}, it must be {what}")
        table = config.get(patterns) or {}
        if not isinstance(table, dict):
            wrong.append(f"{patterns} is {table!r}, it must be a table of modules")
            continue
        for name, value in cast(dict[str, Any], table).items():
            if not fits(value):
                wrong.append(f"{patterns} has {name!r}: {value!r}, it must be {what}")
            try:
                re.compile(_expression(name))
            except (re.error, OverflowError) as error:
                wrong.append(f"{patterns} has {name!r}, which is no regular expression: {error}")
    for name in ("use_rslora", "fan_in_fan_out"):
        if config.get(name) not in (None, True, False):
            wrong.append(f"{name} is {config[name]!r}, it must be true or false")
    return wrong


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_finite(value: Any) -> bool:
    """Whether float32 holds it, as the sums do."""
    largest = float(np.finfo(np.float32).max)
    return isinstance(value, int | float) and not isinstance(value, bool) and -largest <= value <= largest


def read_model(folder: Path) -> Model:
    """A model in safetensors files, one or several with an index; other JSON files beside it come with it.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    try:
        tensors = safetensors.read(folder)
        files = {
            file.name: json.loads(file.read_text()) for file in sorted(folder.glob("*.json")) if file.name != INDEX
        }
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} holds no model: it has no {Path(error.filename).name}") from error
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"the model in {folder} cannot be read: {error}") from error
    return Model(tuple(tensors), files, str(folder))


def merged(base: Model, adapter: Adapter) -> Model:
    """A base with an adapter folded in: sums in float32, in the base's dtypes.

    Raises:
        MismatchError: the adapter is for another base; every module that does not fit is listed.
    """
    by_name = {one.name: one for one in base.tensors}
    made = dict(by_name)
    wrong = []
    for name, values in adapter.saved.items():
        if name not in by_name or by_name[name].shape != values.shape:
            have = list(by_name[name].shape) if name in by_name else "nothing of that name"
            wrong.append(f"{name}: the base has {have}, the adapter {list(values.shape)}")
            continue
        made[name] = replace(by_name[name], read=_instead(by_name[name], values))
    for module in adapter.pairs:
        name = next((name for name in (f"{module}.weight", module) if name in by_name), None)
        if name is None:
            wrong.append(f"{module}: the base has no such weight")
            continue
        unfit = adapter.unfit(module, by_name[name].shape)
        if unfit is not None:
            wrong.append(f"{module}: {unfit}")
            continue
        made[name] = replace(made[name], read=_added(made[name], adapter, module))
    if wrong:
        raise MismatchError(
            f"the adapter in {adapter.where} is for another base than {base.where}: {len(wrong)} of "
            f"{len(adapter.pairs) + len(adapter.saved)} modules do not fit:\n{listing(wrong)}"
        )
    return replace(base, tensors=tuple(made.values()), where=f"{base.where} and {adapter.where}")


def _added(tensor: Tensor, adapter: Adapter, module: str) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        total = tensor.read().astype(np.float32) + adapter.change(module, tensor.shape)
        return cast_values(tensor.name, total, tensor.dtype)

    return read


def _instead(tensor: Tensor, values: np.ndarray) -> Callable[[], np.ndarray]:
    return lambda: cast_values(tensor.name, values, tensor.dtype)
