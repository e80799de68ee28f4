"""Reads image files as the patches of a vision tower, by the `preprocessor_config.json` of a folder.

An image is resized so that its height and width are multiples of a feature's, its number of pixels lies within limits,
and its aspect ratio stays nearly the same. Its values are scaled, normalised by channel, and split into patches.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autoshard._shown import shown
from autoshard.errors import AutoshardError
from autoshard.models.pretrained.families.family import Config
from autoshard.models.pretrained.folder import read_table
from autoshard.models.vision.grids import Grid, Image

PREPROCESSOR = "preprocessor_config.json"
PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
# What the published processor takes where a file gives nothing: pixels, and mean and deviation of CLIP's images.
LEAST_PIXELS, MOST_PIXELS = 56 * 56, 28 * 28 * 1280
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
LARGEST_RATIO = 200  # of the sides; the published processor refuses longer images
BICUBIC = 3  # Pillow's number, which the files have
ORIENTATION, TURNED = (
    0x0112,
    (5, 6, 7, 8),
)  # the EXIF tag, and its values for images whose sides are exchanged (EXIF 2.3)


@shown
@dataclass(frozen=True)
class ImageReader:
    """Makes patches of images.

    Attributes:
        patch: height and width of a patch, in pixels.
        frames: number of frames of a patch; an image is repeated.
        merge: `merge * merge` patches make one feature.
        least_pixels: smallest number of pixels of a resized image.
        most_pixels: largest number of pixels.
        mean: mean of each channel, subtracted.
        std: deviation of each channel; values are divided by it.
        scale: factor of the pixels' values before that.
    """

    patch: int = 14
    frames: int = 2
    merge: int = 2
    least_pixels: int = LEAST_PIXELS
    most_pixels: int = MOST_PIXELS
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    scale: float = 1 / 255

    @classmethod
    def of(cls, path: Any) -> ImageReader:
        """Read the `preprocessor_config.json` of a folder.

        Raises:
            AutoshardError: there is none, it is damaged, or it has a feature that is not built.
        """
        file = Path(path) / PREPROCESSOR
        if not file.exists():
            raise AutoshardError(f"{str(path)!r} has no {PREPROCESSOR}, which says how images are read")
        values = read_table(file)
        config = Config(values, str(file))
        kind = values.get("image_processor_type")
        if kind not in PROCESSORS:
            raise config.refuse(f"image_processor_type is {kind!r}; built are {', '.join(PROCESSORS)}")
        config.refuse_values(do_resize=True, do_rescale=True, do_normalize=True, do_convert_rgb=True, resample=BICUBIC)
        size = values.get("size")
        limits = Config({**size, **values} if isinstance(size, Mapping) else values, str(file))
        return cls(
            config.size("patch_size", cls.patch),
            config.size("temporal_patch_size", cls.frames),
            config.size("merge_size", cls.merge),
            limits.size("min_pixels", limits.size("shortest_edge", LEAST_PIXELS)),
            limits.size("max_pixels", limits.size("longest_edge", MOST_PIXELS)),
            _channels(config, "image_mean", CLIP_MEAN),
            _channels(config, "image_std", CLIP_STD),
            float(config.number("rescale_factor", cls.scale)),
        )

    def __call__(self, image: Any) -> Image:
        """Make the patches of an image.

        Args:
            image: a file, a Pillow image, or bytes `[height, width, 3]`.

        Returns:
            Its patches, float32 `[patches, 3 * frames * patch * patch]`, and its grid `(1, height, width)` in patches.

        Raises:
            AutoshardError: the file is no image, or the image is too long and narrow.
        """
        rgb = _decoded(image)
        height, width = self.size(rgb.height, rgb.width)
        pixels = np.asarray(rgb.resize((width, height), resample=BICUBIC), np.float32)
        pixels = (pixels * np.float32(self.scale) - np.asarray(self.mean, np.float32)) / np.asarray(
            self.std, np.float32
        )
        rows, columns = height // self.patch, width // self.patch
        split = pixels.reshape(
            rows // self.merge, self.merge, self.patch, columns // self.merge, self.merge, self.patch, 3
        ).transpose(0, 3, 1, 4, 6, 2, 5)
        repeated = np.repeat(split[:, :, :, :, :, None], self.frames, axis=5)
        return repeated.reshape(rows * columns, -1), (1, rows, columns)

    def grid(self, image: Any) -> Grid:
        """Return the grid of an image's patches. Of most files, only the start is read.

        Raises:
            AutoshardError: the file is no image, or the image is too long and narrow.
        """
        opened = _opened(image)
        height, width = opened.height, opened.width
        with _decoding(image):  # the EXIF data of some formats are behind the pixels
            orientation = opened.getexif().get(ORIENTATION)
        if orientation in TURNED:
            height, width = width, height
        height, width = self.size(height, width)
        return 1, height // self.patch, width // self.patch

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and the width of the resized image.

        >>> ImageReader().size(480, 640)
        (476, 644)
        """
        unit = self.patch * self.merge
        if max(height, width) > LARGEST_RATIO * min(height, width):
            raise AutoshardError(
                f"an image has {height} x {width} pixels; one side may be at most {LARGEST_RATIO} times the other"
            )
        found = [round(side / unit) * unit for side in (height, width)]
        if found[0] * found[1] > self.most_pixels:
            shrink = math.sqrt(height * width / self.most_pixels)
            found = [max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width)]
        elif found[0] * found[1] < self.least_pixels:
            grow = math.sqrt(self.least_pixels / (height * width))
            found = [math.ceil(side * grow / unit) * unit for side in (height, width)]
        return found[0], found[1]


def _channels(config: Config, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
    found = config.values.get(name)
    if found is None:
        return default
    if not isinstance(found, list) or len(found) != 3 or any(isinstance(x, bool | str) or x is None for x in found):
        raise config.refuse(f"{name} is {found!r}; it must be three numbers")
    return tuple(float(x) for x in found)


def _pillow() -> types.ModuleType:
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise AutoshardError("reading images needs Pillow: pip install 'autoshard[images]'") from error
    return PIL


def _opened(image: Any) -> Any:
    """Return a Pillow image. A file's pixels are not read yet."""
    pillow = _pillow().Image
    if isinstance(image, np.ndarray):
        return pillow.fromarray(image)
    if isinstance(image, pillow.Image):
        return image
    try:
        return pillow.open(image)
    except FileNotFoundError as error:
        raise AutoshardError(f"there is no file {str(image)!r}: give the file of an image") from error
    except (OSError, ValueError, pillow.DecompressionBombError) as error:
        raise AutoshardError(f"{str(image)!r} cannot be read as an image: {error}") from error


def _decoded(image: Any) -> Any:
    """Return a Pillow image in RGB, turned as its EXIF data says."""
    opened = _opened(image)
    with _decoding(image):
        return _pillow().ImageOps.exif_transpose(opened).convert("RGB")


@contextmanager
def _decoding(image: Any) -> Iterator[None]:
    try:
        yield
    except (OSError, SyntaxError) as error:  # Pillow raises a SyntaxError for some damaged files
        name = repr(str(image)) if isinstance(image, str | Path) else "an image"
        raise AutoshardError(f"{name} cannot be read: {error}; the file is damaged or truncated") from error
