"""Where metrics go besides the run's JSON lines: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import importlib
import importlib.util
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tensorboardX import SummaryWriter

from autoshard._shown import shown
from autoshard.errors import ConfigError
from autoshard.train.config import run_directory

# Name of the Weights & Biases project and of the MLflow experiment, unless an environment variable of theirs gives one.
PROJECT = "autoshard"
STEP = "step"  # the metric of Weights & Biases that counts steps


@shown
class MetricWriter(Protocol):
    """Writes the metrics of steps."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of a step."""

    def rewind(self, step: int) -> None:
        """Drop the metrics of the steps after `step`, where the service can. They are trained again."""

    def close(self) -> None:
        """Write the metrics that are still buffered, and end the recording."""


class _TensorBoard:
    def __init__(self, run_dir: Path, settings: Mapping[str, Any], start: int) -> None:
        self._folder = str(run_dir / run_directory.TENSORBOARD)
        self._open(start)  # also at step 0: an earlier attempt may have ended before its first checkpoint

    def _open(self, start: int) -> None:
        self._board = SummaryWriter(self._folder, purge_step=start + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def rewind(self, step: int) -> None:
        self.close()
        self._open(step)

    def close(self) -> None:
        self._board.close()


class _WeightsAndBiases:
    def __init__(self, run_dir: Path, settings: Mapping[str, Any], start: int) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            project=PROJECT,
            id=_kept_name(run_dir / "wandb_id", lambda: secrets.token_hex(8)),
            name=run_dir.name,
            dir=str(run_dir),
            config=dict(settings),
            resume="allow",  # a resumed run continues the same curves
        )
        # The service has a step counter that only rises. If a run repeats steps, it ignores their records. So the
        # step is logged as a metric, and this metric is the horizontal axis of all others.
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({STEP: step, **values})

    def rewind(self, step: int) -> None:
        """The service keeps both records of a step."""

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, run_dir: Path, settings: Mapping[str, Any], start: int) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        file, environment = run_dir / "mlflow_id", self._mlflow.environment_variables
        if not environment.MLFLOW_TRACKING_URI.get():
            self._mlflow.set_tracking_uri(f"sqlite:///{(run_dir / 'mlflow.db').resolve()}")
        if not environment.MLFLOW_EXPERIMENT_NAME.get():
            self._mlflow.set_experiment(PROJECT)
        if file.exists():
            self._mlflow.start_run(run_id=file.read_text())
        else:
            run = self._mlflow.start_run(run_name=run_dir.name)
            _kept_name(file, lambda: run.info.run_id)
            self._mlflow.log_params(_flat(settings))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def rewind(self, step: int) -> None:
        """The service keeps both records of a step."""

    def close(self) -> None:
        self._mlflow.end_run()


_WRITERS: Mapping[str, tuple[str, Callable[[Path, Mapping[str, Any], int], MetricWriter]]] = {
    "tensorboard": ("tensorboardX", _TensorBoard),
    "wandb": ("wandb", _WeightsAndBiases),
    "mlflow": ("mlflow", _MLflow),
}


def check_writers(names: Sequence[str]) -> None:
    """Check that each name is that of a writer, and that the writer's package is installed.

    Raises:
        ConfigError: A name is unknown, or a package is not installed.
    """
    for name in names:
        if name not in _WRITERS:
            raise ConfigError(f"metrics {name!r} is unknown: give some of {', '.join(_WRITERS)}, or none")
        package = _WRITERS[name][0]
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"metrics {name} needs the package {package}: pip install 'autoshard[{name}]', or leave {name} out"
            )


def open_writers(names: Sequence[str], run_dir: Path, settings: Mapping[str, Any], start: int) -> list[MetricWriter]:
    """Open the writers of a run.

    Args:
        names: Names of writers.
        run_dir: Folder of the run. It keeps the run's identifiers in Weights & Biases and MLflow, so that a resumed run
            continues its curves there.
        settings: Settings of the run, as nested dictionaries.
        start: Step from which the run continues; 0 for a new run.
    """
    return [_WRITERS[name][1](run_dir, settings, start) for name in names]


def _kept_name(file: Path, make: Callable[[], str]) -> str:
    """Return the text of a file. If the file does not exist, write the text that `make` returns."""
    if not file.exists():
        file.write_text(make())
    return file.read_text()


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one dictionary with dotted names."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found
