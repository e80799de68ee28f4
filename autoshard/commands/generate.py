"""`autoshard generate`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from autoshard.commands.arguments import parser
from autoshard.errors import ConfigError


def run(arguments: Sequence[str]) -> int:
    """Sample; see `autoshard generate --help`."""
    options = parser(
        "generate",
        "Sample text from the newest checkpoint of a run.",
        "autoshard generate runs/mine --prompt 'def ' --tokens 300",
    )
    options.add_argument("run_dir", type=Path, help="folder of the run")
    options.add_argument("--prompt", default="\n", help="text to continue")
    options.add_argument("--tokens", type=int, default=200, help="how many tokens to add (default: 200)")
    options.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)")
    options.add_argument("--top-k", type=int, help="choose among so many likeliest tokens")
    options.add_argument("--seed", type=int, default=0, help="decides the choices (default: 0)")
    options.add_argument("--step", type=int, help="checkpoint to take (default: the newest)")
    given = options.parse_args(arguments)
    _check(given.tokens, given.temperature, given.top_k)
    from autoshard.train.restore import load_trained
    from autoshard.train.sample import sample_text
    from autoshard.train.tokens import load_codec

    trained = load_trained(given.run_dir, given.step)
    text = sample_text(
        trained.program,
        trained.state,
        load_codec(trained.config.tokenizer),
        given.prompt,
        given.tokens,
        seed=given.seed,
        temperature=given.temperature,
        top_k=given.top_k,
    )
    if text is None:
        raise ConfigError(f"--model {trained.config.model} of that run is not the built-in model: it cannot be sampled")
    print(text)
    return 0


def _check(tokens: int, temperature: float, top_k: int | None) -> None:
    """Refuse numbers that cannot be used, all at once, before anything is read."""
    problems = []
    if tokens < 0:
        problems.append(f"--tokens is {tokens}, it must not be negative")
    if not 0 <= temperature < math.inf:
        problems.append(f"--temperature is {temperature}, it must be at least 0 and finite")
    if top_k is not None and top_k < 1:
        problems.append(f"--top-k is {top_k}, it must be at least 1: leave it out to choose among all tokens")
    if problems:
        raise ConfigError("; ".join(problems))
