"""The style sheet of a run's page."""

from autoshard.sharding.report.page import style

_OWN = """
.lines { grid-template-rows: auto 260px auto; margin-top: 6px; }
.lines .plot svg { position: absolute; inset: 0; width: 100%; height: 100%; pointer-events: none; }
.lines path { fill: none; stroke: currentColor; stroke-width: 1.75; stroke-linejoin: round; }
.lines path.raw { stroke-width: 1; opacity: .4; }
.plot .dot { width: 8px; height: 8px; margin: 0 0 -4px -4px; border-radius: 50%; background: currentColor;
  pointer-events: none; }
.plot .when { top: 0; bottom: 0; border-left: 1.5px dashed var(--soft); padding-right: 5px; }
.plot .when.bad { border-left-color: var(--bad); }
.plot .cross { top: 0; bottom: 0; border-left: 1px solid var(--ink); pointer-events: none; }
.c-one { color: var(--compute); }
.c-two { color: var(--gather); }
.chart-key i.line { width: 22px; border-top: 2.5px solid currentColor; }
.chart-key i.line.raw { border-top-width: 1px; opacity: .6; }
.chart-key output { color: var(--ink); min-height: 1.5em; flex-basis: 100%; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(430px, 100%), 1fr)); gap: 8px 30px; }
.pair > * { min-width: 0; }
.pair h3, section > h3:first-of-type { margin-top: 10px; }
.cause-steps { background: var(--compute); }
.cause-compile { background: var(--optimizer); }
.cause-evaluation { background: var(--exchange); }
.cause-save { background: var(--temporary); }
.cause-restore { background: var(--scatter); }
.cause-data { background: var(--permute); }
.cause-plan { background: var(--reduce); }
.cause-start { background: var(--rival); }
.cause-lost { background: var(--bad); }
.cause-between { background: repeating-linear-gradient(45deg, var(--bad), var(--bad) 3px, var(--card) 3px,
  var(--card) 6px); }
.state { font-size: 18px; }
.state b { margin-right: 6px; }
.failed { color: var(--bad); white-space: pre-wrap; }
section section { border: 0; border-top: 1px solid var(--line); border-radius: 0; padding: 14px 0; }
td pre { white-space: pre-wrap; margin: 4px 0; }
section section h2 { font-size: 17px; }
.plain td:first-child { min-width: 0; }
.nw { white-space: nowrap; }
@media (max-width: 760px) {
  .lines { grid-template-rows: auto 200px auto; }
  .pair { grid-template-columns: 1fr; }
}
"""

STYLE = style.STYLE + _OWN
