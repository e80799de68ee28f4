"""`autoshard generate`: continue prompts with a run, an exported model or a pretrained folder."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from autoshard.commands.arguments import parser
from autoshard.commands.generate_pretrained import (
    add_options,
    given_options,
    is_pretrained,
    is_pretrained_run,
    run_pretrained,
)
from autoshard.errors import ConfigError


def run(arguments: Sequence[str]) -> int:
    """Sample text; see `autoshard generate --help`."""
    options = parser(
        "generate",
        "Sample text from the newest checkpoint of a run, on the attached devices. The folder of checkpoints alone is "
        "enough, or a model that `autoshard ckpt export` wrote: its inference.json describes the model. A pretrained "
        "folder, as it comes from the Hugging Face Hub, works as well, and so does a run that started from one.",
        "autoshard generate runs/mine --prompt 'def ' --tokens 300",
    )
    options.add_argument(
        "run_dir",
        metavar="FOLDER",
        type=Path,
        help="folder of the run, of its checkpoints, of an exported model, or of a pretrained one",
    )
    options.add_argument("--prompt", help="text to continue (default: a line end)")
    options.add_argument("--tokens", type=int, default=200, help="number of tokens to add (default: 200)")
    options.add_argument(
        "--temperature",
        type=float,
        help="0 always takes the most likely token (default: that of the run, 0.8; 0 for a pretrained model)",
    )
    options.add_argument("--top-k", type=int, help="sample from this many of the most likely tokens")
    options.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    options.add_argument("--step", type=int, help="step of the checkpoint to load (default: the newest)")
    options.add_argument(
        "--use-ema",
        action=argparse.BooleanOptionalAction,
        help="use the moving average of the parameters (default: as the run's evaluation did)",
    )
    options.add_argument(
        "--model",
        metavar="MODULE:FACTORY",
        help="package.module:function that makes the model of a run that was trained with --model. It is imported and "
        "called. The name in inference.json alone never is",
    )
    options.add_argument("--show-plan", action="store_true", help="also print the plan")
    add_options(options)
    given = options.parse_args(arguments)
    _check(given.tokens, given.temperature, given.top_k)
    if is_pretrained(given.run_dir) or is_pretrained_run(given.run_dir):
        return run_pretrained(given)
    if others := given_options(given):
        raise ConfigError(
            f"{', '.join(others)} need{'s' * (len(others) == 1)} a pretrained folder with config.json and safetensors "
            f"files; {str(given.run_dir)!r} is not one"
        )
    from autoshard.models.pretrained.folder import hub_hint
    from autoshard.train.inference.exported_model import open_generator

    if not given.run_dir.exists():
        raise ConfigError(
            f"{str(given.run_dir)!r} does not exist: give the folder of a run, of checkpoints or of a pretrained model"
            f"{hub_hint(given.run_dir)}"
        )
    generator = open_generator(given.run_dir, given.step, use_ema=given.use_ema, factory=given.model)
    text, plan = generator.generate(
        "\n" if given.prompt is None else given.prompt,
        given.tokens,
        seed=given.seed,
        temperature=given.temperature,
        top_k=given.top_k,
    )
    if given.show_plan:
        print(plan)
    print(text)
    return 0


def _check(tokens: int, temperature: float | None, top_k: int | None) -> None:
    """Refuse invalid numbers, all in one error, before anything is read."""
    problems = []
    if tokens < 0:
        problems.append(f"--tokens is {tokens}; it must not be negative")
    if temperature is not None and not 0 <= temperature < math.inf:
        problems.append(f"--temperature is {temperature}; it must be at least 0 and finite")
    if top_k is not None and top_k < 1:
        problems.append(f"--top-k is {top_k}; it must be at least 1: leave it out to sample from all tokens")
    if problems:
        raise ConfigError("; ".join(problems))
