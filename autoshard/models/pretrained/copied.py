"""Tensors of a folder that its model does not use. They are not loaded, but copied when the model is saved.

Examples are the layers of DeepSeek-V3 that predict further tokens. `Family.copied` names the tensors.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection

from autoshard.ckpt.exchange.safetensors import Tensor
from autoshard.errors import AutoshardError, AutoshardWarning
from autoshard.models.pretrained.families.family import Family
from autoshard.models.pretrained.folder import Folder
from autoshard.models.pretrained.quantized.scheme import cast_tensor


def copied_patterns(family: Family, folder: Folder, tensors: Collection[str]) -> dict[str, str]:
    """Return the patterns of `Family.copied` that a tensor of the folder matches, and what these tensors are.

    Args:
        family: the family of the folder's model.
        folder: the folder.
        tensors: the names of its tensors.
    """
    return {pattern: what for pattern, what in family.copied(folder.values).items() if _matching([pattern], tensors)}


def warn_of_copies(family: Family, folder: Folder, tensors: Collection[str], writer: str) -> None:
    """Warn of the tensors that are not loaded.

    Args:
        family: the family of the folder's model.
        folder: the folder.
        tensors: the names of its tensors.
        writer: what writes these tensors again, for the message.
    """
    for pattern, what in copied_patterns(family, folder, tensors).items():
        names = _matching([pattern], tensors)
        warnings.warn(
            f"{str(folder.path)!r} has {what}. The model does not use its tensors, such as {names[0]}, so they are "
            f"neither loaded nor trained. {writer} copies their values",
            AutoshardWarning,
            stacklevel=3,
        )


def copied_tensors(
    folder: Folder, patterns: Collection[str], *, coded: bool = True, dtype: str | None = None
) -> list[Tensor]:
    """Return the tensors of a folder that are copied. They are read on demand.

    Args:
        folder: the folder.
        patterns: regular expressions of their names.
        coded: whether quantized tensors stay codes and scales; otherwise they are decoded.
        dtype: dtype of the floating-point tensors if none stay codes; by default the stored one, and bfloat16 for
            decoded tensors.

    Raises:
        AutoshardError: the folder has no tensors with such names.
    """
    tensors = folder.stored_tensors() if coded else folder.tensors()
    for pattern in patterns:
        if not _matching([pattern], tensors):
            raise AutoshardError(f"{str(folder.path)!r} has no tensors whose names match {pattern!r}")
    found = [tensors[name] for name in _matching(patterns, tensors)]
    return found if coded else [cast_tensor(one, dtype) for one in found]


def _matching(patterns: Collection[str], names: Collection[str]) -> list[str]:
    return sorted(name for name in names if any(re.fullmatch(pattern, name) for pattern in patterns))
