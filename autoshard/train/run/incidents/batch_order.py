"""Which batch each step trains on.

Step s, counted from 0, has batch s. A rollback restores the state after c steps and leaves out the batches from that of
step c to the bad one: from step c on, every step has the batch that many places later. The rollbacks of a run are in a
file of its folder, so a resumed run has the same batches.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from autoshard._shown import shown
from autoshard.train.config import run_directory
from autoshard.train.run import distributed


@shown
@dataclass(frozen=True)
class Rollback:
    """A rollback.

    Attributes:
        bad_step: Steps done when the bad step was among them.
        step: Steps done in the state that was restored.
        first: The first batch that was left out.
        last: The last one: the batch of the bad step.
    """

    bad_step: int
    step: int
    first: int
    last: int


@shown
class BatchOrder:
    """The order of the batches of a run, with its rollbacks so far."""

    def __init__(self, run_dir: Path) -> None:
        """Read the rollbacks of a run; every process must call this.

        Raises:
            ConfigError: The processes read different files.
        """
        self._path = run_dir / run_directory.ROLLBACKS
        self.rollbacks = [Rollback(**line) for line in run_directory.read_lines(self._path)]
        distributed.check_same(f"the rollbacks in {self._path}", repr(self.rollbacks))

    def batch_of(self, step: int) -> int:
        """Return the batch of a step, which has `step` steps before it."""
        return step + sum(each.last + 1 - each.first for each in self.rollbacks if each.step <= step)

    def roll_back(self, bad_step: int, step: int) -> Rollback:
        """Leave out the batches up to that of a bad step, and record it; every process must call this.

        Args:
            bad_step: Steps done when the bad step was among them.
            step: Steps done in the restored state.
        """
        made = Rollback(bad_step, step, first=self.batch_of(step), last=self.batch_of(bad_step - 1))
        self.rollbacks.append(made)
        if distributed.is_main():
            run_directory.end_last_line(self._path)
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(made)) + "\n")
        return made
