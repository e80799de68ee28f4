"""Greedy text of a random model by `autoshard.serve` and by transformers, in one process, from the same prompts.

All rows are continued at a time. transformers runs as `generate` does by default: eager PyTorch with scaled-dot-product
attention and a growing cache. Its prompts are padded on the left, as its documents say.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.models.pretrained.load import load_pretrained
from autoshard.serve.engine import Engine, Request

PAD = 0  # no prompt has it


@dataclass(frozen=True)
class Case:
    """A random model and its prompts.

    Attributes:
        config: the name of a config class of transformers.
        sizes: its arguments.
        dtype: of the weights and of compute, such as `float32`.
        lengths: the number of tokens of each prompt.
        new: the number of tokens to add to each.
    """

    config: str
    sizes: dict[str, Any]
    dtype: str
    lengths: Sequence[int]
    new: int

    @property
    def tokens(self) -> int:
        """The number of new tokens of one run."""
        return len(self.lengths) * self.new

    @property
    def name(self) -> str:
        """`Llama of 8 layers of 512, 4 rows`."""
        family, layers = self.config.removesuffix("Config"), self.sizes["num_hidden_layers"]
        return f"{family} of {layers} layers of {self.sizes['hidden_size']}, {len(self.lengths)} rows"


class Pair:
    """Both programs for one case, with the same weights and prompts.

    Args:
        case: the case.
        device: PyTorch's device: `cpu` or `cuda`. JAX runs on its default device.
    """

    def __init__(self, case: Case, device: str):
        import torch  # pyright: ignore[reportMissingImports]  only these benchmarks need it
        import transformers  # pyright: ignore[reportMissingImports]  the same

        self.case, self._torch = case, torch
        torch.manual_seed(0)
        config = getattr(transformers, case.config)(**case.sizes, tie_word_embeddings=False)
        with torch.device(device):
            model: Any = transformers.AutoModelForCausalLM.from_config(config)
        self._theirs: Any = model.to(getattr(torch, case.dtype)).eval()
        rng, longest = np.random.default_rng(0), max(case.lengths)
        batch = len(case.lengths), longest + case.new
        with tempfile.TemporaryDirectory() as folder:
            self._theirs.save_pretrained(folder)
            mine: Any = load_pretrained(Path(folder), dtype=case.dtype, batch=batch)
        prompts = [rng.integers(PAD + 3, case.sizes["vocab_size"], n) for n in case.lengths]
        self._engine = Engine(mine, rows=len(prompts), length=longest + case.new, group=len(prompts))
        self._requests = [Request(tuple(map(int, prompt)), case.new) for prompt in prompts]
        padded = np.stack([np.concatenate([np.full(longest - len(p), PAD), p]) for p in prompts])
        real = np.stack([np.arange(longest) >= longest - len(p) for p in prompts]).astype(np.int64)
        self._rows, self._mask = (torch.as_tensor(each, device=device) for each in (padded, real))

    def mine(self) -> np.ndarray:
        """Return the new tokens of `autoshard.serve`, `[rows, new]`."""
        return np.asarray([found.tokens for found in self._engine.run(self._requests)])

    def theirs(self) -> np.ndarray:
        """Return the new tokens of transformers, `[rows, new]`."""
        with self._torch.no_grad():
            found = self._theirs.generate(
                self._rows, attention_mask=self._mask, max_new_tokens=self.case.new, min_new_tokens=self.case.new,
                do_sample=False, pad_token_id=PAD, eos_token_id=None,
            )  # fmt: skip
        return found[:, self._rows.shape[1] :].cpu().numpy()


@dataclass(frozen=True)
class Times:
    """The seconds of repeated runs, in pairs, and the share of equal tokens.

    Attributes:
        mine: of `autoshard.serve`.
        theirs: of transformers, each right after the run of the same number in `mine`.
        equal: the fraction of the new tokens that are the same.
    """

    mine: list[float]
    theirs: list[float]
    equal: float


def times(pair: Pair, repeats: int, clock: Callable[[], float] = time.perf_counter) -> Times:
    """Run both once untimed, then in turns.

    Args:
        pair: both programs.
        repeats: the number of timed runs of each.
        clock: returns seconds.
    """
    equal = float((pair.mine() == pair.theirs()).mean())
    taken: tuple[list[float], list[float]] = [], []
    for _ in range(repeats):
        for run, seconds in zip((pair.mine, pair.theirs), taken, strict=True):
            begin = clock()
            run()
            seconds.append(clock() - begin)
    return Times(*taken, equal)
