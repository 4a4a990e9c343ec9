"""The documentation as a site: `make docs` builds it into docs/_build.

The pages are the project's Markdown files in their places, so that a link works here and on the forge. The source
folder is the project's root, and README is the home page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bapo_openrlhf import __version__

project = "bapo_openrlhf"
author = "the bapo_openrlhf authors"
copyright = author
release = __version__

# The side bar. A page that is missing here, or that is here but does not exist, is a warning, and warnings are errors.
CONTENTS = {
    "Start": ["docs/install", "docs/quickstart", "docs/concepts", "docs/results", "docs/performance"],
    "Use": [
        "docs/own_data",
        "docs/several_machines",
        "docs/smoke",
        "docs/plan",
        "docs/tasks",
        "docs/rewards",
        "docs/agents",
        "docs/watch",
        "docs/report",
        "docs/studies",
        "docs/faq",
    ],
    "Look up": ["docs/config", "docs/api", "docs/methods", "docs/metrics", "docs/presets"],
    "Why and how": ["docs/paper_to_code", "docs/decisions", "docs/reliability"],
    "Extend": [
        "docs/architecture",
        "docs/add_a_method",
        "examples/trl/README",
        "CONTRIBUTING",
        "docs/upgrade_openrlhf",
        "docs/dependencies",
        "SECURITY",
        "CHANGELOG",
    ],
    "Measured": [
        "research/benchmarks/results/adaptation",
        "research/benchmarks/results/asynchronous",
        "research/benchmarks/results/delay",
        "research/benchmarks/results/faster",
        "research/benchmarks/results/floor",
        "research/benchmarks/results/gpu_first",
        "research/benchmarks/results/gpu_second",
        "research/benchmarks/results/gpu_third",
        "research/benchmarks/results/kernels",
        "research/benchmarks/results/math_verifiers",
        "research/benchmarks/results/products",
        "research/benchmarks/results/quickstart",
        "research/benchmarks/results/start",
        "research/benchmarks/results/steps",
        "research/benchmarks/results/trainer_process",
    ],
    "Research": [
        "research/README",
        "research/study_design",
        "research/study_results",
        "research/decision_design",
        "research/results/decision/decision",
        "research/results/fair/fair_trial",
        "research/fair_trial_design",
        "research/critic_design",
        "research/results/critic/critic",
        "research/reuse_design",
        "research/results/reuse/reuse",
        "research/halves_design",
        "research/results/halves/halves",
        "research/first_study",
        "research/faster_steps",
        "research/results/corrections",
        "research/results/plan",
        "research/results/simulation",
        "research/results/zero",
    ],
}

root_doc = "README"
include_patterns = [
    "*.md", "docs/*.md", "examples/*/*.md", "research/*.md", "research/results/*.md", "research/results/*/*.md",
    "research/benchmarks/results/*.md",
]  # fmt: skip
exclude_patterns = [".*", "docs/_build", "build", "dist", "runs", "data"]
extensions = ["myst_parser"]
myst_heading_anchors = 4  # the same anchors as on the forge, so that links to headings are checked
nitpicky = True
highlight_language = "none"  # for a block that names no language
smartquotes = False  # -- begins a flag; it is not a dash

html_theme = "furo"
html_title = f"bapo_openrlhf {__version__}"
html_static_path = ["site/site.css"]
html_css_files = ["site.css"]
html_extra_path = ["site/index.html"]  # forwards to README.html
html_copy_source = html_use_index = False


def add_contents(app: Any, name: str, source: list[str]) -> None:
    """Append the pages of the side bar to the home page. The forge needs no such list, so the file has none."""
    if name == root_doc:
        for caption, pages in CONTENTS.items():
            source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", *pages, "```", ""])


def list_external_links(app: Any, error: Exception | None) -> None:
    """Write external_links.txt next to the site: each external address with the page that has it. None is fetched."""
    from docutils import nodes

    if error is None:
        links = {
            f"{node['refuri']}  {name}"
            for name in app.env.found_docs
            for node in app.env.get_doctree(name).findall(nodes.reference)
            if "://" in node.get("refuri", "")
        }
        Path(app.outdir, "external_links.txt").write_text("\n".join(sorted(links)) + "\n", encoding="utf-8")


def setup(app: Any) -> None:
    app.connect("source-read", add_contents)
    app.connect("build-finished", list_external_links)
