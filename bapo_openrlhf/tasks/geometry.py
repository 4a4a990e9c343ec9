r"""Visual geometry: problems with a figure and a final answer in \boxed{} (the paper's Geometry3K runs, Section 4).

A problem's text has one <image> for each of its images. OpenRLHF puts the images there with the model's chat template
(`--data.apply_chat_template --data.max_images_per_prompt 1`). It opens the files that `prepare` wrote. The reward
function is that of tasks/math.py.

Images are opened here to find broken ones, because OpenRLHF would only warn and leave them out. `generate` needs no
data: it draws figures whose numbers are only in the image.
"""

import hashlib
import io
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bapo_openrlhf.errors import ConfigError, one_line
from bapo_openrlhf.tasks import math as mathematics
from bapo_openrlhf.tasks.math import answer as answer  # Majority votes need it.
from bapo_openrlhf.tasks.math import reward_func as reward_func
from bapo_openrlhf.tasks.task import BadRow, Part, Problem, Source, Task

if TYPE_CHECKING:  # Functions import Pillow when they need it, because the reward function does not.
    from PIL.Image import Image

# ---------------------------------------------------------------------------------------------------- published data

TAG = "<image>"  # The place of an image in a text.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # Other decoders of Pillow may start programs, or are rarely used.
MAX_PIXELS = 2**24  # 64 MiB when decoded. The published figures have less than a million pixels.
MAX_BYTES = 2**26  # Of an image file.


def problem(row: Mapping[str, Any]) -> Problem:
    """The problem of a published row with `images`, `problem` (which has one <image> for each of them) and `answer`.

    An image may be the content and path of a file as `datasets` stores them, only the content, or a path. BadRow says
    what is missing, broken or too large, or that tasks/math.py does not accept the text or the answer.
    """
    images = row["images"]
    if isinstance(images, (str, bytes, Mapping)):
        images = [images]
    if not images:
        raise BadRow("no image")
    opened = [_checked_image(_content(image)) for image in images]
    words = mathematics.problem(row)
    if words.text.count(TAG) != len(opened):
        raise BadRow(f"another number of tags than of images: {words.text.count(TAG)} {TAG}, {len(opened)} images")
    # The key includes the images because "Find x." is about a different figure each time.
    key = "/".join([words.key, *(digest for _, digest in opened)])
    return Problem(words.text, words.label, key, tuple(content for content, _ in opened))


def _content(image: Any) -> bytes:
    if isinstance(image, Mapping):
        image = image.get("path") if image.get("bytes") is None else image["bytes"]
    if image is None:
        raise BadRow("image missing")
    if isinstance(image, bytes):
        return image
    if not isinstance(image, (str, Path)):
        raise BadRow(f"image broken: it is of type {type(image).__name__}")
    try:
        size = Path(image).stat().st_size
        if size <= MAX_BYTES:
            return Path(image).read_bytes()
    except (OSError, ValueError):  # A path with a null character raises a ValueError.
        raise BadRow(f"image missing: {Path(image)}") from None
    raise BadRow(f"image too large: {Path(image)} has {size} bytes, at most {MAX_BYTES}")


def _png(image: "Image") -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _checked_image(content: bytes) -> tuple[bytes, str]:
    """The content and a digest of its pixels. Transparent ones become white: vision models would see black on black."""
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:
            raise BadRow(f"image too large: {image.width} x {image.height} pixels, at most {MAX_PIXELS}")
        image.load()
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
            content = _png(image)
        pixels = image.convert("RGB").tobytes()
    except BadRow:
        raise
    except Image.DecompressionBombError as error:  # The image exceeds Pillow's own limit.
        raise BadRow(f"image too large: {one_line(error)}") from None
    except Exception as error:  # Pillow's decoders raise errors of many kinds for a broken file.
        raise BadRow(f"image broken: {one_line(error)}") from None
    return content, hashlib.blake2b(pixels, digest_size=16, person=b"%dx%d" % image.size).hexdigest()


def boxed_prompt(problem: Problem) -> str:
    r"""The problem with its <image>, and the request for an answer in a box."""
    return f"{problem.text}\n\nReason step by step, and write the final answer within \\boxed{{}}."


# ---------------------------------------------------------------------------------------------------- drawn problems

SIZE = 252  # Pixels of each side. It is a multiple of 28, the side of one token in Qwen's vision models.
_SHARES = {0: "geo3k_test", 1: "geo3k_val"}  # One figure in eight for each. The others are for training.


class Figure(NamedTuple):
    """A polygon with labels, and a question about it, whose numbers are only in the image.

    Attributes:
        name: What it shows, for example "right triangle (3, 4, 5), find 5".
        corners: Points (x, y) in any unit, counter-clockwise.
        sides, angles: The label of the side from each corner to the next, and at each corner; empty for none.
    """

    name: str
    text: str
    answer: int
    corners: tuple[tuple[float, float], ...]
    sides: tuple[str, ...] = ("", "", "", "")
    angles: tuple[str, ...] = ("", "", "", "")

    @property
    def part(self) -> str:
        """The part that the figure belongs to. Only the name decides, so parts never overlap for any seed or size."""
        return _SHARES.get(hashlib.sha256(self.name.encode()).digest()[0] % 8, "train")


