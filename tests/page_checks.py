"""Checks of pages in the browser: nothing overflows the window, and text has enough contrast."""

OPEN_ALL = "document.querySelectorAll('details').forEach((e) => { e.open = true; })"


def overflows(page, width):
    """Open everything that is folded, and return what is wider than the window."""
    page.run(OPEN_ALL)
    if page.run("document.documentElement.scrollWidth") != width:
        return ["the page"]
    too_wide = page.run(
        "[...document.querySelectorAll('main *')].filter((e) => !e.closest('pre, [aria-hidden=true]') && "
        "getComputedStyle(e).clipPath === 'none' && !e.closest('thead') && "
        f"e.getBoundingClientRect().right > {width} + 0.5).map((e) => e.outerHTML.slice(0, 200))"
    )
    return too_wide + page.run(  # tables that need scrolling
        "[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth + 1)"
        ".map((e) => e.textContent.slice(0, 100))"
    )


def faint_texts(page):
    """Open everything that is folded, and return texts with less contrast than 4.5, as WCAG requires for small text."""
    page.run(OPEN_ALL)
    return page.run(CONTRAST)


CONTRAST = """(() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = (text) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
    const d = canvas.getImageData(0, 0, 1, 1).data; return [d[0], d[1], d[2], d[3] / 255]; };
  const seen = new Map();
  const colour = (text) => { if (!seen.has(text)) seen.set(text, rgba(text)); return seen.get(text); };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  const behind = (e) => {
    if (!e) return [255, 255, 255];
    const own = colour(getComputedStyle(e).backgroundColor);
    return own[3] === 1 ? own.slice(0, 3) : over(own, behind(e.parentElement));
  };
  const light = (c) => { const [r, g, b] = c.map((v) => v / 255).map((v) =>
    v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const faint = [];
  for (const e of document.querySelectorAll('main *, .plane text')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.getClientRects().length) continue;
    const isDevice = e.matches('.plane text');
    const back = isDevice ? over(colour(getComputedStyle(e.previousElementSibling).fill), [0, 0, 0]) : behind(e);
    const text = over(colour(getComputedStyle(e)[isDevice ? 'fill' : 'color']), back);
    const [a, b] = [light(text), light(back)].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) faint.push([((a + 0.05) / (b + 0.05)).toFixed(2), e.outerHTML.slice(0, 120)]);
  }
  return faint;
})()"""
