"""A page as one file that makes no external request.

Its Content-Security-Policy forbids requests, so the page can be mailed or kept with a run. The policy allows the page's
own scripts, by their digests: a name from a program or a file can never run as a script.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape

from autoshard._html.parts import section

Part = tuple[str, str, str, str]  # of a page: its name in links, its heading, its HTML, a remark


def digest(script: str) -> str:
    """Return the digest by which a policy allows a script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def document(title: str, style: str, body: str, scripts: Sequence[str]) -> str:
    """Return the HTML of a page.

    Args:
        title: Title of the window, as text.
        style: The style sheet.
        body: The HTML of the page.
        scripts: The scripts. The page is complete without them.
    """
    allowed = " ".join(f"'{digest(script)}'" for script in scripts) or "'none'"
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; base-uri 'none'; form-action 'none'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/><title>{escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}"/>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"/>\n<style>{style}</style>'
        f"</head>\n<body><main>{body}\n</main>"
        f"{''.join(f'<script>{script}</script>' for script in scripts)}</body></html>\n"
    )


def sections(parts: Sequence[Part]) -> str:
    """Return the sections of a page below a line of links to them. Parts without content are left out."""
    shown = [part for part in parts if part[2]]
    links = "".join(f'<a href="#{name}">{escape(heading)}</a>' for name, heading, _, _ in shown)
    body = "\n".join(section(name, heading, inner, remark) for name, heading, inner, remark in shown)
    return f'<nav aria-label="Sections">{links}</nav>\n{body}'