def figures() -> Iterator[Figure]:
    """All figures that can be drawn: 381 right triangles, 741 rectangles, 930 angle sums."""
    for triple in _triples(200):
        for unknown, length in enumerate(triple):
            a, b, c = ("x" if place == unknown else str(side) for place, side in enumerate(triple))
            corners = ((0, 0), (triple[0], 0), (0, triple[1]))
            name, text = f"right triangle {triple}, find {length}", "The triangle has a right angle. Find x."
            yield Figure(name, text, length, corners, (a, c, b))
    for width in range(2, 41):
        for height in range(2, width):
            corners = ((0, 0), (width, 0), (width, height), (0, height))
            name, text = f"rectangle {width} {height}", "Find the area of the rectangle."
            yield Figure(name, text, width * height, corners, ("", str(height), str(width), ""))
    for alpha in range(30, 61):
        for beta in range(61, 91):
            # The base has length 1, and the law of sines gives the side.
            side = math.sin(math.radians(beta)) / math.sin(math.radians(alpha + beta))
            tip = (side * math.cos(math.radians(alpha)), side * math.sin(math.radians(alpha)))
            angles = (f"{alpha}°", f"{beta}°", "x°")
            yield Figure(f"angles {alpha} {beta}", "Find x.", 180 - alpha - beta, ((0, 0), (1, 0), tip), angles=angles)


def _triples(longest: int) -> Iterator[tuple[int, int, int]]:
    for a in range(1, longest):
        for b in range(a + 1, longest):
            c = math.isqrt(a * a + b * b)
            if c <= longest and c * c == a * a + b * b:
                yield a, b, c


def draw(figure: Figure, turned: float) -> bytes:
    """The figure as a PNG, drawn to scale and rotated by an angle in degrees."""
    from PIL import Image, ImageDraw, ImageFont

    corners = [complex(x, y) * complex(math.cos(math.radians(turned)), math.sin(math.radians(turned)))
               for x, y in figure.corners]  # fmt: skip
    left, low = min(z.real for z in corners), min(z.imag for z in corners)
    width, height = max(z.real for z in corners) - left, max(z.imag for z in corners) - low
    margin = 48 if any(figure.sides) else 16  # The labels of sides are outside the figure.
    scale = (SIZE - 2 * margin) / max(width, height)
    middle = complex(left + width / 2, low + height / 2)
    # In an image the rows are counted from the top.
    corners = [((z - middle) * scale).conjugate() + complex(SIZE / 2, SIZE / 2) for z in corners]
    image = Image.new("RGB", (SIZE, SIZE), "white")
    brush, font = ImageDraw.Draw(image), ImageFont.load_default(size=16)
    brush.polygon([(z.real, z.imag) for z in corners], outline="black", width=2)
    inside = sum(corners) / len(corners)
    ends = [*corners[1:], corners[0]]
    labels = []
    for start, end, side, angle in zip(corners, ends, figure.sides, figure.angles, strict=False):
        across = (end - start) / abs(end - start)
        labels.append(((start + end) / 2 + 1j * across * 20, side))
        labels.append((start + (inside - start) / abs(inside - start) * 44, angle))
    for place, label in labels:
        if label:
            brush.text((place.real, place.imag), label, fill="black", font=font, anchor="mm")
    return _png(image)


def generate(generator: str, part: str, n: int, seed: int) -> Iterator[Problem]:
    """`n` different drawn problems, equal for equal arguments, or a ConfigError. No two parts share a problem."""
    candidates = [figure for figure in figures() if figure.part == part]
    if n > len(candidates):
        raise ConfigError(f"the number of problems is {n}; it must be at most {len(candidates)}, all that {part} has")
    rng = random.Random(f"{seed}/{part}")
    for figure in rng.sample(candidates, n):
        image = draw(figure, turned=rng.uniform(0, 360))
        yield Problem(f"{TAG}{figure.text}", str(figure.answer), figure.name, (image,))


# --------------------------------------------------------------------------------------------------------------- task


def _source(split: str, rows: int) -> Source:
    return Source("hiyouga/geometry3k", ("images", "problem", "answer"), split=split, rows=rows)


TASK = Task(
    name="geometry",
    file=Path(__file__),
    train=Part("Geometry3K", _source("train", 2101)),
    benchmarks={
        "geo3k_val": Part("Geo-3K(val)", _source("validation", 300)),
        "geo3k_test": Part("Geo-3K(test)", _source("test", 601)),
    },
    problem=problem,
    prompts={"boxed": boxed_prompt},
    takes=mathematics.takes,
    generate=generate,
    sizes={"drawn": {"train": 1024, "geo3k_val": 128, "geo3k_test": 128}},
)
