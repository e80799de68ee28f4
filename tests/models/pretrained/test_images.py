"""Image files as patches: sizes, order of the patches, and bad input."""

import json

import numpy as np
import pytest

from autoshard.errors import AutoshardError
from autoshard.models.pretrained.images import PREPROCESSOR, ImageReader

pytest.importorskip("PIL")


@pytest.mark.parametrize(
    "height, width, expected",
    [(480, 640, (476, 644)), (10, 20, (56, 84)), (2000, 3000, (812, 1204)), (28, 28, (56, 56))],
)
def test_sizes_are_multiples_within_limits(height, width, expected):
    assert ImageReader().size(height, width) == expected


def test_patches_that_are_merged_follow_each_other(tmp_path):
    from PIL import Image

    # Each patch of 2 x 2 pixels has one value: its row and its column.
    rows, columns = np.indices((4, 8))
    pixels = np.repeat(np.repeat(np.stack([rows, columns, 0 * rows], axis=-1), 2, axis=0), 2, axis=1).astype("uint8")
    Image.fromarray(pixels).save(tmp_path / "image.png")
    reader = ImageReader(patch=2, least_pixels=1, mean=(0.0,) * 3, std=(1.0,) * 3, scale=1.0)
    patches, grid = reader(tmp_path / "image.png")
    assert grid == (1, 4, 8) and patches.shape == (32, 3 * 2 * 4)
    assert patches[:5, :8].tolist() == [[0.0] * 8, [0.0] * 8, [1.0] * 8, [1.0] * 8, [0.0] * 8]
    assert patches[:5, 8:16].tolist() == [[0.0] * 8, [1.0] * 8, [0.0] * 8, [1.0] * 8, [2.0] * 8]


def test_the_folder_gives_the_values(tmp_path):
    own = {
        "image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 100, "size": {"longest_edge": 400},
        "patch_size": 2, "image_mean": [0.1, 0.2, 0.3],
    }  # fmt: skip
    (tmp_path / PREPROCESSOR).write_text(json.dumps(own))
    reader = ImageReader.of(tmp_path)
    assert (reader.patch, reader.least_pixels, reader.most_pixels, reader.mean) == (2, 100, 400, (0.1, 0.2, 0.3))


@pytest.mark.parametrize(
    "values, message",
    [
        ({"image_processor_type": "Other"}, "image_processor_type is 'Other'"),
        ({"image_processor_type": "Qwen2VLImageProcessor", "resample": 2}, "resample is 2; only 3 is built"),
        ({"image_processor_type": "Qwen2VLImageProcessor", "image_std": [1]}, "three numbers"),
        (None, "has no preprocessor_config.json"),
    ],
)
def test_folders_that_are_not_read(tmp_path, values, message):
    if values is not None:
        (tmp_path / PREPROCESSOR).write_text(json.dumps(values))
    with pytest.raises(AutoshardError, match=message):
        ImageReader.of(tmp_path)


def test_files_are_turned_as_their_exif_data_say(tmp_path):
    from PIL import Image

    pixels = np.zeros((60, 120, 3), np.uint8)
    pixels[:, :60, 0] = 255  # red on the left
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees, clockwise
    Image.fromarray(pixels).save(tmp_path / "image.png", exif=exif)
    reader = ImageReader(patch=2, least_pixels=1, mean=(0.0,) * 3, std=(1.0,) * 3)
    patches, grid = reader(tmp_path / "image.png")
    assert reader.grid(tmp_path / "image.png") == grid == (1, 60, 30)
    assert patches[0, :8].tolist() == [1.0] * 8 and patches[-1, :8].tolist() == [0.0] * 8  # red at the top


def test_files_that_are_no_images(tmp_path):
    (tmp_path / "image.png").write_text("text")
    with pytest.raises(AutoshardError, match="cannot be read as an image"):
        ImageReader()(tmp_path / "image.png")
    with pytest.raises(AutoshardError, match="at most 200 times"):
        ImageReader()(np.zeros((1, 300, 3), np.uint8))
