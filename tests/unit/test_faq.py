"""docs/faq.md quotes messages that the code can produce, word for word."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUOTED = re.findall(r"^```text\n(.*?)\n```$", (ROOT / "docs" / "faq.md").read_text(), re.M | re.S)
# Files of other programs that have their messages. They are read, and not imported.
OTHERS = {
    "vllm": ["config/device.py", "v1/worker/cpu_worker.py", "v1/core/kv_cache_utils.py"],
    "ray": ["exceptions.py", "_private/services.py", "autoscaler/_private/util.py"],
    "datasets": ["load.py"],
    "transformers": ["tokenization_utils_base.py"],
}


def files():
    yield from (ROOT / "bapo_openrlhf").rglob("*.py")
    for package, names in OTHERS.items():
        if spec := importlib.util.find_spec(package):
            yield from (Path(spec.submodule_search_locations[0]) / name for name in names)


@pytest.fixture(scope="module")
def pieces():
    """The texts in the code, in parts where values stand in them, the longest first."""
    nodes = (node for file in files() for node in ast.walk(ast.parse(file.read_text())))
    texts = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    found = {piece.strip() for text in texts for piece in re.split(r"{[^{}]*}", text)}
    return sorted((piece for piece in found if len(piece) >= 8 and " " in piece), key=len, reverse=True)


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_made_of_texts_in_the_code(pieces, message):
    """What is left between them are values, which are not four words in a row."""
    rest = re.sub(r"[^.]*\.\.\.$", "", message)
    for piece in pieces:
        rest = rest.replace(piece, "\0")
    assert not re.search(r"([A-Za-z']+ ){3}[A-Za-z']+", rest), rest
