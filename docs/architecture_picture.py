"""The three figures of docs/architecture.md, made from the code: `python docs/architecture_picture.py`.

`subpackages.svg` shows the folders of the package in the order of their imports. Their sentences are the first
sentences of their docstrings. `rooms.svg` shows those of `training/` in the same way. `step.svg` shows what happens to
a group in one training step. Each stage names a function, and the script stops if that function does not exist.
`tests/unit/test_architecture.py` compares these files with the code.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "bapo_openrlhf"
IMAGES = Path(__file__).parent / "images"

# The parts from top to bottom, and the subpackages of each. One imports only from those that stand below it.
PARTS = {
    "Command line": ("#fff4de", ["cli"]),
    "Workbench: around training runs": ("#e4f0fb", ["workbench"]),
    "Plug-in: before, during and after a training run": (
        "#e8f5e6",
        [
            "launch",
            "data",
            "training",
            "machine.py",
            "cpu",
            "record",
            "flags",
            "tasks",
            "methods",
            "adapt",
            "flash_attention.py",
            "host.py",
            "user_file.py",
            "errors.py",
        ],
    ),
}
MANY = {"methods": "base, registry, stored_successes, and one file for each method"}  # instead of all of its files
SUBPACKAGES = [name for _, names in PARTS.values() for name in names]
# The rooms of training/, one for each kind of process, and those that each imports from.
ROOMS = {
    "driver": ("trainer", "engine", "worker", "wire"),
    "trainer": ("wire",),
    "engine": ("wire",),
    "worker": ("wire",),
    "wire": (),
}
WIDTH = 524  # pixels, so that letters can be read where a page has 400
DARK, GREY, BLUE = (f'fill="{colour}"' for colour in ("#222", "#555", "#0b5394"))
SMALL = 'font-size="13" font-family="monospace"'
IN_THE_DARK = {  # what a dark theme has in the place of a colour
    ("fill", "#fafafa"): "#14171a", ("fill", "#fff"): "#1b1f24", ("fill", "#222"): "#e9ecef",
    ("fill", "#333"): "#a9b1ba", ("fill", "#555"): "#a9b1ba", ("fill", "#0b5394"): "#7cc4f4",
    ("fill", "#fff4de"): "#352a14", ("fill", "#e4f0fb"): "#15283a", ("fill", "#e8f5e6"): "#172d1b",
    ("stroke", "#333"): "#a9b1ba", ("stroke", "#999"): "#4a525b",
}  # fmt: skip


class Stage(NamedTuple):
    """One function that each training step calls, and what it hands over to the next one."""

    lane: int
    what: str
    file: str
    function: str
    hands_over: str


LANES = ("Rollout engines (vLLM)", "Trainer (one process)", "Actor and critic workers (DeepSpeed)")
TINTS, LEFT = ("#fff4de", "#e4f0fb", "#e8f5e6"), (14, 67, 120)  # colours and places of the lanes
STAGES = [
    Stage(1, "Draw prompts, send them to the engines", "training/trainer/generator.py",
            "Generator.generate_samples", "prompts"),
    Stage(0, "Generate G responses for each prompt and get their rewards", "training/engine/engines.py",
            "RolloutEngine.generate_groups", "responses, rewards"),
    Stage(1, "Keep each response with the log-probs that it was drawn with", "training/trainer/samples.py",
            "generated_response", "responses"),
    Stage(1, "Re-evaluate hard prompts with today's weights", "training/trainer/generator.py",
            "Generator.reevaluate", "responses"),
    Stage(1, "Make groups of them", "training/trainer/accounts.py", "StepAccounts.enter", "groups"),
    Stage(1, "X1, X2 and X3: filter, choose, store, replay", "methods/bapo.py", "BAPO.build_batch", "batch"),
    Stage(1, "Get today's log-probs and values from the workers", "training/trainer/experience.py",
            "ExperienceMaker.forward", "log-probs, values"),
    Stage(1, "Take out groups that are not finite or too far", "adapt/review.py", "review", "kept groups"),
    Stage(1, "Set importance ratios and the KL penalty", "training/trainer/experience.py",
            "ExperienceMaker.finish", "experience"),
    Stage(1, "Compute advantages and returns", "training/trainer/advantages.py",
            "set_advantages", "experience, dealt to the ranks"),
    Stage(2, "Train on every micro-batch of the batch", "training/worker/updates.py",
            "WholeBatchActorTrainer.loss", "new weights"),
    Stage(0, "Take the weights, every v steps", "training/trainer/rollout_weights.py",
            "RolloutWeights.sync", "done"),
    Stage(1, "Count what became of each group", "adapt/ledger.py", "Ledger.settle", "states"),
    Stage(1, "Write metrics, groups and answers", "training/trainer/recorder.py", "StepRecorder.add_groups", ""),
]  # fmt: skip


def sentence(name: str) -> str:
    """The first sentence of a subpackage's docstring."""
    path = PACKAGE / name
    text = ast.get_docstring(ast.parse((path / "__init__.py" if path.is_dir() else path).read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def content(name: str) -> str:
    """The names of a subpackage's modules and folders; nothing for a module."""
    if name in MANY:
        return MANY[name]
    path = PACKAGE / name
    stems = sorted(each.stem for each in path.glob("*") if each.is_dir() or each.suffix == ".py")
    return ", ".join(stem for stem in stems if not stem.startswith("__"))


def names_of(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Qualified names of the functions and classes of a module."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from names_of(node.body, f"{prefix}{node.name}.")


def lines(text: str, width: int, x: int, y: int, style: str) -> tuple[list[str], int]:
    """Text in lines of at most `width` characters, and the height below the last of them."""
    wrapped = textwrap.wrap(text, width, break_on_hyphens=False)
    return [f'<text x="{x}" y="{y + 19 * row}" {style}>{escape(line)}</text>' for row, line in enumerate(wrapped)], (
        y + 19 * len(wrapped)
    )


def page(title: str, description: str, height: int, parts: list[str]) -> str:
    """An SVG with a title and a description for readers who do not see it. It follows the reader's theme."""
    dark = " ".join(f'[{kind}="{light}"] {{ {kind}: {dark}; }}' for (kind, light), dark in IN_THE_DARK.items())
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
            'role="img" aria-labelledby="title description" font-size="15" '
            'font-family="Helvetica, Arial, DejaVu Sans, sans-serif">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="description">{escape(description)}</desc>',
            f"<style>@media (prefers-color-scheme: dark) {{ {dark} }}</style>",
            '<defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0 L10 5 L0 10 z" fill="#333"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#fafafa"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def box(x: int, top: int, width: int, bottom: int, name: str) -> list[str]:
    """A frame with a name in its first line."""
    return [
        f'<rect x="{x}" y="{top}" width="{width}" height="{bottom - top}" rx="6" fill="#fff" stroke="#999"/>',
        f'<text x="{x + 12}" y="{top + 24}" font-weight="bold" font-family="monospace" {DARK}>{name}</text>',
    ]


def subpackages_picture() -> str:
    """The parts and subpackages of the package."""
    parts, y = [], 14
    for part, (colour, names) in PARTS.items():
        inside, top = [], y
        y += 28
        inside.append(f'<text x="58" y="{y}" font-weight="bold" font-size="16" {DARK}>{escape(part)}</text>')
        y += 12
        for name in names:
            start = y
            shown = name if name.endswith(".py") else name + "/"
            says, below = lines(sentence(name), 52, 70, y + 46, DARK)
            files, below = lines(content(name), 52, 70, below + 2, f"{GREY} {SMALL}")
            y = below - 4
            inside += [*box(58, start, 440, y, shown), *says, *files]
            y += 8
        parts.append(f'<rect x="46" y="{top}" width="464" height="{y - top + 4}" rx="8" fill="{colour}"/>')
        parts += inside
        y += 16
    parts += [
        f'<line x1="30" y1="24" x2="30" y2="{y - 16}" stroke="#333" stroke-width="1.5" marker-end="url(#arrow)"/>',
        *(
            f'<text x="20" y="{place}" transform="rotate(-90 20 {place})" text-anchor="middle" fill="#333">'
            "imports go down only</text>"
            for place in range(y // 8, y, y // 4)
        ),
    ]
    rows = "; ".join(f"{name}: {sentence(name)}" for name in SUBPACKAGES)
    story = f"From top to bottom, each imports only from those below. {rows}"
    return page("The subpackages of bapo_openrlhf", story, y, parts)


def rooms_picture() -> str:
    """The rooms of `training/` from the driver at the top to what travels. Rooms side by side do not know each other.

    All rooms import from `wire/`, and only the driver imports from others.
    """
    parts, y = [], 14
    for names in (["driver"], ["trainer"], ["engine", "worker"], ["wire"]):
        width, bottoms, inside = (496 - 12 * (len(names) - 1)) // len(names), [], []
        for place, name in enumerate(names):
            x = 14 + place * (width + 12)
            says, below = lines(sentence(f"training/{name}"), (width - 24) // 8, x + 12, y + 46, DARK)
            files, below = lines(content(f"training/{name}"), (width - 24) // 8, x + 12, below + 2, f"{GREY} {SMALL}")
            bottoms.append(below - 4)
            inside += [*says, *files]
        for place, name in enumerate(names):
            parts += box(14 + place * (width + 12), y, width, max(bottoms), f"{name}/")
        parts += inside
        y = max(bottoms) + 12
    story = "; ".join(f"{name} imports from {', '.join(known) or 'none'}" for name, known in ROOMS.items())
    return page("The rooms of training/, one for each kind of process", story, y, parts)


def step_picture() -> str:
    """What happens to a group in one training step. The stages of a process have the same place and colour.

    Raises:
        LookupError: A stage names a function that the code does not have.
    """
    parts, y = [], 20
    for name, colour, x in zip(LANES, TINTS, LEFT, strict=True):
        parts.append(f'<rect x="{x}" y="{y}" width="20" height="20" rx="4" fill="{colour}" stroke="#333"/>')
        parts.append(f'<text x="{x + 28}" y="{y + 15}" font-weight="bold" {DARK}>{escape(name)}</text>')
        y += 28
    y += 14
    before: tuple[int, int] | None = None
    for number, stage in enumerate(STAGES, start=1):
        if stage.function not in names_of(ast.parse((PACKAGE / stage.file).read_text()).body):
            raise LookupError(f"{stage.file} has no {stage.function}")
        x = LEFT[stage.lane]
        says, below = lines(f"{number}. {stage.what}", 44, x + 12, y + 24, DARK)
        where, below = lines(stage.file, 46, x + 12, below + 2, f"{GREY} {SMALL}")
        function = stage.function.replace(".", ". ") if len(stage.function) > 46 else stage.function
        name, below = lines(function, 46, x + 12, below, f"{BLUE} {SMALL}")
        if before is not None:
            at, bottom = before
            middle = (max(LEFT[at], x) + min(LEFT[at], x) + 390) // 2
            parts.append(
                f'<line x1="{middle}" y1="{bottom}" x2="{middle}" y2="{y - 2}" stroke="#333" stroke-width="1.5" '
                f'marker-end="url(#arrow)"/><text x="{middle + 10}" y="{y - 11}" font-size="13" fill="#333">'
                f"{escape(STAGES[number - 2].hands_over)}</text>"
            )
        below -= 8
        parts.append(
            f'<rect x="{x}" y="{y}" width="390" height="{below - y}" rx="6" fill="{TINTS[stage.lane]}" stroke="#333"/>'
        )
        parts += [*says, *where, *name]
        before, y = (stage.lane, below), below + 34
    story = "; ".join(f"{s.what} ({s.file}, {s.function})" for s in STAGES)
    return page("What happens to a group in one training step", story, y - 14, parts)


def main() -> None:
    """Write the files."""
    (IMAGES / "subpackages.svg").write_text(subpackages_picture(), encoding="utf-8")
    (IMAGES / "rooms.svg").write_text(rooms_picture(), encoding="utf-8")
    (IMAGES / "step.svg").write_text(step_picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
