"""The style sheet of a page: light and dark, a telephone and a desk."""

STYLE = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --card: #fff; --ink: #1c2430; --soft: #5b6676; --rule: #dde1e7;
  --line: #1f6feb; --good: #1a7f4b; --bad: #c62f3b; --warn: #94600a;
  --more: #0b6e6e; --less: #d9822b; }
@media (prefers-color-scheme: dark) { :root {
  --page: #12161c; --card: #1a2029; --ink: #e4e8ee; --soft: #9aa5b4; --rule: #313a46;
  --line: #6ba6ff; --good: #4cc38a; --bad: #ff7a80; --warn: #e0a94a;
  --more: #2fd0c4; --less: #f0913a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 20px 14px 40px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 8px; }
h2 { font-size: 1.1rem; margin: 0 0 6px; }
h3 { font-size: .95rem; margin: 0 0 4px; }
p { margin: 4px 0 10px; max-width: 75ch; }
.soft, figcaption { color: var(--soft); font-size: .87rem; }
section, header { background: var(--card); border: 1px solid var(--rule); border-radius: 10px;
  padding: 16px; margin: 0 0 14px; }
header.good { border-left: 6px solid var(--good); }
header.bad { border-left: 6px solid var(--bad); }
h1.good, li.good, td.good { color: var(--good); }
h1.bad, li.bad, td.bad { color: var(--bad); }
li.warning { color: var(--warn); }
ul { margin: 8px 0 0; padding-left: 20px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 8px 0; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
.pair { display: grid; gap: 18px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }
.row { display: flex; flex-wrap: wrap; gap: 18px; }
.row > figure { flex: 1 1 300px; max-width: 420px; }
.row > div { flex: 2 1 300px; }
.pair > *, .row > * { min-width: 0; }
figure { margin: 0; max-width: 560px; }
svg { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 8px; text-align: right; border-bottom: 1px solid var(--rule);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
td:first-child { white-space: normal; }
tr.alarm td { background: color-mix(in srgb, var(--bad) 14%, transparent); }
summary { cursor: pointer; color: var(--soft); font-size: .87rem; margin-top: 8px; }
pre { margin: 4px 0 8px; padding: 8px 10px; background: var(--page); border-radius: 6px;
  font: 12.5px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; max-height: 20em; overflow-y: auto; }
article { border-top: 1px solid var(--rule); padding: 10px 0 4px; }
article b { font-variant-numeric: tabular-nums; }
text { fill: var(--soft); font-size: 11px; paint-order: stroke; stroke: var(--card);
  stroke-width: 3px; stroke-linejoin: round; }
text.name { font-size: 10px; font-style: italic; }
text.alarm { fill: var(--bad); }
.axis, .grid, .line, .path, .level, .mark, .whisker { fill: none; stroke: var(--rule); }
.axis { stroke: var(--soft); }
.grid { opacity: .7; }
.line { stroke: var(--line); stroke-width: 1.8; }
.path { stroke: var(--soft); }
.level { stroke: var(--soft); stroke-dasharray: 4 3; }
.mark { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 5 3; }
.whisker { stroke: var(--line); stroke-width: 1.5; }
.band { fill: var(--line); opacity: .18; }
.dot { fill: var(--line); }
.lost { fill: var(--bad); opacity: .09; }
circle.good { fill: var(--good); stroke: var(--card); }
circle.bad { fill: var(--bad); stroke: var(--card); }
circle.start { fill: var(--card); stroke-width: 2.5; }
circle.good.start { stroke: var(--good); }
circle.bad.start { stroke: var(--bad); }
.own { fill: none; stroke: var(--ink); stroke-width: 1.2; }
.legend { display: flex; align-items: center; gap: 8px; flex-wrap: wrap;
  max-width: none; }
.legend svg { width: 180px; flex: none; }
footer { color: var(--soft); font-size: .87rem; }
.h0 { fill: var(--less); }
.h1 { fill: color-mix(in srgb, var(--less) 72%, var(--card)); }
.h2 { fill: color-mix(in srgb, var(--less) 45%, var(--card)); }
.h3 { fill: color-mix(in srgb, var(--less) 20%, var(--card)); }
.h4 { fill: color-mix(in srgb, var(--rule) 35%, var(--card)); }
.h5 { fill: color-mix(in srgb, var(--more) 20%, var(--card)); }
.h6 { fill: color-mix(in srgb, var(--more) 45%, var(--card)); }
.h7 { fill: color-mix(in srgb, var(--more) 72%, var(--card)); }
.h8 { fill: var(--more); }
@media (max-width: 520px) { section, header { padding: 12px 10px; }
  table { font-size: .76rem; } th, td { padding: 3px; } }
@media print { body { background: #fff; } section, header { break-inside: avoid; } }
"""
