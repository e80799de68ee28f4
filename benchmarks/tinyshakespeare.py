"""Train with nanoGPT's CPU budget on Shakespeare's text, and report the validation loss on the last tenth of the file.

    python benchmarks/tinyshakespeare.py tinyshakespeare.txt

The settings are those of `autoshard train --preset shakespeare --data tinyshakespeare.txt`: 4 layers, 4 heads, width
128, context 64, batch 12, 2000 steps, bytes as tokens, one fixed seed. nanoGPT's README gives 1.88 nats per character
for this budget.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from common import Row, report

from autoshard.train.config.presets import preset
from autoshard.train.config.stored_config import to_dict
from autoshard.train.run.loop import train

PUBLISHED_LOSS = 1.88


def main() -> None:
    """Train and report."""
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/tinyshakespeare.py tinyshakespeare.txt")
    with TemporaryDirectory() as folder:
        config = replace(preset("shakespeare"), data=sys.argv[1], run_dir=Path(folder, "run"))
        result = train(config)
    assert result.evaluation is not None, f"stopped by {result.interrupted_by}"
    found = result.evaluation
    note = f"{found.tokens:,} characters, seed {config.seed}"
    rows = [Row("validation loss", found.loss, "nats/character", PUBLISHED_LOSS, note=note)]
    settings = to_dict(config)
    context = {name: settings[name] for name in ("gpt", "optimizer", "steps", "batch_size", "seed")}
    report("tinyshakespeare", rows, **context)


if __name__ == "__main__":
    main()
