"""Visual geometry: published rows with their images, drawn problems, and the reward."""

import cmath
import io
import itertools
import json
import math
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.tasks import geometry as task
from bapo_openrlhf.tasks import math as mathematics
from bapo_openrlhf.tasks.task import BadRow
from bapo_openrlhf.workbench.prepare.build import Preparation, prepare

TEXT = "<image>Find x."


def picture(colour: object = "white", size: tuple[int, int] = (40, 30), mode: str = "RGB") -> Image.Image:
    """An image with a black diagonal line."""
    image = Image.new(mode, size, colour)
    ImageDraw.Draw(image).line((0, 0, *size), fill="black", width=3)
    return image


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def decoded(content: bytes) -> np.ndarray:
    """The pixels of an image, shape (H, W, 3)."""
    return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))


def row(*images: object, text: str = TEXT, answer: str = "5") -> dict:
    """A published row, in which an image is the content of a file."""
    images = [encoded(image) if isinstance(image, Image.Image) else image for image in images]
    return {"images": images, "problem": text, "answer": answer}


def png_head(width: int, height: int) -> bytes:
    """A PNG that claims a size and has nearly no content."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_an_image_in_any_form_is_the_same_problem(tmp_path):
    content = encoded(picture())
    path = tmp_path / "1.png"
    path.write_bytes(content)
    as_stored = [{"bytes": content, "path": "1.png"}, {"bytes": None, "path": str(path)}, str(path), path, content]
    problems = [task.problem(row(image)) for image in as_stored]
    problems.append(task.problem({"images": as_stored[0], "problem": TEXT, "answer": "5"}))
    assert len({problem.key for problem in problems}) == 1
    for problem in problems:
        assert (problem.text, problem.label) == (TEXT, "5")
        assert len(problem.images) == 1 and np.array_equal(decoded(problem.images[0]), np.asarray(picture()))
    assert all(problem.images == (content,) for problem in problems)  # a file is kept as it is


def test_the_key_is_of_the_question_and_the_picture():
    def key(image, text=TEXT):
        return task.problem(row(image, text=text)).key

    same = key(encoded(picture()))
    assert same == key(encoded(picture(), compress_level=0)) == key(encoded(picture(), "BMP"))
    assert same == key(encoded(picture()), text="<image> find $x$")
    others = [key(picture("red")), key(picture(size=(41, 30))), key(picture(), text="<image>Find y.")]
    assert len({same, *others}) == 4
    # the same bytes of pixels in another shape
    assert key(Image.new("RGB", (10, 20))) != key(Image.new("RGB", (20, 10)))


def test_images_stay_in_order():
    first, second = encoded(picture("red")), encoded(picture("blue"))
    text = "Which is larger, <image> or <image>?"
    problem = task.problem(row(first, second, text=text))
    assert problem.images == (first, second) and problem.text == text
    assert problem.key != task.problem(row(second, first, text=text)).key


@pytest.mark.parametrize(("published", "kind"), [
    (row(), "no image"),
    ({"images": None, "problem": TEXT, "answer": "5"}, "no image"),
    (row({}), "image missing"),
    (row({"bytes": None, "path": "no/such/file.png"}), "image missing"),
    (row("nul\0.png"), "image missing"),
    (row(str(Path(__file__).parent)), "image missing"),
    (row({"bytes": b"", "path": None}), "image broken"),
    (row(7), "image broken"),
    (row(b"P6 1 1 255\n\0\0\0"), "image broken"),  # an image, but of a format that is not taken
    (row(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"), "image broken"),
    (row(picture(), picture()), "another number of tags than of images"),
    (row(picture(), text="Find x."), "another number of tags than of images"),
    (row(picture(), text=" "), "problem is empty"),
    (row(picture(), answer="$$"), "label does not parse"),
])  # fmt: skip
def test_bad_rows_say_why(published, kind):
    with pytest.raises(BadRow, match=f"^{kind}(:|$)"):
        task.problem(published)


@pytest.mark.parametrize("answer", ["5", "12.5", r"3 \sqrt { 3 }", r"\frac { 20 } { 3 }", "36^\\circ", r"8 \pi"])
def test_labels_as_they_are_published(answer):
    problem = task.problem(row(picture(), answer=answer))
    assert mathematics.score(rf"so \boxed{{{answer}}}", problem.label) == 1.0
    assert mathematics.score(r"so \boxed{4711}", problem.label) == 0.0


@given(kind=st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP"]), data=st.data())
def test_a_file_that_was_cut_short_is_broken_or_whole(kind, data):
    """A broken image is never kept with a part of it missing."""
    content = encoded(picture(size=(64, 48)), kind)
    cut = content[: data.draw(st.integers(0, len(content) - 1))]
    try:
        problem = task.problem(row(cut))
    except BadRow as error:
        assert str(error).startswith("image broken: ")
    else:
        assert np.array_equal(decoded(problem.images[0]), decoded(content))


@given(st.binary(max_size=200), st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"BM"]))
def test_any_bytes_are_an_image_or_a_bad_row(noise, magic):
    try:
        task.problem(row(magic + noise))
    except BadRow as error:
        assert str(error).split(":")[0] in ("image broken", "image too large")


def test_a_decompression_bomb_is_not_decoded(tmp_path):
    """Decoded, these take 75 MB and 10 GB, and the last is a file of a terabyte. The process may have 40 MiB more."""
    (tmp_path / "fine.png").write_bytes(encoded(picture()))
    (tmp_path / "large.png").write_bytes(png_head(5000, 5000))
    (tmp_path / "huge.png").write_bytes(png_head(60000, 60000))
    with (tmp_path / "long.png").open("wb") as file:
        file.truncate(2**40)
    code = """
