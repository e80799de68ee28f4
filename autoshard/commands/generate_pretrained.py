"""`autoshard generate` of a pretrained folder, or of a run that started from one."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from autoshard.commands.arguments import check_writable
from autoshard.errors import ConfigError

CONFIG, CHECKPOINTS, KEPT = "config.json", "checkpoints", "pretrained"
RUN_FILES = ("inference.json", CHECKPOINTS)
SETTINGS = ("top_p", "min_p", "repetition_penalty")


def is_pretrained(folder: Path) -> bool:
    """Return whether a folder has a pretrained model, perhaps without its weights, and not a run's."""
    try:
        if not (folder / CONFIG).is_file() or any((folder / name).exists() for name in RUN_FILES):
            return False
        if any(folder.glob("*.safetensors*")):  # a damaged config is reported when it is read
            return True
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "architectures" in config


def is_pretrained_run(folder: Path) -> bool:
    """Return whether a folder is that of a run that started from a pretrained folder, or of its checkpoints."""
    try:
        run = folder if (folder / CHECKPOINTS).is_dir() else folder.parent
        return (run / KEPT / CONFIG).is_file() and (run / CHECKPOINTS).is_dir() and folder in (run, run / CHECKPOINTS)
    except (OSError, ValueError):
        return False


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options that need a pretrained folder."""
    group = options.add_argument_group("options for a pretrained folder")
    group.add_argument("--top-p", type=float, help="sample from the most likely tokens with this probability together")
    group.add_argument(
        "--min-p", type=float, help="sample from tokens with at least this fraction of the highest probability"
    )
    group.add_argument("--repetition-penalty", type=float, help="above 1: repeat fewer tokens (default: 1)")
    group.add_argument("--stop", action="append", metavar="TEXT", help="text that ends the answer; can be repeated")
    group.add_argument(
        "--image", action="append", type=Path, metavar="FILE", help="image of the prompt, in order; can be repeated"
    )
    group.add_argument("--chat", action="store_true", help="the prompt is a user's message: use the chat template")
    group.add_argument("--file", type=Path, metavar="PROMPTS", help="JSON lines with a prompt or messages each")
    group.add_argument("--out", type=Path, metavar="REPLIES", help="JSON lines of replies; lines that it has are kept")
    group.add_argument("--rows", type=int, help="number of prompts that are continued at a time (default: 8)")
    group.add_argument("--length", type=int, help="positions of a prompt and its text (default: the context)")
    group.add_argument(
        "--keep-codes", action="store_true", help="keep the weights of a quantized folder as codes: less memory"
    )
    group.add_argument("--plan", metavar="WORDS", help="plan to use, such as tp:4 (default: the best that is found)")


def given_options(given: argparse.Namespace) -> list[str]:
    """Return the options in use that need a pretrained folder."""
    names = (*SETTINGS, "stop", "image", "chat", "file", "out", "rows", "length", "plan", "keep_codes")
    return [f"--{name.replace('_', '-')}" for name in names if getattr(given, name) not in (None, False)]


def run_pretrained(given: argparse.Namespace) -> int:
    """Continue a prompt and print the text as it comes, or those of a file.

    Raises:
        AutoshardError: an option is invalid or does not apply, or the model cannot be read.
    """
    is_run = is_pretrained_run(given.run_dir)
    others = {} if is_run else {"--step": given.step, "--use-ema": given.use_ema}
    problems = [f"{name} is for runs of the trainer" for name, value in others.items() if value is not None]
    if is_run and given.keep_codes:
        problems.append("--keep-codes is for quantized folders, and a run has decoded weights: leave it out")
    if given.model is not None:
        problems.append("--model is for runs whose model a factory makes")
    if (given.file is None) != (given.out is None):
        problems.append("--file and --out are given together")
    if given.file is not None and given.prompt is not None:
        problems.append("--prompt and --file exclude each other")
    if given.file is not None and given.image:
        problems.append('--image and --file exclude each other: a line of the file has "images"')
    if problems:
        raise ConfigError("; ".join(problems) + f". {str(given.run_dir)!r} is a pretrained folder")
    from autoshard.serve.sampling import Sampling

    settings: dict[str, Any] = {name: value for name in SETTINGS if (value := getattr(given, name)) is not None}
    temperature = 0.0 if given.temperature is None else given.temperature
    sampling = Sampling(temperature, given.top_k or 0, seed=given.seed, **settings)
    check_writable("--out", given.out)
    from autoshard.serve.generator import load_generator
    from autoshard.serve.prompt_file import read_prompts, reply_to_file
    from autoshard.serve.prompts import user_message

    prompts = None if given.file is None else read_prompts(given.file, chat=given.chat)
    rows = given.rows if given.rows is not None else 1 if prompts is None else None
    chosen: dict[str, Any] = {"rows": rows, "length": given.length, "plan": given.plan}
    text, images = "\n" if given.prompt is None else given.prompt, given.image or []
    prompt = [user_message(text, len(images))] if given.chat else text
    own = {name: value for name, value in chosen.items() if value is not None}
    if prompts is None:
        own["check"] = lambda reader: reader.read(prompt, images)
    if is_run:
        generator = _run_generator(given, own)
    else:
        generator = load_generator(given.run_dir, keep_codes=given.keep_codes, **own)
    if given.show_plan:
        print(generator.engine.plan)
    options: dict[str, Any] = {"max_tokens": given.tokens, "sampling": sampling, "stop": given.stop or ()}
    if prompts is not None:
        written = reply_to_file(generator, prompts, given.out, **options)
        print(f"{written} replies written to {given.out}, {len(prompts) - written} were there")
        return 0
    if not given.chat and not images:
        print(text, end="", flush=True)

    def show(_: int, piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    generator.generate([prompt], images=[images], on_text=show, **options)
    print()
    return 0


def _run_generator(given: argparse.Namespace, options: dict[str, Any]) -> Any:
    """Open the model of a run, with its adapters."""
    from autoshard.models.pretrained.folder import Folder
    from autoshard.serve.generator import TOKENIZER, Opened, make_generator
    from autoshard.train.config.run_directory import checkpoints_in
    from autoshard.train.inference.pretrained_export import pretrained_run
    from autoshard.train.inference.pretrained_model import open_run_model

    checkpoints = checkpoints_in(given.run_dir)
    config = pretrained_run(checkpoints)
    assert config is not None and config.model_folder is not None
    found = open_run_model(config, checkpoints, given.step, given.use_ema)
    file = config.tokenizer_file or config.model_folder / TOKENIZER
    opened, folder = Opened(found.graph, found.shapes, found.read), Folder.open(config.model_folder)
    return make_generator(folder, file, found.model, lambda: opened, source=found.source, **options)
