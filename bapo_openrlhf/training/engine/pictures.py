"""The images of a prompt as the model sees them, in training and in evaluations."""

from typing import Any

from bapo_openrlhf.host import module_of


def pictures(images: Any) -> list[Any]:
    """Images in RGB, turned as the camera noted it (EXIF). What is clear becomes white, and not black as in RGB.

    Raises:
        ValueError: One of them does not open.
    """
    references = images if isinstance(images, list) else [images]
    return [_picture(reference) for reference in references if reference is not None]


def _picture(reference: Any) -> Any:
    from PIL import Image, ImageOps

    try:
        (loaded,) = module_of("utils/vlm_utils.py").load_images([reference])
        image = ImageOps.exif_transpose(loaded)
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return image.convert("RGB")
    except (ValueError, OSError) as error:  # OpenRLHF's function leaves out what does not open
        raise ValueError(f"image {reference!r:.200} does not open") from error
