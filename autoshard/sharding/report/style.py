"""The style sheet of a plan's page."""

STYLE = """
:root { --ink: #1c2430; --soft: #556070; --line: #dfe3e9; --back: #f5f6f8; --card: #ffffff; --accent: #2456c7;
  --bad: #b3261e; --dev: #e8eefb; --devline: #9db4e8; --light: 90%; --text: 24%; --fill: 72%; --pale: 97%;
  --compute: #4a7fd6; --exposed: #d97a2b; --hidden: #f0c9a4; --parameter: #4a7fd6; --optimizer: #8a6fd1;
  --data: #3f9e83; --temporary: #d9a13b; --unfit: #d7a8a4; --rival: #b9c4d6; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #a4aebc; --line: #353c47;
  --back: #14181e; --card: #1d232b; --accent: #8fb0ff; --bad: #ff9a91; --dev: #26334d; --devline: #4f6aa3;
  --light: 26%; --text: 88%; --fill: 32%; --pale: 17%; --hidden: #7d5a3a; --unfit: #7d4a46; --rival: #4c5869;
  } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 27px; margin: 0; letter-spacing: -.01em; }
h2 { font-size: 18px; margin: 0 0 4px; }
header p { margin: 4px 0; }
header .mesh { font-size: 18px; color: var(--soft); }
.next { display: inline-block; margin: 0; padding: 0; color: var(--soft); }
ul.next { list-style: none; }
ul.next li { display: inline-block; margin-left: 14px; color: var(--ink); }
small, .remark { color: var(--soft); font-size: 13.5px; }
.remark { margin: 0 0 10px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px;
  margin-top: 18px; min-width: 0; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 0 18px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 14px;
  margin-top: 18px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; }
.card h3 { font-size: 13.5px; font-weight: 500; color: var(--soft); margin: 0; }
.card p { font-size: 25px; font-weight: 650; margin: 0; }
.figure { font-size: 19px; font-weight: 600; margin: 2px 0 8px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; color: var(--soft); font-size: 13px; padding: 4px 12px 4px 0;
  border-bottom: 1px solid var(--line); white-space: nowrap; }
td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); vertical-align: middle; }
tr:last-child td { border-bottom: 0; }
.r { text-align: right; white-space: nowrap; }
code { font: 13px/1.4 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; white-space: nowrap; }
.axis { display: inline-block; border-radius: 6px; padding: 1px 8px; margin: 2px 4px 2px 0;
  white-space: nowrap; font-size: 13.5px; border: 1px solid hsl(var(--h) var(--s) var(--fill));
  background: hsl(var(--h) var(--s) var(--pale)); color: hsl(var(--h) var(--s) var(--text)); }
.axis.on { background: hsl(var(--h) var(--s) var(--light)); border-color: hsl(var(--h) var(--s) 50%); }
.axis.part { border-style: dashed; border-color: hsl(var(--h) var(--s) 50%); }
.axis b { font-weight: 600; }
i.cut, i.kept { font-style: normal; font-weight: 600; font-size: 12.5px; border-radius: 4px; padding: 0 5px;
  margin-left: 6px; background: var(--ink); color: var(--card); }
td > i.cut { margin-left: 0; }
i.kept { background: transparent; color: var(--ink); outline: 1px dashed var(--soft); }
.then { color: var(--soft); font-size: 13px; margin: 0 7px 0 3px; }
.meshes { display: flex; gap: 28px; align-items: flex-start; flex-wrap: wrap; }
.grow { flex: 1 1 520px; min-width: 0; }
.whole > span:first-child { color: var(--soft); font-size: 13.5px; margin-right: 6px; }
p.whole { margin: 10px 0 0; }
.grid { flex: none; max-width: 100%; height: auto; }
.grid rect { fill: var(--dev); stroke: var(--devline); }
.grid text { fill: var(--ink); font-size: 12.5px; }
.grid .dev { text-anchor: middle; }
.grid .name { font-weight: 600; font-size: 14px; }
details { margin-top: 8px; }
summary { cursor: pointer; padding: 4px 0; }
summary b { font-size: 15px; }
.bar { display: flex; position: relative; height: 24px; background: var(--back); border: 1px solid var(--line);
  border-radius: 6px; overflow: hidden; margin-bottom: 10px; }
.bar.thin { height: 10px; width: 120px; margin: 0; border-radius: 4px; }
.bar.wide { width: 100%; min-width: 160px; height: 14px; }
.bar .mark { position: absolute; top: 0; bottom: 0; width: 2px; background: var(--bad); }
.bar .whole, .bar .local { position: absolute; left: 0; top: 0; bottom: 0; }
.bar .whole { background: var(--rival); }
.bar .local { background: var(--accent); min-width: 1px; }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 8px;
  vertical-align: -1px; background: var(--rival); }
.k-parameter { background: var(--parameter); }
.k-optimizer { background: var(--optimizer); }
.k-data { background: var(--data); }
.k-temporary { background: var(--temporary); }
.k-compute { background: var(--compute); }
.k-exposed { background: var(--exposed); }
.k-hidden { background: var(--hidden); }
.k-chosen { background: var(--accent); }
.k-rival { background: var(--rival); }
.k-unfit { background: var(--unfit); }
.bad { color: var(--bad); font-weight: 600; }
.tag { background: var(--accent); color: var(--card); border-radius: 4px; padding: 0 6px; font-size: 12.5px;
  margin-left: 4px; }
@media (max-width: 640px) { .pair { grid-template-columns: 1fr; } }
"""
