"""The pages of research/ say what is there: links, commands, and the script that a page shows."""

import re

import pytest
from folders import ROOT

from bapo_openrlhf import user_file

commands = user_file.load("commands", ROOT / "tests" / "unit" / "test_docs_commands.py")
docs = user_file.load("docs", ROOT / "tests" / "unit" / "test_docs.py")
PAGES = sorted((ROOT / "research").glob("*.md"))
hold, project = commands.hold, commands.project  # fixtures


@pytest.mark.parametrize("page", [*PAGES, *(ROOT / "research" / "results").glob("*.md")], ids=lambda page: page.name)
def test_links_and_flags(page):
    docs.test_links_lead_somewhere(page)
    docs.test_flags_and_presets_exist(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_holds(page, hold, tmp_path):
    for number, (language, text) in enumerate(commands.blocks(page)):
        folder = tmp_path / str(number)
        folder.mkdir()
        calls = commands.shell(text, folder) if language == "bash" else []
        of_research = [call for call in calls if call[0] == "python" and call[1].startswith("research/")]
        assert all((ROOT / call[1]).is_file() for call in of_research)
        hold([(page.name, call) for call in calls if call not in of_research])


def test_every_script_that_a_page_names_is_there():
    text = "".join(page.read_text() for page in [*PAGES, ROOT / "docs" / "results.md"])
    named = set(re.findall(r"research/[a-z\d_/]+\.(?:py|sh|yaml)", text))
    assert len(named) > 10 and all((ROOT / name).is_file() for name in named), named


def test_every_command_of_the_script_holds(hold, tmp_path):
    script = (ROOT / "research" / "smollm2.sh").read_text()
    calls = commands.shell(re.sub(r"^cd .*$", "", script, flags=re.M), tmp_path)
    assert len(calls) == 4
    hold([("smollm2.sh", call) for call in calls])


def test_the_script_of_the_table_does_what_its_page_shows(tmp_path):
    """examples/countdown_table.sh, with the same stand-ins."""
    script = (ROOT / "examples" / "countdown_table.sh").read_text()
    ran = commands.shell(re.sub(r"^cd .*$", "", script, flags=re.M), tmp_path)
    page = (ROOT / "research" / "first_study.md").read_text()
    (block,) = re.findall(r"```bash\n(.*?)```", page.split("## Two methods on benchmarks")[1].split("\n## ")[0], re.S)
    folder = tmp_path / "page"
    folder.mkdir()
    assert [call for call in commands.shell(block, folder) if call not in ran] == []
