"""A page of `report` or `study`, taken apart."""

from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """A page taken apart: its elements, each with its attributes, depth of open elements, and text."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.text, self.open, self.texts = [], "", [], {}
        self.declared = None
        self.feed(text)
        self.close()
        assert not self.open

    def handle_decl(self, decl):
        self.declared = decl

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
