"""The style sheet of a plan's page."""

from autoshard._html import style

_OWN = """header .mesh { font-size: 18px; color: var(--soft); }
.next { display: inline-block; margin: 0 14px 0 0; padding: 0; color: var(--soft); }
ul.next { list-style: none; display: inline; }
ul.next li { display: inline-block; margin-right: 14px; color: var(--ink); }
.panels + .legend { margin-top: 14px; }
.sources { margin: 10px 0 0; }
.counts { list-style: none; margin: 8px 0 0; padding: 0; font-size: 14px; }
.counts li { margin: 2px 0; }
[id^=arrays-], #plans { scroll-margin-top: 92px; }
.dim { display: inline-flex; align-items: center; margin: 2px 10px 2px 0; white-space: nowrap; }
.dim .n { font-size: 13.5px; margin: 0 4px; }
.dim .axis:has(+ .axis) { border-radius: 6px 0 0 6px; border-right: 0; }
.dim .axis + .axis { border-radius: 0 6px 6px 0; }
.dim i { margin-left: 3px; }
.axis { display: inline-block; border-radius: 6px; padding: 1px 8px; white-space: nowrap; font: inherit;
  font-size: 13.5px; border: 1px solid hsl(var(--h) var(--s) var(--fill)); color: hsl(var(--h) var(--s) var(--text));
  background: hsl(var(--h) var(--s) var(--pale)); max-width: 100%; }
.axis.on { background: hsl(var(--h) var(--s) var(--light)); border-color: hsl(var(--h) var(--s) 50%); }
.axis.part { border-style: dashed; border-color: hsl(var(--h) var(--s) 50%); }
.axis b { font-weight: 600; }
.a-none { --h: 0; --s: 0%; }
button.axis { cursor: pointer; margin: 0 6px 6px 0; padding: 3px 10px; white-space: normal; }
button.axis:hover { border-color: hsl(var(--h) var(--s) 50%); }
button.axis[aria-pressed=true] { box-shadow: 0 0 0 2px var(--ink); }
.axes { margin: 4px 0; }
.axes > span:first-child { color: var(--soft); font-size: 13.5px; display: inline-block; min-width: 140px; }
i.sharded, i.stored { font-style: normal; font-weight: 600; font-size: 12.5px; border-radius: 4px; padding: 0 6px;
  margin-left: 6px; background: var(--ink); color: var(--card); white-space: nowrap; display: inline-block; }
td > i.sharded:first-child, figcaption i.sharded { margin-left: 0; }
i.stored { background: transparent; color: var(--ink); outline: 1px dashed var(--soft); outline-offset: -1px; }
.then { color: var(--soft); font-size: 13px; margin: 0 7px; }
.panels { display: flex; flex-wrap: wrap; gap: 26px 30px; }
.panel { margin: 0; flex: 0 1 auto; max-width: 100%; min-width: 0; }
.panel figcaption { font-size: 15px; margin-bottom: 8px; }
.panel figcaption i.sharded { font-size: 15px; padding: 1px 9px; }
.planes { display: flex; flex-wrap: wrap; gap: 8px 10px; max-width: 100%; }
.plane { text-align: center; font-size: 13px; color: var(--soft); max-width: 100%; }
.plane svg { display: block; max-width: 100%; height: auto; }
.plane rect { fill: var(--dev); stroke: var(--devline); }
.plane rect.on { fill: var(--on); stroke: var(--on); }
.plane rect.bus { fill: var(--line); stroke: none; }
.plane path { stroke: var(--devline); stroke-width: 2; fill: none; }
.plane text { fill: var(--ink); font-size: 11.5px; text-anchor: middle; pointer-events: none; }
.plane rect.on + text { fill: #ffffff; font-weight: 600; }
.panel dl { display: grid; grid-template-columns: auto 1fr; gap: 3px 14px; margin: 10px 0 0; font-size: 14px;
  max-width: 560px; }
.panel dt { color: var(--soft); }
.panel dd { margin: 0; }
.panel dd .axis { margin: 1px 0; }
ul.paths, ul.why { margin: 4px 0 6px; padding-left: 20px; font-size: 13px; }
ul.paths { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; max-height: 300px;
  overflow-y: auto; }
ul.why { max-width: 640px; color: var(--soft); }
.spec { margin: 4px 0; }
.filters { display: flex; flex-wrap: wrap; align-items: center; gap: 0 20px; }
.filters .search { flex: 0 1 480px; }
summary code { display: inline-block; max-width: min(340px, 70vw); white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis; vertical-align: middle; }
button[data-fold] { font: inherit; font-size: 13.5px; color: var(--accent); background: none; border: 0; padding: 4px 0;
  cursor: pointer; text-decoration: underline; }
.bar .whole, .bar .local { position: absolute; left: 0; top: 0; }
.bar .whole { background: var(--rival); }
.bar .local { background: var(--accent); min-width: 1px; }
.lanes { display: grid; grid-template-columns: auto 1fr; gap: 6px 12px; align-items: center; font-size: 14px; }
.lanes + .ends { padding-left: 66px; }
.hid { opacity: .45; }
.lanes + .ends + .legend { margin-bottom: 2px; }
.k-on { background: var(--on); }
.k-device { background: var(--dev); border: 1px solid var(--devline); }
.k-local { background: var(--accent); }
.k-total { background: var(--rival); }
.k-chosen { background: var(--accent); }
.k-unfit { background: var(--unfit); }
.beyond { top: 0; bottom: 0; right: 0; background: var(--shade); border-left: 2px solid var(--bad); }
.limit { position: absolute; top: 6px; color: var(--bad); white-space: nowrap; }
.limit.left { transform: translateX(8px); }
.limit.right { transform: translateX(calc(-100% - 8px)); }
.front { position: absolute; inset: 0; width: 100%; height: 100%; pointer-events: none; }
.front path { fill: none; stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 4 4; }
.pt { width: 9px; height: 9px; margin: 0 0 -4.5px -4.5px; border-radius: 50%; background: var(--rival);
  border: 1px solid var(--card); }
.plot .pt:hover { outline: 2px solid var(--ink); z-index: 2; }
.pt.unfit { background: transparent; border: 1.5px solid var(--unfit); }
.pt.won { width: 17px; height: 17px; margin: 0 0 -8.5px -8.5px; background: var(--accent); z-index: 1;
  border: 3px solid var(--card); box-shadow: 0 0 0 2px var(--accent); }
.front-key { width: 22px; border-top: 1.5px dashed var(--soft); }
@media (max-width: 760px) {
  .axes > span:first-child { display: block; }
  .dim { flex-wrap: wrap; white-space: normal; }
  .axis { white-space: normal; }
}
"""

STYLE = style.STYLE + _OWN
