"""A model sees what a person sees in an image file."""

import numpy as np
import pytest
from PIL import Image

from bapo_openrlhf.training.engine.pictures import pictures

LINES = np.zeros((4, 6, 4), np.uint8)  # black lines, and the rest is clear
LINES[1, :, 3] = LINES[:, 2, 3] = 255
WHITE = np.where(LINES[..., 3:] == 255, 0, 255).repeat(3, axis=2)


def palette():
    image = Image.fromarray(np.where(LINES[..., 3] == 255, 1, 0).astype(np.uint8), "L").convert("P")
    image.putpalette([90, 90, 90, 0, 0, 0])
    image.info["transparency"] = 0
    return image


@pytest.mark.parametrize(
    "image",
    [Image.fromarray(LINES), Image.fromarray(LINES).convert("LA"), palette()],
    ids=["RGBA", "LA", "a palette"],
)
def test_what_is_clear_is_white(tmp_path, image):
    """hermes-agent#64548: a picture that is only converted to RGB becomes black."""
    image.save(tmp_path / "a.png")
    (seen,) = pictures([str(tmp_path / "a.png")])
    assert seen.mode == "RGB" and np.array_equal(np.asarray(seen), WHITE)


def test_what_is_half_clear_is_mixed_with_white():
    (seen,) = pictures(Image.new("RGBA", (1, 1), (0, 100, 200, 51)))  # a fifth
    assert np.abs(np.asarray(seen)[0, 0] - (255 * 0.8 + np.array([0, 100, 200]) * 0.2)).max() <= 1


def test_a_photo_stands_upright(tmp_path):
    """sglang#33464. EXIF, tag 0x0112, says that the stored pixels must be turned clockwise."""
    upright = np.random.default_rng(0).integers(256, size=(3, 5, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(np.ascontiguousarray(np.rot90(upright, 1))).save(tmp_path / "a.png", exif=exif)
    (seen,) = pictures([str(tmp_path / "a.png")])
    assert np.array_equal(np.asarray(seen), upright)


def test_other_images_stay_as_they_are(tmp_path):
    pixels = np.random.default_rng(0).integers(256, size=(3, 5, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    image.save(tmp_path / "a.png")
    with (tmp_path / "a.png").open("rb") as file:
        seen = pictures([str(tmp_path / "a.png"), None, image, file.read()])
    assert [np.array_equal(np.asarray(one), pixels) for one in seen] == [True] * 3


@pytest.mark.parametrize("content", [None, b"no image", "cut"])
def test_one_that_does_not_open_is_an_error_by_name(tmp_path, content):
    """OpenRLHF would leave it out."""
    path = tmp_path / "a.png"
    if content == "cut":
        Image.effect_noise((64, 64), 50).save(path)
        content = path.read_bytes()[:1000]
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"image '.*a\.png' does not open"):
        pictures([str(path)])
