"""Disks of limited size, as tmpfs mounts."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def own_disk(folder: Path, options: str) -> bool:
    """Mount a tmpfs on a folder; return False if that is not permitted."""
    folder.mkdir(exist_ok=True)
    if sys.platform != "linux" or shutil.which("mount") is None:
        return False
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
    return done.returncode == 0


@contextlib.contextmanager
def disk(saved: Path, options: str) -> Iterator[Path | None]:
    """Yield a copy of the intact steps on a separate tmpfs, or None if it cannot be mounted."""
    folder = saved.parent / f"disk-{os.getpid()}"
    mounted = own_disk(folder, options)
    try:
        if mounted:
            shutil.copytree(saved, folder / "run")
        yield folder / "run" if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


def remount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder.parent)], check=True, capture_output=True)
