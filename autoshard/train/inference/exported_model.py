"""What another program needs to rebuild a model from a folder of checkpoints, and to write text with it.

DIR/inference.json     the model's class and architecture, dtype, longest sequence, how text is sampled, the tokenizer
DIR/tokenizer.json     a copy of the tokenizer's file, where tokens are not bytes

Nothing else of a run is read: no training config, no script. Nothing is imported that the file names: only models of
`MODELS` are rebuilt.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import autoshard
from autoshard._shown import shown
from autoshard.ckpt import Checkpointer, CheckpointError, CheckpointWarning, DamagedCheckpointError, Description
from autoshard.ckpt.exchange.export import INFERENCE, INFERENCE_FORMAT, PARAMETERS, TOKENIZER
from autoshard.ckpt.state.target_shardings import with_shardings
from autoshard.errors import ConfigError
from autoshard.models import GPT, GPTConfig, MoE, MoEConfig
from autoshard.models.sample import written
from autoshard.train.config.run_directory import checkpoints_in
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.data.tokenizer import Codec, load_codec
from autoshard.train.program.planned_step import shardings
from autoshard.train.step.train_state import Program

FILE, FORMAT = INFERENCE, INFERENCE_FORMAT


def _moe_config(*, gpt: Mapping[str, Any], **told: Any) -> MoEConfig:
    return MoEConfig(GPTConfig(**gpt), **told)


MODELS: Mapping[str, tuple[type[nnx.Module], Callable[..., Any]]] = {
    "gpt": (GPT, GPTConfig),
    "moe": (MoE, _moe_config),
}
"""The models that are rebuilt, by the name that `inference.json` has for them."""


@shown
@dataclass(frozen=True)
class Inference:
    """What `inference.json` says.

    Attributes:
        model: a name in `MODELS`, or what the trainer was given: `package.module:factory`.
        config: its architecture.
        dtype: what it computes in.
        max_length: its longest sequence.
        generation: `temperature`, `top_k`, and `use_ema`: whether the moving average of the parameters writes.
        tokenizer: `{"kind": "bytes"}`, or `{"kind": "file", "file": ..., "sha256": ...}`.
        format: of the file.
    """

    model: str
    config: Mapping[str, Any]
    dtype: str
    max_length: int
    generation: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Mapping[str, Any] = field(default_factory=lambda: {"kind": "bytes"})
    format: int = FORMAT


def inference_of(config: TrainConfig, program: Program) -> Inference:
    """What a run's model needs to be rebuilt: one of `MODELS`, whoever's function made it."""
    tokenizer: dict[str, Any] = {"kind": "bytes"}
    if config.tokenizer is not None:
        digest = hashlib.sha256(config.tokenizer.read_bytes()).hexdigest()
        tokenizer = {"kind": "file", "file": TOKENIZER, "sha256": digest}
    name, cfg = config.model, config.gpt
    if name not in MODELS:  # a function's, which may return one of them
        model = nnx.eval_shape(lambda: program.build(nnx.Rngs(0)))
        name = next((name for name, (kind, _) in MODELS.items() if type(model) is kind), name)
        cfg = cast(Any, model).cfg if name in MODELS else cfg
    return Inference(
        model=name,
        config=asdict(cfg),
        dtype=getattr(cfg, "gpt", cfg).dtype,
        max_length=cfg.context,
        generation={"temperature": 0.8, "top_k": None, "use_ema": bool(config.ema_decay) and config.use_ema},
        tokenizer=tokenizer,
    )


def write_inference(folder: Path, config: TrainConfig, program: Program) -> None:
    """Puts `inference.json`, and the tokenizer, beside a run's checkpoints; a file that is the same stays.

    Raises:
        ConfigError: They cannot be written.
    """
    try:
        if config.tokenizer is not None:
            _put(folder / TOKENIZER, config.tokenizer.read_bytes())
        _put(folder / FILE, (json.dumps(asdict(inference_of(config, program)), indent=1) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"{str(folder)!r} cannot be written: {error}") from error


def _put(file: Path, content: bytes) -> None:
    if file.exists() and file.read_bytes() == content:
        return
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.write_bytes(content)
    draft.replace(file)


def read_inference(folder: Path) -> Inference:
    """What a folder of checkpoints says of its model.

    Raises:
        ConfigError: It says nothing, or what it says is damaged or of a newer version.
    """
    file = folder / FILE
    try:
        data = json.loads(file.read_text())
        if data["format"] > FORMAT:
            raise ConfigError(f"{file} has format {data['format']}, this version reads up to {FORMAT}: upgrade")
        wrong = _wrong(data)
        if wrong:
            raise ConfigError(f"{file} is not as it was written: {'; '.join(wrong)}")
        return Inference(**{one.name: data[one.name] for one in fields(Inference)})
    except ConfigError:
        raise
    except FileNotFoundError as error:
        raise ConfigError(f"{str(folder)!r} has no {FILE}: it holds no model that text can be written with") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not as it was written: {type(error).__name__}: {error}") from error


def _wrong(data: Mapping[str, Any]) -> list[str]:
    """What of the file nothing can be made of."""
    if not all(isinstance(data[part], dict) for part in ("config", "generation", "tokenizer")):
        return ["config, generation and tokenizer are tables"]
    generation, tokenizer = data["generation"], data["tokenizer"]
    temperature, top_k, use_ema = (generation.get(name) for name in ("temperature", "top_k", "use_ema"))
    kind, digest = tokenizer.get("kind"), tokenizer.get("sha256")
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    count = isinstance(top_k, int) and not isinstance(top_k, bool)
    checks = (
        (isinstance(data["model"], str), f"model is {data['model']!r}, it must be a name"),
        (number and 0 <= temperature < math.inf, f"temperature is {temperature!r}, it must be at least 0 and finite"),
        (top_k is None or (count and top_k > 0), f"top_k is {top_k!r}, it must be null or at least 1"),
        (use_ema in (None, True, False), f"use_ema is {use_ema!r}, it must be true or false"),
        (kind in ("bytes", "file"), f"the tokenizer's kind is {kind!r}, it must be 'bytes' or 'file'"),
        (kind != "file" or isinstance(digest, str), f"the tokenizer's sha256 is {digest!r}, it must be a text"),
    )
    return [said for fits, said in checks if not fits]


@shown
@dataclass(frozen=True)
class Writer:
    """A model that writes text, planned for the devices that are there.

    Attributes:
        model: its static part.
        inference: what was said of it.
        codec: between text and tokens.
        checkpoints: where its parameters are.
        step: which of them; None for the newest that is intact.
        use_ema: whether the moving average of the parameters writes.
        or_parameters: whether before its first update they do themselves, as in the run's evaluations.
    """

    model: Any
    inference: Inference
    codec: Codec
    checkpoints: Checkpointer
    step: int | None
    use_ema: bool
    or_parameters: bool = False

    def write(
        self, prompt: str, tokens: int, *, seed: int = 0, temperature: float | None = None, top_k: int | None = None
    ) -> tuple[str, Any]:
        """Continue a prompt; and the plan that it was done under.

        Args:
            prompt: text to continue.
            tokens: how many tokens to add.
            seed: decides the choices.
            temperature: what logits are divided by; 0 takes the likeliest token; as the file says by default.
            top_k: choose among so many likeliest tokens; as the file says by default.

        Raises:
            ConfigError: an empty prompt, or more likeliest tokens than the vocabulary has.
        """
        temperature = self.inference.generation["temperature"] if temperature is None else temperature
        top_k = self.inference.generation.get("top_k") if top_k is None else top_k
        start = self.codec.encode(prompt).astype(np.int32)
        if not len(start):
            raise ConfigError("the prompt is empty: give at least one character")
        vocab = self.model.cfg.vocab
        if top_k is not None and top_k > vocab:
            raise ConfigError(f"top-k is {top_k}, the model's vocabulary has {vocab} tokens: take at most as many")
        graph, abstract = nnx.split(self.model)
        greedy = temperature == 0.0

        def continued(params: Any, prompt: jax.Array, key: jax.Array, temperature: jax.Array) -> jax.Array:
            model: Any = nnx.merge(graph, params)
            return written(model, prompt, key, temperature, n=tokens, top_k=top_k, greedy=greedy)

        params = nnx.to_pure_dict(abstract)
        rest = (
            jnp.asarray(start[None]),
            jax.random.key(seed),
            jnp.float32(1.0 if greedy else temperature),
        )
        step = autoshard.auto_shard(continued)
        plan = step.plan(params, *rest)
        placed = with_shardings(params, shardings(plan)[0])
        found = np.asarray(jax.device_get(step(self._parameters(placed), *rest)))[0]
        return self.codec.decode(found), plan

    def _parameters(self, like: Any) -> Any:
        """The parameters, straight onto their shardings."""
        read = partial(averaged_parameters, or_parameters=self.or_parameters) if self.use_ema else parameters
        if self.step is not None:
            return read(self.checkpoints, self.step, like)
        passed: set[int] = set()
        while steps := sorted({*self.checkpoints.steps()} - passed):
            try:
                return read(self.checkpoints, steps[-1], like)
            except DamagedCheckpointError as error:
                if len(steps) == 1:
                    raise
                warnings.warn(f"{error}\nAn earlier step is taken instead.", CheckpointWarning, stacklevel=2)
            except CheckpointError:
                if steps[-1] in self.checkpoints.steps():  # else a run that goes on has removed it
                    raise
            passed.add(steps[-1])
        raise ConfigError(f"all steps in {self.checkpoints.directory} were removed while they were read")


def parameters(checkpoints: Checkpointer, step: int, like: Any) -> Any:
    """A step's parameters, on the shardings of `like`, whatever part of the train state they are in.

    Raises:
        CheckpointError: They are not those of the model, or are damaged.
    """
    told = checkpoints.describe(step)
    return checkpoints.restore(step, {"params": like}, partial=True, rename=_others(told))["params"]


def averaged_parameters(checkpoints: Checkpointer, step: int, like: Any, *, or_parameters: bool = False) -> Any:
    """The moving average of a step's parameters, in the dtypes and on the shardings of `like`.

    Args:
        checkpoints: where the step is.
        step: which.
        like: the parameters' shapes, dtypes and shardings.
        or_parameters: take the parameters themselves before the average's first update.

    Raises:
        ConfigError: The step has none.
    """
    told = checkpoints.describe(step)
    if not _has(told, "ema/mean"):
        raise ConfigError(f"step {step} in {checkpoints.directory} has no moving average: leave out --use-ema")
    rename = {"ema/mean": "params", "ema/weight": "weight", "params": "unread"}
    rename |= _others(told)
    names = {leaf.name.removeprefix("ema/mean/") for leaf in told.leaves if leaf.name.startswith("ema/mean/")}

    def mean_like(path: Any, leaf: Any) -> Any:
        averages = jax.tree_util.keystr(path, simple=True, separator="/") in names
        return jax.ShapeDtypeStruct(leaf.shape, jnp.float32 if averages else leaf.dtype, sharding=leaf.sharding)

    wanted = {"params": jax.tree_util.tree_map_with_path(mean_like, like), "weight": jnp.float32(0)}
    state = checkpoints.restore(step, wanted, partial=True, rename=rename)
    weight = state["weight"]
    if not float(weight) > 0 and or_parameters:
        return parameters(checkpoints, step, like)
    if not float(weight) > 0:
        raise ConfigError(f"step {step} in {checkpoints.directory} has no moving average yet: leave out --use-ema")

    def corrected(path: Any, mean: Any, leaf: Any) -> Any:
        averages = jax.tree_util.keystr(path, simple=True, separator="/") in names
        return (mean / float(weight)).astype(leaf.dtype) if averages else mean

    return jax.tree_util.tree_map_with_path(corrected, state["params"], like)


def open_writer(folder: Path, step: int | None = None, *, use_ema: bool | None = None) -> Writer:
    """The model of a folder of checkpoints.

    Args:
        folder: of checkpoints, or of a run that has them.
        step: which, the newest that is intact by default.
        use_ema: whether the moving average of the parameters writes; as the file says by default.

    Raises:
        AutoshardError: There is no model, it is of no kind that can write, or there is no such step.
    """
    folder = checkpoints_in(folder)
    told = read_inference(folder)
    if told.model not in MODELS:
        raise ConfigError(
            f"the model in {str(folder)!r} is {told.model!r}, which is not a built-in one: it cannot be sampled"
        )
    kind, config_kind = MODELS[told.model]
    try:
        config = config_kind(**told.config)
        model = nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))  # pyright: ignore[reportCallIssue]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{folder / FILE}: the architecture does not fit this version: {error}") from error
    checkpoints = Checkpointer(folder, keep=None)
    if not checkpoints.steps():
        raise ConfigError(f"{str(folder)!r} holds no checkpoint yet")
    if step is not None:
        checkpoints.describe(step)
    as_told = bool(told.generation.get("use_ema"))
    codec, averages = _codec(folder, told), as_told if use_ema is None else use_ema
    return Writer(model, told, codec, checkpoints, step, averages, or_parameters=use_ema is None)


def _codec(folder: Path, told: Inference) -> Codec:
    if told.tokenizer["kind"] == "bytes":
        return load_codec(None)
    file = folder / TOKENIZER  # not what the file names
    codec = load_codec(file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != told.tokenizer["sha256"]:
        raise ConfigError(f"{file} is not the tokenizer that the model was trained with: its SHA-256 is {digest}")
    return codec


def _others(told: Description) -> dict[str, str]:
    """Renamings of the parts of a train state that are the model's beside its trained parameters."""
    return {part: "params" for part in PARAMETERS if part != "params" and _has(told, part)}


def _has(told: Description, part: str) -> bool:
    return any(leaf.name.startswith(f"{part}/") for leaf in told.leaves)
