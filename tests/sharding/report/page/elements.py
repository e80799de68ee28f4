"""Reads the elements of a page in the browser."""

import json


def boxes(page, selector, *more):
    """Return `[x, y, width, height, ...]` of all elements of a selector, with further expressions of `e`."""
    parts = ", ".join(["r.x", "r.y", "r.width", "r.height", *more])
    return page.run(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => {{ const r = e.getBoundingClientRect(); "
        f"return [{parts}]; }})"
    )


def texts(page, selector):
    return page.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.innerText.trim())")


def texts_of(page, selector):
    return page.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)")


def visible_rows(page, selector):
    """Return the texts of rows that are not hidden, including folded ones."""
    return page.run(
        f"[...document.querySelectorAll({json.dumps(selector)})].filter((e) => !e.hidden).map((e) => e.textContent)"
    )


def colours(page, selector):
    """Return the text colours of each logical axis, by the name that is shown."""
    pairs = page.run(
        f"[...document.querySelectorAll({json.dumps(selector)})]"
        ".map((e) => [e.querySelector('b').textContent, getComputedStyle(e).color])"
    )
    colours_of: dict[str, set[str]] = {}
    for name, colour in pairs:
        colours_of.setdefault(name, set()).add(colour)
    return colours_of
