"""The style sheet of the run report, light and dark."""

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1b1f24; --soft: #667080;
  --rule: #e3e6ea; --blue: #2f66d0; --orange: #d26a0a; }
@media (prefers-color-scheme: dark) {
  :root { --page: #111418; --card: #1a1e24; --ink: #e8ebef; --soft: #98a2b0;
    --rule: #2c323a; --blue: #7aa5f7; --orange: #f0a04b; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 20px 64px; }
header { margin-bottom: 20px; }
h1 { margin: 0; font-size: 28px; line-height: 1.2; overflow-wrap: anywhere; }
h2 { margin: 0 0 10px; font-size: 16px; }
.kind { margin: 0 0 2px; color: var(--soft); font-size: 13px; }
section:not(.charts), figure, .tiles > div { background: var(--card); border: 1px solid var(--rule);
  border-radius: 10px; }
section:not(.charts) { padding: 16px 18px; margin-top: 16px; overflow-x: auto; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(220px, 1fr)); gap: 12px;
  margin: 0 0 16px; }
.tiles > div { padding: 10px 14px; }
.tiles dt { color: var(--soft); font-size: 13px; }
.tiles dd { margin: 0; font-size: 19px; font-weight: 600; font-variant-numeric: tabular-nums;
  white-space: nowrap; }
.tiles small { margin-left: 4px; color: var(--soft); font-size: 13px; font-weight: 400; }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; }
.charts figure:first-child { grid-column: 1 / -1; }
figure { margin: 0; padding: 14px 16px 8px; }
figcaption { display: flex; flex-wrap: wrap; gap: 2px 8px; align-items: baseline; margin-bottom: 6px; }
figcaption > span { color: var(--soft); font-size: 13px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; margin: 0 0 0 auto;
  color: var(--soft); font-size: 13px; }
.legend span { display: inline-flex; align-items: center; gap: 6px; }
.legend i { width: 18px; height: 0; border-top: 2px solid var(--stroke); }
.legend .raw i { opacity: .4; }
.legend .marks i { width: 8px; height: 8px; border: 0; border-radius: 50%; background: var(--stroke); }
svg { display: block; width: 100%; height: auto; }
.grid { stroke: var(--rule); }
.tick { fill: var(--soft); font-size: 11px; font-variant-numeric: tabular-nums; }
.raw, .line { --stroke: var(--blue); }
.marks { --stroke: var(--orange); }
.series polyline { fill: none; stroke: var(--stroke); stroke-width: 1.8; stroke-linejoin: round; }
.series circle { fill: var(--stroke); }
.series.raw polyline { stroke-width: 1; opacity: .4; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { padding: 5px 12px 5px 0; border-top: 1px solid var(--rule); text-align: left; vertical-align: top; }
tr:first-child > th, tr:first-child > td { border-top: 0; }
th { width: 1%; min-width: 120px; color: var(--soft); font-weight: 400; white-space: nowrap; }
td { overflow-wrap: break-word; font-variant-numeric: tabular-nums; }
.pair { display: inline-block; margin-right: 18px; }
.pair > span { color: var(--soft); }
ul { margin: 0; padding-left: 18px; }
pre { margin: 0; overflow-x: auto; font: 13px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
.empty { color: var(--soft); }
@media (max-width: 760px) {
  main { padding: 20px 12px 40px; }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .charts { grid-template-columns: minmax(0, 1fr); }
  figure { overflow-x: auto; }
  svg { min-width: 400px; }
  figure:first-child svg { min-width: 840px; }
  .tick { font-size: 13px; }
}
@media print { body { background: #fff; } figure, section { break-inside: avoid; } }
"""