import resource, sys
from bapo_openrlhf.tasks import geometry

def look(path):
    try:
        geometry.problem({"images": [path], "problem": "<image>x", "answer": "5"})
        print("fine")
    except geometry.BadRow as error:
        print(str(error).split(":")[0])

look(sys.argv[1])  # imports what it takes
now = next(1024 * int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData:"))
resource.setrlimit(resource.RLIMIT_DATA, (now + 40 * 2**20,) * 2)
for path in sys.argv[1:]:
    look(path)
"""
    paths = [str(tmp_path / f"{name}.png") for name in ("fine", "large", "huge", "long")]
    run = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, check=False)
    assert run.stdout.splitlines() == ["fine", "fine", *["image too large"] * 3], run.stderr


@settings(max_examples=settings.default.max_examples // 3)
@given(st.integers(0, 2**32 - 1))
def test_half_transparent_pixels_are_mixed_with_white(seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 5, 4), dtype=np.uint8)
    share = pixels[..., 3:].astype(float) / 255
    expected = share * pixels[..., :3] + (1 - share) * 255
    (content,) = task.problem(row(Image.fromarray(pixels, "RGBA"))).images
    assert np.abs(decoded(content) - expected).max() <= 1.0


def test_palette_images_with_a_transparent_colour():
    image = picture().convert("P", palette=Image.Palette.ADAPTIVE, colors=2)
    (content,) = task.problem(row(encoded(image, transparency=image.getpixel((39, 0))))).images
    assert np.array_equal(decoded(content), np.asarray(picture()))


@pytest.fixture
def drawn(monkeypatch):
    """Draws a figure. Returns its sides, and each label with its place and its box; points are complex numbers."""
    sides, labels = [], []
    polygon, text = ImageDraw.ImageDraw.polygon, ImageDraw.ImageDraw.text

    def noted_polygon(brush, points, *args, **kwargs):
        corners = [complex(*point) for point in points]
        sides[:] = zip(corners, corners[1:] + corners[:1], strict=True)
        return polygon(brush, points, *args, **kwargs)

    def noted_text(brush, place, label, *args, **kwargs):
        box = brush.textbbox(place, label, font=kwargs["font"], anchor=kwargs["anchor"])
        labels.append((label, complex(*place), box))
        return text(brush, place, label, *args, **kwargs)

    def draw(figure, turned):
        labels.clear()
        task.draw(figure, turned)
        return sides, labels

    monkeypatch.setattr(ImageDraw.ImageDraw, "polygon", noted_polygon)
    monkeypatch.setattr(ImageDraw.ImageDraw, "text", noted_text)
    return draw


def area(sides):
    """The area of a polygon by the shoelace formula. Its sign is the direction of the corners."""
    return 0.5 * sum((start.conjugate() * end).imag for start, end in sides)


@pytest.mark.parametrize("kind", ["right triangle", "rectangle", "angles"])
def test_answers_can_be_measured_in_the_figure(kind, drawn):
    """Each figure is to scale: the answer is measured in pixels, and only the labels give the scale."""
    figures = [figure for figure in task.figures() if figure.name.startswith(kind)]
    assert len(figures) > 300
    for number, figure in enumerate(figures[::7]):
        sides, labels = drawn(figure, turned=number * 61.0)
        if kind == "angles":
            assert len(labels) == 3 and "x°" in {label for label, _, _ in labels}
            for label, place, _ in labels:
                there = min((start for start, _ in sides), key=lambda corner: abs(corner - place))
                one, other = (start - there for start, _ in sides if start != there)
                expected = figure.answer if label == "x°" else int(label.removesuffix("°"))
                assert abs(math.degrees(cmath.phase(one / other))) == pytest.approx(expected, abs=1e-6)
            continue
        lengths = {}
        for label, place, _ in labels:
            start, end = min(sides, key=lambda side: abs(sum(side) / 2 - place))
            lengths[label] = abs(end - start)
        assert len(lengths) == len(labels)  # no two labels at one side
        units = [lengths[label] / int(label) for label in lengths if label != "x"]  # pixels of a unit
        assert len(units) == 2 and units[0] == pytest.approx(units[1])
        if kind == "rectangle":
            assert abs(area(sides)) / units[0] ** 2 == pytest.approx(figure.answer)
        else:
            assert lengths["x"] / units[0] == pytest.approx(figure.answer)
            a, b, c = sorted(lengths.values())
            assert a * a + b * b == pytest.approx(c * c)


def test_labels_are_within_the_image_and_beside_the_lines(drawn):
    for number, figure in enumerate(list(task.figures())[::11]):
        sides, labels = drawn(figure, turned=number * 47.0)
        sense = math.copysign(1.0, area(sides))
        for _, place, (left, top, right, bottom) in labels:
            assert 0 <= left < right <= task.SIZE and 0 <= top < bottom <= task.SIZE, figure.name
            inwards = [((place - start) / (end - start) * abs(end - start)).imag * sense for start, end in sides]
            assert min(inwards) > 8 if figure.name.startswith("angles") else min(inwards) < -15
        for one, other in itertools.combinations([box for _, _, box in labels], 2):
            assert one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1], figure.name


@pytest.mark.parametrize("most", [100, pytest.param(None, marks=pytest.mark.slow)])
def test_drawn_problems_are_solvable_and_different(most):
    """All problems of the usual sizes, or the first ones of each part."""
    seen, pictures = {}, set()
    sizes = {part: min(size, most or size) for part, size in task.TASK.sizes["drawn"].items()}
    for part, size in sizes.items():
        problems = list(task.generate("drawn", part, size, seed=0))
        assert len(problems) == size
        for problem in problems:
            assert problem.key not in seen  # in no other part either
            seen[problem.key] = part
            pictures.add(problem.images[0])
            assert not any(character.isdecimal() for character in problem.text)  # only the image has the numbers
            assert mathematics.score(rf"\boxed{{{problem.label}}}", problem.label) == 1.0
            assert int(problem.label) > 0
    assert len(pictures) == len(seen) == sum(sizes.values())
    assert set(sizes) == set(task.TASK.parts)


def test_parts_share_no_problem_whatever_their_seeds(monkeypatch):
    """All problems of each part with one seed are compared with all problems of the other parts with another seed."""
    monkeypatch.setattr(task, "draw", lambda *_, **__: b"not drawn")
    keys = {}
    for seed, part in enumerate(task.TASK.parts):
        with pytest.raises(ConfigError, match="the number of problems is") as error:
            list(task.generate("drawn", part, 10**6, seed))
        most = int(str(error.value).split("at most ")[1].split(",")[0])
        keys[part] = {problem.key for problem in task.generate("drawn", part, most, seed)}
        assert len(keys[part]) == most >= task.TASK.sizes["drawn"][part]
    assert sum(map(len, keys.values())) == len(set().union(*keys.values())) == len(list(task.figures()))
    assert 0.6 < len(keys["train"]) / len(list(task.figures())) < 0.9
    kinds = {(figure.name.split()[0], figure.part) for figure in task.figures()}
    assert len(kinds) == 3 * len(task.TASK.parts)  # every kind is in every part


def test_a_seed_makes_the_same_problems_again():
    def problems_of(seed):
        return list(task.generate("drawn", "geo3k_val", 20, seed))

    assert problems_of(3) == problems_of(3)
    assert [problem.key for problem in problems_of(3)] != [problem.key for problem in problems_of(4)]


def test_prepare_writes_images_that_open(tmp_path):
    prepare(task.TASK, Preparation(out=tmp_path, generator="drawn", limits=dict.fromkeys(task.TASK.parts, 6)))
    for part in task.TASK.parts:
        rows = [json.loads(line) for line in (tmp_path / f"{part}.jsonl").read_text().splitlines()]
        assert len(rows) == 6
        for written in rows:
            (path,) = written["images"]
            assert decoded(Path(path).read_bytes()).shape == (task.SIZE, task.SIZE, 3)
            assert written["input"].startswith("<image>") and written["input"].count("<image>") == 1
            assert r"\boxed{}" in written["input"]


def test_the_reward_file_is_light_and_stands_alone():
    """OpenRLHF loads the file by its path. The judge needs neither torch nor Pillow."""
    code = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("reward_func", {task.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(module.reward_func(["a b \\\\boxed{{4}}"], ["a b"], ["4"])["rewards"], {{"torch", "PIL"}} & set(sys.modules))
print(module.answer("\\\\boxed{{4}}"))  # for majority votes
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["[1.0]", "set()", "4"]
