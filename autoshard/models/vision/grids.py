"""Images in padded rows, on the host: positions, windows, and the places of their features among the tokens.

A grid `(time, height, width)` is the number of patches of an image in each dimension; the time of an image is 1. The
patches of an image are in the order of its features: `merge * merge` neighbouring patches follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard._shown import shown
from autoshard.errors import AutoshardError
from autoshard.models.vision.config import VisionLanguageConfig
from autoshard.models.vision.constants import SMALLEST_BUCKET

Grid = tuple[int, int, int]
Image = tuple[np.ndarray, Grid]
"""The patches of an image, `[patches, patch_size]`, and its grid."""


@shown
@dataclass(frozen=True)
class ImageSlots:
    """How images take their places among the tokens of a prompt.

    Attributes:
        token: the token in whose places features are put.
        merge: `merge * merge` patches make one feature.
    """

    token: int
    merge: int

    def count(self, grid: Grid) -> int:
        """Return the number of tokens of an image."""
        return feature_count(grid, self.merge)


def patch_positions(grid: Grid, merge: int) -> np.ndarray:
    """Return the row and the column of each patch of an image, int32 `[2, patches]`.

    >>> patch_positions((1, 2, 4), 2).tolist()
    [[0, 0, 1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 2, 3, 2, 3]]
    """
    time, height, width = grid
    found = np.indices((height, width)).reshape(2, height // merge, merge, width // merge, merge)
    return np.tile(found.transpose(0, 1, 3, 2, 4).reshape(2, -1), (1, time)).astype(np.int32)


def window_ids(grid: Grid, merge: int, window: int) -> np.ndarray:
    """Return the number of the window of each patch of an image, int32 `[patches]`.

    Args:
        grid: the image's grid.
        merge: height and width of a feature, in patches.
        window: height and width of a window, in features. Windows at the right and lower edge may be smaller.
    """
    time, height, width = grid
    row, column = patch_positions((1, height, width), merge) // (merge * window)
    across, down = column.max() + 1, row.max() + 1
    one = row * across + column
    return np.concatenate([one + frame * across * down for frame in range(time)]).astype(np.int32)


def feature_count(grid: Grid, merge: int) -> int:
    """Return the number of features of an image, and of its tokens."""
    return grid[0] * grid[1] * grid[2] // merge**2


def bucket(patches: int, merge: int) -> int:
    """Return the number of patches to which rows are padded: a power of two, so that few programs are compiled.

    >>> [bucket(n, 2) for n in (4, 256, 257)]
    [256, 256, 512]
    """
    size = SMALLEST_BUCKET
    while size < patches:
        size *= 2
    return -(-size // merge**2) * merge**2


def token_positions(tokens: np.ndarray, grids: Sequence[Sequence[Grid]], cfg: VisionLanguageConfig) -> np.ndarray:
    """Return time, row and column of each token, int32 `[batch, 3, seq]`.

    The tokens of text have one position for all three, counted on. Those of an image start at the next position, and
    differ by their time, row and column. Behind an image, positions go on from its largest one.

    Args:
        tokens: `[batch, seq]`.
        grids: the grids of the images of each row, in order.
        cfg: the model's config.

    Raises:
        AutoshardError: the image tokens of a row are not those of its images.
    """
    merge = cfg.vision.merge
    found = np.zeros((tokens.shape[0], 3, tokens.shape[1]), np.int32)
    for number, (row, own) in enumerate(zip(tokens, grids, strict=True)):
        _check_row(row, own, cfg, number)
        at, position, left = 0, 0, list(own)
        while at < len(row):
            if row[at] == cfg.image_token:
                time, height, width = left.pop(0)
                sizes = (time, height // merge, width // merge)
                count = sizes[0] * sizes[1] * sizes[2]
                if np.any(row[at : at + count] != cfg.image_token):
                    raise AutoshardError(
                        f"row {number}: the image from token {at} on has {count} features, but fewer image tokens "
                        "follow each other there"
                    )
                found[number, :, at : at + count] = np.indices(sizes).reshape(3, -1) + position
                position += max(sizes[1:])
                at += count
            else:
                found[number, :, at] = position
                position, at = position + 1, at + 1
    return found


def pack_images(
    tokens: np.ndarray, images: Sequence[Sequence[Image]], cfg: VisionLanguageConfig, *, patches: int | None = None
) -> dict[str, np.ndarray]:
    """Pack the images of each row of a batch, padded to a common number of patches.

    Args:
        tokens: `[batch, seq]`, with an image token for each feature of an image.
        images: the images of each row, in order.
        cfg: the model's config.
        patches: number of patches of a row; by default a power of two. Batches of the same number share one program.

    Returns:
        `patches [batch, patches, patch_size]` in float32; `positions [batch, 2, patches]`; `segment_ids` and
        `region_ids [batch, patches]`, 0 for padding; `places [batch, seq]`: the number of the row's feature that takes
        the place of each token, or -1. All others are int32.

    Raises:
        AutoshardError: images do not have the form of the model, do not fit, or are not those of the tokens.
    """
    merge, size = cfg.vision.merge, cfg.vision.patch_size
    for number, (row, own) in enumerate(zip(tokens, images, strict=True)):
        for values, grid in own:
            if values.shape != (int(np.prod(grid)), size) or grid[1] % merge or grid[2] % merge:
                raise AutoshardError(
                    f"row {number}: an image has patches {list(values.shape)} and the grid {list(grid)}; give "
                    f"[patches, {size}], and a height and a width that are multiples of {merge}"
                )
        _check_row(row, [grid for _, grid in own], cfg, number)
    needed = max((sum(len(values) for values, _ in own) for own in images), default=0)
    length = bucket(needed, merge) if patches is None else patches
    if needed > length or length % merge**2:
        raise AutoshardError(
            f"patches is {length}; it must be a multiple of {merge**2} and at least {needed}, the patches of the "
            "largest row"
        )
    rows = len(images)
    found = {
        "patches": np.zeros((rows, length, size), np.float32),
        "positions": np.zeros((rows, 2, length), np.int32),
        "segment_ids": np.zeros((rows, length), np.int32),
        "region_ids": np.zeros((rows, length), np.int32),
    }
    for row, own in enumerate(images):
        at = 0
        for values, grid in own:
            here = slice(at, at + len(values))
            frame = np.repeat(np.arange(grid[0]), grid[1] * grid[2])
            windows = window_ids(grid, merge, cfg.vision.window or max(grid))
            found["patches"][row, here] = values
            found["positions"][row, :, here] = patch_positions(grid, merge)
            found["segment_ids"][row, here] = frame + found["segment_ids"][row].max() + 1
            found["region_ids"][row, here] = windows + found["region_ids"][row].max() + 1
            at += len(values)
    is_image = tokens == cfg.image_token
    found["places"] = np.where(is_image, np.cumsum(is_image, axis=1) - 1, -1).astype(np.int32)
    return found


def _check_row(row: np.ndarray, grids: Sequence[Grid], cfg: VisionLanguageConfig, number: int) -> None:
    wanted = sum(feature_count(grid, cfg.vision.merge) for grid in grids)
    found = int(np.sum(row == cfg.image_token))
    if found != wanted:
        raise AutoshardError(
            f"row {number} has {found} image tokens ({cfg.image_token}), but its {len(grids)} images have {wanted} "
            "features: repeat the image token once for each feature"
        )
