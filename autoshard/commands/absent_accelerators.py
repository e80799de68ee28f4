"""Keeps JAX from starting libtpu where no TPU is attached.

libtpu is installed to compile for TPUs that are not attached. JAX starts it at its first use of devices, and without a
TPU it writes several lines about that to the terminal.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pkgutil
import sys
from pathlib import Path

_GOOGLE = "0x1ae0"  # the vendor of TPUs on the PCI bus, by which JAX finds them too
_GPUS = ("nvidia0", "nvidiactl", "dxg", "kfd")  # device files of NVIDIA's and AMD's drivers
_CHOICES = ("JAX_PLATFORMS", "JAX_PLATFORM_NAME", "JAX_FORCE_TPU_INIT")


def skip_absent_accelerators(root: Path = Path("/")) -> None:
    """Choose the CPU if libtpu is installed, no accelerator is attached, and the user has not chosen a platform.

    Does nothing once JAX is imported.

    Args:
        root: the folder with the system's `dev` and `sys`.
    """
    if "jax" in sys.modules or any(os.environ.get(name) for name in _CHOICES):
        return
    if importlib.util.find_spec("libtpu") is not None and not _may_have_accelerator(root):
        os.environ["JAX_PLATFORMS"] = "cpu"


def _may_have_accelerator(root: Path) -> bool:
    """Whether a TPU or GPU is attached, or JAX has a plugin for other devices."""
    vendors = root.glob("sys/bus/pci/devices/*/vendor")
    if any(path.read_text().strip() == _GOOGLE for path in vendors):
        return True
    if any((root / "dev" / name).exists() for name in _GPUS):
        return True
    plugins = {plugin.name for plugin in importlib.metadata.entry_points(group="jax_plugins")}
    namespace = importlib.util.find_spec("jax_plugins")
    if namespace is not None:
        plugins |= {module.name for module in pkgutil.iter_modules(namespace.submodule_search_locations)}
    return any(not name.startswith(("xla_cuda", "xla_rocm")) for name in plugins)
