"""Pages of the repository's root on the site, and links to them.

The page `project/NAME` of the site has the text of a file at the root, such as CONTRIBUTING.md. In the repository, it
is a stub with a link to that file. Links between pages are those of the repository, relative to each file, so that they
work on the repository's web page too. On the site, links to such a file lead to its page.
"""

import os.path
import re
from pathlib import Path

from sphinx.application import Sphinx

NAMES = ("README", "CONTRIBUTING", "CHANGELOG", "RELEASING", "SECURITY")
PAGES = {f"project/{name.lower()}": f"../{name}.md" for name in NAMES}
LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)#\s]+)")


def read_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replaces the text of a stub by that of its file, and rewrites links to files that have pages."""
    folder = os.path.dirname(docname)
    origin = folder
    if (file := PAGES.get(docname)) is not None:
        path = Path(app.srcdir, file).resolve()
        app.env.note_dependency(str(path))
        source[0] = path.read_text()
        origin = os.path.dirname(file)
    documents = {file: f"{page}.md" for page, file in PAGES.items()}

    def on_site(link: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(origin, link[2]))  # relative to docs/
        target = target.removeprefix("../docs/")
        return link[1] + os.path.relpath(documents.get(target, target), folder or ".")

    source[0] = LINK.sub(on_site, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the event."""
    app.connect("source-read", read_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
