"""Storage for the run's folder on machines whose own disks do not outlive them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from autoshard._shown import shown
from autoshard.errors import ConfigError


@shown
@dataclass(frozen=True)
class Volume:
    """Storage that every host mounts.

    Attributes:
        source: The storage: a persistent volume claim on GKE, or a bucket such as `gs://runs` for SkyPilot.
        path: Where it is mounted.
    """

    source: str
    path: PurePosixPath


def read_volume(text: str) -> Volume:
    """Read SOURCE:PATH.

    Raises:
        ConfigError: The text has another form, or PATH is not absolute.

    Example:
        >>> read_volume("gs://runs:/mnt").source
        'gs://runs'
    """
    source, _, path = text.rpartition(":")
    if not source or not path.startswith("/") or path.startswith("//"):
        raise ConfigError(f"--volume {text!r}: write SOURCE:PATH with an absolute path, such as runs:/mnt/runs")
    return Volume(source, PurePosixPath(path))


def check_outlives(run_dir: PurePosixPath, volume: Volume | None, launcher: str) -> None:
    """Check that the run's folder is in the volume, so that a restart does not lose it.

    Raises:
        ConfigError: There is no volume, or the folder is not in it.
    """
    if volume is None:
        raise ConfigError(
            f"--on {launcher}: the disk of a host is lost at a restart; give --volume SOURCE:PATH, and a --run-dir in "
            "PATH"
        )
    if volume.path not in run_dir.parents or ".." in run_dir.parts:
        raise ConfigError(f"--run-dir {str(run_dir)!r} is not in the volume: give a folder in {str(volume.path)!r}")
