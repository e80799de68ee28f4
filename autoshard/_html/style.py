"""The style sheet that all pages share: light and dark, wide and narrow."""

STYLE = """
:root { --ink: #1a222e; --soft: #51607a; --line: #dde2ea; --back: #f4f6f9; --card: #ffffff; --accent: #2456c7;
  --bad: #b3261e; --dev: #e6ecf7; --devline: #8fa6d3; --light: 88%; --text: 22%; --fill: 74%; --pale: 97%;
  --compute: #3d74d0; --gather: #cf6a1c; --scatter: #a3701a; --reduce: #b8447f; --exchange: #2f8a72;
  --permute: #7a6a5d; --parameter: #3d74d0; --optimizer: #7d5fc9; --data: #2f8a72; --temporary: #c2801e;
  --constant: #7a6a5d; --on: #2f63bd; --unfit: #c98d86; --rival: #7f93b3; --shade: rgb(179 38 30 / 7%);
  color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7eaf0; --soft: #a9b4c6; --line: #343c49;
  --back: #12161c; --card: #1b2129; --accent: #8fb2ff; --bad: #ff9d94; --dev: #283449; --devline: #5b76ad;
  --light: 27%; --text: 90%; --fill: 36%; --pale: 16%; --compute: #5b8fe6; --gather: #e2863d; --scatter: #c79440;
  --reduce: #d768a0; --exchange: #45a78d; --permute: #9c8b7c; --parameter: #5b8fe6; --optimizer: #9a80e0;
  --on: #3a6ac2; --data: #45a78d; --temporary: #d99a3e; --constant: #9c8b7c; --unfit: #8f5650; --rival: #6f83a5;
  --shade: rgb(255 157 148 / 8%); } }
* { box-sizing: border-box; }
[hidden] { display: none !important; }
html { scroll-behavior: smooth; scroll-padding-top: 56px; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 28px; line-height: 1.25; margin: 0; letter-spacing: -.01em; }
h2 { font-size: 19px; margin: 0 0 4px; }
h3 { font-size: 15px; margin: 20px 0 4px; }
header p { margin: 4px 0; }
a { color: var(--accent); }
small, .remark { color: var(--soft); font-size: 13.5px; font-weight: 400; }
.remark { margin: 0 0 12px; }
nav { position: sticky; top: 0; z-index: 3; display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 18px -20px 0;
  padding: 9px 20px; background: var(--back); border-bottom: 1px solid var(--line); font-size: 14px; }
nav a { text-decoration: none; }
nav a:hover { text-decoration: underline; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 18px 20px;
  margin-top: 18px; min-width: 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 14px; margin-top: 18px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 12px 16px; }
.card h3 { font-size: 13.5px; font-weight: 500; color: var(--soft); margin: 0; }
.card p { font-size: 25px; font-weight: 650; line-height: 1.3; margin: 0; }
.card .source { display: block; color: var(--ink); font-weight: 500; }
.card small { display: block; line-height: 1.35; }
table + .remark, .scroll + .remark { margin-top: 10px; }
.figure { font-size: 21px; font-weight: 650; margin: 2px 0 10px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; color: var(--soft); font-size: 13px; padding: 4px 14px 4px 0;
  border-bottom: 1px solid var(--line); white-space: nowrap; }
td { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: middle; }
tr:last-child td { border-bottom: 0; }
td.r, th.r { text-align: right; white-space: nowrap; }
tr.won td { background: color-mix(in srgb, var(--accent) 9%, transparent); }
code { font: 13px/1.4 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
pre { font: 12.5px/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; overflow-x: auto; }
.tip { min-height: 3em; margin: 10px 0 0; font-size: 14px; color: var(--soft); }
details { margin-top: 8px; }
td details { margin: 0; }
summary { cursor: pointer; padding: 4px 0; }
summary b { font-size: 15px; }
.scroll { overflow-x: auto; }
td:first-child { min-width: 180px; }
.search { display: flex; flex-wrap: wrap; align-items: center; gap: 4px 10px; margin: 12px 0 4px; font-size: 14px; }
.search input, .search select { font: inherit; color: var(--ink); background: var(--back); padding: 5px 10px;
  border: 1px solid var(--soft); border-radius: 8px; min-width: 0; flex: 0 1 340px; }
.search output { color: var(--soft); }
.search ::placeholder { color: var(--soft); opacity: 1; }
.bar { display: flex; position: relative; height: 26px; background: var(--back); border-radius: 6px;
  box-shadow: inset 0 0 0 1px var(--line); overflow: hidden; }
.bar > span { flex: none; height: 100%; }
.bar.thin { height: 10px; width: 110px; border-radius: 4px; }
.bar.wide { width: 150px; }
.bar .mark { position: absolute; top: 0; width: 2px; background: var(--bad); }
.ends { display: flex; justify-content: space-between; margin: 3px 0 12px; font-size: 13px; color: var(--soft); }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 8px; vertical-align: -1px; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; margin: 2px 0 10px; font-size: 13px; color: var(--soft); }
.legend .key { margin-right: 6px; }
.k-compute { background: var(--compute); }
.k-all-gather { background: var(--gather); }
.k-reduce-scatter { background: var(--scatter); }
.k-all-reduce { background: var(--reduce); }
.k-all-to-all { background: var(--exchange); }
.k-collective-permute { background: var(--permute); }
.k-other { background: var(--rival); }
.k-parameter { background: var(--parameter); }
.k-optimizer { background: var(--optimizer); }
.k-data { background: var(--data); }
.k-temporary { background: var(--temporary); }
.k-constant { background: var(--constant); }
.k-rival { background: var(--rival); }
.bad { color: var(--bad); }
.figure .bad { font-size: 15px; margin-left: 8px; }
.tag { background: var(--accent); color: var(--card); border-radius: 4px; padding: 0 6px; font-size: 12.5px;
  font-weight: 600; }
.chart { display: grid; grid-template-columns: 68px 1fr; grid-template-rows: auto 340px auto; margin-top: 10px;
  font-size: 13px; color: var(--soft); }
.y-name { grid-column: 1 / 3; margin-bottom: 6px; }
.plot { grid-column: 2; position: relative; border: 1px solid var(--line); border-radius: 6px; overflow: visible; }
.x-name { grid-column: 2; text-align: right; margin-top: 24px; }
.plot i, .chart-key i { font-style: normal; position: absolute; }
.gx { top: 0; bottom: 0; border-left: 1px solid var(--line); }
.gy { left: 0; right: 0; border-bottom: 1px solid var(--line); }
.gx b, .gy b { font-weight: 400; position: absolute; white-space: nowrap; }
.gx b { top: 100%; transform: translateX(-50%); padding-top: 4px; }
.gy b { right: 100%; transform: translateY(-50%); padding-right: 8px; }
.chart-key { display: flex; flex-wrap: wrap; gap: 4px 20px; margin: 8px 0 0 68px; font-size: 13px; color: var(--soft); }
.chart-key span { display: inline-flex; align-items: center; gap: 8px; }
.chart-key i, .chart-key i.pt { position: static; margin: 0 1px; flex: none; }
@media (max-width: 760px) {
  main { padding: 18px 12px 40px; }
  section { padding: 14px 14px; }
  nav { margin: 14px -12px 0; padding: 8px 12px; gap: 2px 14px; position: static; }
  h1 { font-size: 23px; }
  .cards { grid-template-columns: 1fr 1fr; gap: 10px; }
  .card { padding: 10px 12px; }
  .card p { font-size: 20px; }
  .chart { grid-template-columns: 52px 1fr; grid-template-rows: auto 280px auto; }
  .chart-key { margin-left: 0; }
  .compact { font-size: 13.5px; }
  .compact td:first-child { white-space: nowrap; min-width: 0; }
  .compact th, .compact td { padding-right: 8px; }
  .compact .wide { display: none; }
  table:not(.compact), table:not(.compact) :is(tbody, tr, td) { display: block; }
  table:not(.compact) thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  table:not(.compact) tr { padding: 9px 0; border-bottom: 1px solid var(--line); }
  table:not(.compact) tr:last-child { border-bottom: 0; }
  tr.won { background: color-mix(in srgb, var(--accent) 9%, transparent); }
  tr.won td { background: none; }
  table:not(.compact) td { padding: 2px 0; border: 0; }
  table:not(.compact) td.r { display: inline-block; text-align: left; margin-right: 16px; }
  table:not(.compact) td:not(:first-child)::before { content: attr(data-l) " "; color: var(--soft); font-size: 13px;
    margin-right: 4px; }
  table:not(.compact) td:is(.b, [data-l=""], :empty, [data-l=dimensions])::before { content: none; }
  table:not(.compact) td:empty { display: none; }
  td .bar.thin { width: 100%; height: 7px; }
}
@media print { nav, .search, .tip { display: none; } section { break-inside: avoid; } }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }"""
