"""Find images that OpenRLHF cannot train on, or would train on wrongly, before a model loads.

OpenRLHF itself leaves out a file that does not open, with a warning. It gives a model without vision only the text of a
row with images. A placeholder without its image ends its run, at the step that draws the row.
"""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf.errors import ConfigError, one_line
from bapo_openrlhf.flags.rules import NO_CRITIC
from bapo_openrlhf.flags.sizes import batch_arithmetic

TAG = "<image>"  # the chat template puts an image in its place
NOT_FILES = ("http://", "https://", "data:image")  # OpenRLHF takes these too; they are not checked here


def check_model(model: str, folder: Path, config: Mapping[str, Any], args: SimpleNamespace) -> None:
    """Raise ConfigError if a local `model` (flag and value) that gets images has no vision or no image processor."""
    if args.data.max_images_per_prompt < 1:
        return
    setting = f"data.max_images_per_prompt is {args.data.max_images_per_prompt}, and {model}"
    if "vision_config" not in config:
        raise ConfigError(f"{setting}, a model without vision (no vision_config in its config.json)")
    if not any((folder / file).is_file() for file in ("processor_config.json", "preprocessor_config.json")):
        raise ConfigError(f"{setting}; the folder has no image processor (preprocessor_config.json)")


def check_row(where: str, row: Mapping[str, Any], args: SimpleNamespace) -> None:
    """Check that a row's images can be read whole, are not too many, and are as many as the prompt has places for.

    A ConfigError names the image and `where`, which is file and row.
    """
    data = args.data
    images = images_of(row.get(data.image_key))
    if images and args.critic.model_name_or_path:
        raise ConfigError(f"{where}: it has images, and the critic is {args.critic.model_name_or_path}; {NO_CRITIC}")
    if len(images) > data.max_images_per_prompt:
        raise ConfigError(
            f"{where}: it has images: {len(images)}; data.max_images_per_prompt is {data.max_images_per_prompt}, "
            f"it must be at least {len(images)}"
        )
    tags = places(row[data.input_key])
    if data.max_images_per_prompt < 1:
        if tags and data.apply_chat_template:
            raise ConfigError(
                f"{where}: the prompt has {TAG}, which OpenRLHF gives to the chat template as an image, and "
                "data.max_images_per_prompt is 0; write the tag in another way"
            )
        return
    if tags and not data.apply_chat_template:
        raise ConfigError(f"{where}: {TAG} becomes an image only through a chat template: data.apply_chat_template")
    if data.apply_chat_template and tags != len(images):
        raise ConfigError(
            f"{where}: {len(images)} images (data.image_key {data.image_key}) and {tags} {TAG} in the prompt; "
            "the two numbers must be equal"
        )
    for image in images:
        check_image(where, image)


def is_one_for_all(args: SimpleNamespace) -> bool:
    """Whether all ranks of the actor run the part of the model that sees in each pass, or none of them does.

    Its weights are gathered from all ranks under ZeRO-3, and its gradients are summed over them unless it is frozen.
    """
    ranks = batch_arithmetic(args).ranks["actor"]
    gathered = args.ds.zero_stage == 3 or not args.actor.freeze_visual_encoder
    return ranks > 1 and gathered and args.data.max_images_per_prompt > 0


def images_of(cell: Any) -> list[Any]:
    """The images in the cell of a row, as OpenRLHF takes them: a list, or one that is not in a list."""
    return [image for image in (cell if isinstance(cell, list) else [cell]) if image is not None]


def counted(images: list[Any]) -> list[Any]:
    """The images if the tokens of all of them can be counted: nothing is downloaded for that."""
    return [] if any(isinstance(image, str) and image.startswith(NOT_FILES[:2]) for image in images) else images


def places(prompt: Any) -> int:
    """Count the places for images in a prompt: each <image> in a text or message, and each image part of a message."""
    if isinstance(prompt, str):
        return prompt.count(TAG)
    if isinstance(prompt, Mapping):
        return int(prompt["type"] == "image") if "type" in prompt else places(prompt.get("content"))
    return sum(map(places, prompt)) if isinstance(prompt, list) else 0


def check_image(where: str, image: Any) -> None:
    """Raise ConfigError, which begins with `where`, if an image is no text, is not there, or does not open."""
    from PIL import Image

    if not isinstance(image, str):
        raise ConfigError(f"{where}: an image is of type {type(image).__name__}; it must be the path of a file")
    if image.startswith(NOT_FILES):
        return
    try:
        with Image.open(image) as opened:
            opened.draft("L", (1, 1))  # a JPEG is then decoded at an eighth of its size
            opened.load()
    except FileNotFoundError:
        raise ConfigError(f"{where}: there is no image {image}") from None
    except Exception as error:  # not an image, no permission, a name that is too long, too many pixels
        raise ConfigError(f"{where}: image {image:.200} does not open: {one_line(error)}") from None
