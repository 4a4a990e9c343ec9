"""A page of `report` or `study`: taken apart, and opened in a browser."""

import json
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr", "--dump-dom",
)  # fmt: skip
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """A page taken apart: its whole text, and its elements, each with its attributes and text."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.text, self.open, self.texts = [], text, [], {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append((tag, len(self.elements) - 1))

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1][0] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data[:80]}")

    def handle_data(self, data):
        for _, index in self.open:
            self.texts[index] = self.texts.get(index, "") + data

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    def words(self, tag):
        return [" ".join(self.texts.get(k, "").split()) for k, (name, _) in enumerate(self.elements) if name == tag]


def needs_browser(test):
    skipped = pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium here to open the page in")
    return pytest.mark.browser(skipped(test))


def in_browser(html, folder, then="", width=1280):
    """The page after the script `then`, which only a test may add. The browser had nothing to complain about."""
    if then:
        html = html.replace("default-src 'none';", "default-src 'none'; script-src 'unsafe-inline';")
        html = html.replace("</body>", f"<script>{then}</script></body>")
    path = folder / "page.html"
    path.write_text(html, encoding="utf-8")
    words = [CHROMIUM, *FLAGS, f"--window-size={width},900", f"--user-data-dir={folder / 'profile'}", path.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    assert "CONSOLE" not in done.stderr
    return Page(done.stdout)


LAYOUT = """
addEventListener("load", () => {
  const broken = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const text = walk.currentNode.data;
    for (const flag of text.matchAll(/--[a-z]/g)) {
      const range = document.createRange();
      range.setStart(walk.currentNode, flag.index);
      range.setEnd(walk.currentNode, flag.index + 3);
      if (new Set([...range.getClientRects()].map((part) => part.top)).size > 1) broken.push(text);
    }
  }
  const first = document.querySelector(".drawing")?.getBoundingClientRect();
  document.title = JSON.stringify({
    wide: document.documentElement.scrollWidth - innerWidth, broken, first: first && first.bottom,
  });
});
"""


def layout(html, folder, width):
    """How a browser of so many pixels lays a page out.

    Returns:
        wide: by how many pixels the page is wider than the window; broken: texts in which a line ends within the dashes
        of a flag; first: the bottom of the first chart.
    """
    return json.loads(in_browser(html, folder, LAYOUT, width).words("title")[0])
