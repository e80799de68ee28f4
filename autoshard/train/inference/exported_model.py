"""Rebuild a model from a folder of checkpoints, or of an exported model, and generate text with it.

DIR/inference.json     the model's class and architecture, its dtype, maximum length, sampling defaults and tokenizer
DIR/tokenizer.json     a copy of the tokenizer's file, unless tokens are bytes

No other file of a run is read, neither its config nor a script. Nothing that the file names is imported: only the
models in `MODELS` are rebuilt, and the model of a factory that the caller names.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import autoshard
from autoshard._shown import shown
from autoshard.ckpt import Checkpointer
from autoshard.ckpt.exchange.export import INFERENCE_FILE, INFERENCE_FORMAT, TOKENIZER_FILE
from autoshard.ckpt.state.target_shardings import with_shardings
from autoshard.errors import AutoshardWarning, ConfigError
from autoshard.models import GPT, GPTConfig, MoE, MoEConfig
from autoshard.models.sample import sample_tokens
from autoshard.sharding.planner.notes.idle_devices import IDLE_DEVICES
from autoshard.train.config.run_directory import checkpoints_in
from autoshard.train.config.train_config import TrainConfig
from autoshard.train.data.tokenizer import Codec, load_codec
from autoshard.train.inference.saved_parameters import ExportedParameters, StepParameters, has_exported
from autoshard.train.program.build import factory_builder
from autoshard.train.step.train_state import Program, fill_streams

FILE, FORMAT = INFERENCE_FILE, INFERENCE_FORMAT


def _moe_config(*, gpt: Mapping[str, Any], **fields: Any) -> MoEConfig:
    return MoEConfig(GPTConfig(**gpt), **fields)


MODELS: Mapping[str, tuple[type[nnx.Module], Callable[..., Any]]] = {
    "gpt": (GPT, GPTConfig),
    "moe": (MoE, _moe_config),
}
"""Class and config of each model that can be rebuilt, by its name in `inference.json`."""


@shown
@dataclass(frozen=True)
class Inference:
    """The content of `inference.json`.

    Attributes:
        model: a name in `MODELS`, or the trainer's `package.module:factory`.
        config: fields of the model's config.
        dtype: dtype of the computation.
        max_length: maximum sequence length, in tokens.
        generation: the defaults `temperature`, `top_k`, and `use_ema` (whether to use the parameters' moving average).
        tokenizer: `{"kind": "bytes"}`, or `{"kind": "file", "file": ..., "sha256": ...}`.
        format: version of the file format.
    """

    model: str
    config: Mapping[str, Any]
    dtype: str
    max_length: int
    generation: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Mapping[str, Any] = field(default_factory=lambda: {"kind": "bytes"})
    format: int = FORMAT


def inference_of(config: TrainConfig, program: Program) -> Inference:
    """Describe a run's model. A model made by a user's factory is described by name if its class is in `MODELS`."""
    tokenizer: dict[str, Any] = {"kind": "bytes"}
    if config.tokenizer_file is not None:
        digest = hashlib.sha256(config.tokenizer_file.read_bytes()).hexdigest()
        tokenizer = {"kind": "file", "file": TOKENIZER_FILE, "sha256": digest}
    name, cfg = config.model_name, config.gpt
    if name not in MODELS:  # a user's factory, which may return one of these models
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
    """Write `inference.json` and the tokenizer next to a run's checkpoints. Files that are up to date stay.

    Raises:
        ConfigError: A file cannot be written.
    """
    try:
        if config.tokenizer_file is not None:
            _write_if_changed(folder / TOKENIZER_FILE, config.tokenizer_file.read_bytes())
        _write_if_changed(folder / FILE, (json.dumps(asdict(inference_of(config, program)), indent=1) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"{str(folder)!r} cannot be written: {error}") from error


def _write_if_changed(file: Path, content: bytes) -> None:
    if file.exists() and file.read_bytes() == content:
        return
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.write_bytes(content)
    draft.replace(file)


def read_inference(folder: Path) -> Inference:
    """Read the description of the model in a folder of checkpoints.

    Raises:
        ConfigError: The file is missing, damaged, or of a newer format.
    """
    file = folder / FILE
    try:
        data = json.loads(file.read_text())
        if data["format"] > FORMAT:
            raise ConfigError(
                f"{file} has format {data['format']}, but this version reads formats up to {FORMAT}: upgrade autoshard"
            )
        problems = _problems(data)
        if problems:
            raise ConfigError(f"{file} is damaged: {'; '.join(problems)}")
        return Inference(**{entry.name: data[entry.name] for entry in fields(Inference)})
    except ConfigError:
        raise
    except FileNotFoundError as error:
        if has_exported(folder):
            raise ConfigError(
                f"{str(folder)!r} has tensors, but no {FILE} that describes the model: export it again from the "
                "checkpoints of a run of `autoshard train`"
            ) from error
        raise ConfigError(
            f"{str(folder)!r} has no {FILE}, so there is no model to generate text with: give the folder of a run, of "
            "its checkpoints, or of a model that `autoshard ckpt export` wrote"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is damaged: {type(error).__name__}: {error}") from error


def _problems(data: Mapping[str, Any]) -> list[str]:
    """List the invalid values of the file."""
    if not all(isinstance(data[part], dict) for part in ("config", "generation", "tokenizer")):
        return ["config, generation and tokenizer must be tables"]
    generation, tokenizer = data["generation"], data["tokenizer"]
    temperature, top_k, use_ema = (generation.get(name) for name in ("temperature", "top_k", "use_ema"))
    kind, digest = tokenizer.get("kind"), tokenizer.get("sha256")
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    count = isinstance(top_k, int) and not isinstance(top_k, bool)
    checks = (
        (isinstance(data["model"], str), f"model is {data['model']!r}; it must be a name"),
        (number and 0 <= temperature < math.inf, f"temperature is {temperature!r}; it must be at least 0 and finite"),
        (top_k is None or (count and top_k > 0), f"top_k is {top_k!r}; it must be null or at least 1"),
        (use_ema in (None, True, False), f"use_ema is {use_ema!r}; it must be true or false"),
        (kind in ("bytes", "file"), f"the tokenizer's kind is {kind!r}; it must be 'bytes' or 'file'"),
        (kind != "file" or isinstance(digest, str), f"the tokenizer's sha256 is {digest!r}; it must be a text"),
    )
    return [message for valid, message in checks if not valid]


@shown
@dataclass(frozen=True)
class TextGenerator:
    """A model that generates text on the attached devices.

    Attributes:
        model: the model, with shapes in place of arrays.
        inference: its description.
        codec: encodes and decodes text.
        parameters: loads its parameters with the shardings of a tree of shapes.
        vocab: number of tokens.
    """

    model: Any
    inference: Inference
    codec: Codec
    parameters: StepParameters | ExportedParameters
    vocab: int

    def generate(
        self, prompt: str, tokens: int, *, seed: int = 0, temperature: float | None = None, top_k: int | None = None
    ) -> tuple[str, Any]:
        """Continue a prompt.

        Args:
            prompt: text to continue.
            tokens: number of tokens to add.
            seed: random seed.
            temperature: divisor of the logits; 0 always takes the most likely token. Default: the file's.
            top_k: sample from this many of the most likely tokens. Default: the file's.

        Returns:
            The text, and the plan that it was generated under.

        Raises:
            ConfigError: the prompt is empty, or `top_k` exceeds the vocabulary.
        """
        temperature = self.inference.generation["temperature"] if temperature is None else temperature
        top_k = self.inference.generation.get("top_k") if top_k is None else top_k
        start = self.codec.encode(prompt).astype(np.int32)
        if not len(start):
            raise ConfigError("the prompt is empty: give at least one character")
        vocab = self.vocab
        if top_k is not None and top_k > vocab:
            raise ConfigError(
                f"top-k is {top_k}, but the model's vocabulary has {vocab} tokens: give at most that number"
            )
        graph, streams, abstract = nnx.split(self.model, nnx.RngState, ...)
        stream_shapes = nnx.to_pure_dict(streams)
        greedy = temperature == 0.0

        def continued(params: Any, prompt: jax.Array, key: jax.Array, temperature: jax.Array) -> jax.Array:
            model: Any = nnx.merge(graph, fill_streams(stream_shapes, key), params)
            model.eval()
            options: dict[str, Any] = {"n": tokens, "top_k": top_k, "greedy": greedy}
            return sample_tokens(model, prompt, key, temperature, context=self.inference.max_length, **options)

        params = nnx.to_pure_dict(abstract)
        rest = (
            jnp.asarray(start[None]),
            jax.random.key(seed),
            jnp.float32(1.0 if greedy else temperature),
        )
        step = autoshard.auto_shard(continued)
        with warnings.catch_warnings():  # one prompt may give too little work for all devices
            warnings.filterwarnings("ignore", IDLE_DEVICES, AutoshardWarning)
            plan = step.plan(params, *rest)
        placed = with_shardings(params, plan.in_shardings()[0])
        found = np.asarray(jax.device_get(step(self.parameters(placed), *rest)))[0]
        return self.codec.decode(found), plan


def open_generator(
    folder: Path, step: int | None = None, *, use_ema: bool | None = None, factory: str | None = None
) -> TextGenerator:
    """Open the model of a folder of checkpoints, or an exported one.

    Args:
        folder: folder of checkpoints, or of a run that has them, or what `ckpt export` wrote.
        step: step to load; by default the newest intact one.
        use_ema: whether to use the moving average of the parameters; by default as the file says.
        factory: `package.module:function` that makes the model, if it is not built in. It is imported and called. A
            name that only the file gives is never imported.

    Raises:
        AutoshardError: There is no model, it cannot generate text, or the step does not exist.
    """
    folder = checkpoints_in(folder)
    inference = read_inference(folder)
    model, vocab = _model(folder, inference, factory)
    codec = _codec(folder, inference)
    if has_exported(folder):
        given = [name for name, value in (("--step", step), ("--use-ema", use_ema)) if value not in (None, False)]
        if given:
            raise ConfigError(
                f"{str(folder)!r} is an exported model with one set of parameters: leave out {' and '.join(given)}"
            )
        return TextGenerator(model, inference, codec, ExportedParameters(folder), vocab)
    checkpoints = Checkpointer(folder, keep=None)
    if not checkpoints.steps():
        raise ConfigError(f"{str(folder)!r} has no checkpoint yet: wait for the first save, or give another folder")
    if step is not None:
        checkpoints.describe(step)
    default = bool(inference.generation.get("use_ema"))
    averages = default if use_ema is None else use_ema
    parameters = StepParameters(checkpoints, step, averages, or_parameters=use_ema is None)
    return TextGenerator(model, inference, codec, parameters, vocab)


def _model(folder: Path, inference: Inference, factory: str | None) -> tuple[nnx.Module, int]:
    """Return the model, with shapes in place of arrays, and the size of its vocabulary."""
    name = inference.model
    if name == "pretrained":
        raise ConfigError(
            f"the model in {str(folder)!r} is a pretrained one: `autoshard ckpt export {folder} OUT` writes it as a "
            "folder that other programs load"
        )
    if name not in MODELS:
        if factory is None:
            raise ConfigError(
                f"the model in {str(folder)!r} is {name!r}, which is not built in. If you trust that code, name it: "
                f"--model {name} imports and calls it"
            )
        vocab = inference.config.get("vocab")
        if not isinstance(vocab, int) or isinstance(vocab, bool):
            raise ConfigError(f"{folder / FILE} is damaged: vocab is {vocab!r}; it must be an integer")
        build = factory_builder(factory, vocab=vocab, context=inference.max_length)
        return nnx.eval_shape(lambda: build(nnx.Rngs(0))), vocab
    if factory is not None:
        raise ConfigError(f"the model in {str(folder)!r} is {name!r}, which is built in: leave out --model")
    kind, config_kind = MODELS[name]
    try:
        config = config_kind(**inference.config)
        return nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0))), config.vocab  # pyright: ignore[reportCallIssue]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{folder / FILE}: the architecture does not fit this version: {error}") from error


def _codec(folder: Path, inference: Inference) -> Codec:
    if inference.tokenizer["kind"] == "bytes":
        return load_codec(None)
    file = folder / TOKENIZER_FILE  # a fixed name, not a path from the file, which need not be trusted
    codec = load_codec(file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != inference.tokenizer["sha256"]:
        raise ConfigError(f"{file} is not the tokenizer that the model was trained with: its SHA-256 is {digest}")
    return codec
