"""A parser that checks HTML for tests."""

from collections import Counter
from html.parser import HTMLParser


class Reader(HTMLParser):
    """Check that tags are balanced, and collect text and attributes."""

    VOID = frozenset({"meta", "rect", "path", "br", "input", "link", "img"})

    def __init__(self):
        super().__init__()
        self.open, self.text, self.tags, self.attributes, self.counts = [], [], set(), [], Counter()

    def tags_of(self, tag):
        return self.counts[tag]

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.counts[tag] += 1
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, (self.open, tag)
        self.open.pop()

    def handle_data(self, data):
        self.text.append(data)


def read(html):
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader
