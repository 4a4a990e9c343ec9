"""Configuration files as editors and users leave them. Layers of files are tested in test_arguments.py."""

import codecs
import math

import pytest

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags.files import settings_of

TEXT = "run:\n  name: grün\nadapt: {c1: 1/4} # größer\n"
WANTED = {"run.name": "grün", "adapt.c1": "1/4"}
MARKS = {"utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE, "utf-32-le": codecs.BOM_UTF32_LE,
         "utf-32-be": codecs.BOM_UTF32_BE, "utf-8": codecs.BOM_UTF8}  # fmt: skip


@pytest.fixture
def write_file(tmp_path):
    def write(data: bytes) -> str:
        path = tmp_path / "config.yaml"
        path.write_bytes(data)
        return str(path)

    return write


@pytest.mark.parametrize("encoding", MARKS)
@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r", "\u2028"])
def test_encodings_that_say_what_they_are_and_any_line_ending(write_file, encoding, ending):
    data = MARKS[encoding] + TEXT.replace("\n", ending).encode(encoding)
    assert dict(settings_of(write_file(data))) == WANTED


@pytest.mark.parametrize("ending", ["", "\n", "\r\n", "\n\n", "\n...\n"])
def test_utf8_without_a_mark_and_any_end_of_the_file(write_file, ending):
    assert dict(settings_of(write_file(TEXT.removesuffix("\n").encode() + ending.encode()))) == WANTED


def test_another_encoding_is_refused_with_the_line(write_file):
    path = write_file(("a: 1\n" + TEXT).encode("latin-1"))
    with pytest.raises(ConfigError, match=f"^config {path}, line 3: no text in utf-8; "):
        list(settings_of(path))


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"\x89PNG\r\n", b"PK\x03\x04"])
def test_a_file_of_another_kind_is_refused_in_one_line(write_file, data):
    path = write_file(data)
    with pytest.raises(ConfigError, match=path) as error:
        list(settings_of(path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "word", ["2024_05_01", "1.10", "1e3", "0x10", "010", "1:30", "2024-02-30", "2024-02-29 10:00:00", "on", "No", "="]
)
def test_a_plain_word_stays_as_it_is_written(write_file, word):
    text = f"run: {{name: {word}}}\nadapt.c2: [{word}]".encode()
    assert dict(settings_of(write_file(text))) == {"run.name": word, "adapt.c2": [word]}


@pytest.mark.parametrize(
    ("word", "value"), [("", None), ("~", None), ("null", None), (".inf", math.inf), ("-.inf", -math.inf)]
)
def test_a_word_that_the_flags_do_not_know(write_file, word, value):
    assert dict(settings_of(write_file(f"adapt.eps: {word}".encode()))) == {"adapt.eps": value}
