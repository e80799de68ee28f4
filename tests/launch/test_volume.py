"""Storage for the run's folder."""

from pathlib import PurePosixPath

import pytest

from autoshard.errors import ConfigError
from autoshard.launch.volume import Volume, check_outlives, read_volume


def test_a_volume_is_a_source_and_a_path():
    assert read_volume("gs://runs/a:/mnt/runs") == Volume("gs://runs/a", PurePosixPath("/mnt/runs"))
    for text in ("runs", "runs:mnt", ":/mnt", "gs://runs"):
        with pytest.raises(ConfigError, match="write SOURCE:PATH"):
            read_volume(text)


def test_the_folder_of_a_run_is_in_the_volume():
    volume = read_volume("runs:/mnt")
    check_outlives(PurePosixPath("/mnt/mine"), volume, "gke")
    for folder in ("mine", "/mnt", "/mnt2/mine", "/mnt/../mine"):
        with pytest.raises(ConfigError, match="is not in the volume"):
            check_outlives(PurePosixPath(folder), volume, "gke")
    with pytest.raises(ConfigError, match="--on gke: the disk of a host is lost at a restart"):
        check_outlives(PurePosixPath("/mnt/mine"), None, "gke")
