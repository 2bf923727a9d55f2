"""The report: one HTML file that opens offline, with what was run, what came out, and what it cost."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from plotly.offline import get_plotlyjs

from perfedrl.experiments.files import write_atomically
from perfedrl.experiments.store import Run
from perfedrl.report.interactive import draw
from perfedrl.report.plots import Plot
from perfedrl.report.tables import CLAIMS_HEADER, claim_cells
from perfedrl.studies import Claim

STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Table:
    """A table of text: the header, and rows as long as it; `mark` names a class for each row, "" for none."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    mark: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """What a page says, from top to bottom."""

    title: str
    summary: str
    command: str
    facts: Mapping[str, str] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()
    runs: Sequence[Run] = ()


def write(report: Report, path: str | Path) -> Path:
    """Write the page."""
    path = Path(path)
    write_atomically(path, html(report).encode())
    return path


def html(report: Report) -> str:
    """The whole page: the drawing library is inside, so nothing is loaded from anywhere."""
    body = [f"<h1>{escape(report.title)}</h1>", f'<p class="summary">{escape(report.summary)}</p>']
    if report.facts:
        facts = (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in report.facts.items())
        body.append(f'<dl class="facts">{"".join(facts)}</dl>')
    body += [table_html(table) for table in report.tables]
    if report.plots:
        body.append("<h2>Figures</h2><p>Hover over a point for its value and every seed's; drag to zoom.</p>")
    body += [plot_html(plot) for plot in report.plots]
    if report.runs:
        body.append(table_html(costs(report.runs)))
    body.append(f"<h2>Repeat it</h2><pre>{escape(report.command)}</pre>")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(report.title)}</title>
<style>{STYLE}</style>
{f"<script>{get_plotlyjs()}</script>" if report.plots else ""}
</head>
<body><main>
{"".join(body)}
</main></body>
</html>
"""


def plot_html(plot: Plot) -> str:
    buttons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]]
    config = {"displaylogo": False, "responsive": True, "modeBarButtons": buttons}
    drawn = draw(plot).to_html(full_html=False, include_plotlyjs=False, div_id=f"plot-{plot.name}", config=config)
    return f"<figure><figcaption>{escape(plot.title)}</figcaption>{drawn}</figure>"


def table_html(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    marks = table.mark or [""] * len(table.rows)
    rows = "".join(
        f'<tr class="{escape(mark)}">{"".join(f"<td>{escape(cell)}</td>" for cell in row)}</tr>'
        for row, mark in zip(table.rows, marks, strict=True)
    )
    name = escape(table.title.lower().replace(" ", "-"))
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    body = f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>"
    return f'<h2>{escape(table.title)}</h2>{note}<div class="wide"><table id="{name}">{body}</table></div>'


def claims(checked: Sequence[Claim]) -> Table:
    """The paper's numbers beside ours."""
    met = sum(claim.met for claim in checked)
    return Table(
        "Claims",
        CLAIMS_HEADER,
        [claim_cells(claim) for claim in checked],
        note=f"{met} of {len(checked)} met.",
        mark=["" if claim.met else "missed" for claim in checked],
    )


def costs(runs: Iterable[Run]) -> Table:
    """What every run cost, where and when."""
    rows = [
        (
            run.folder.name,
            f"{len(run.config.seeds)}",
            f"{run.config.rounds}",
            f"{run.history.trajectories[-1]:,}",
            f"{run.history.bytes[-1]:,}",
            f"{run.provenance['seconds']:.1f} s",
            f"{run.provenance['device']}",
            f"{run.provenance['finished'][:10]}",
        )
        for run in runs
    ]
    header = ("run", "seeds", "rounds", "trajectories per agent", "bytes per agent", "wall time", "device", "finished")
    note = "Trajectories and bytes are for one agent and one seed. Runs that trained together share their wall time."
    return Table("Cost", header, rows, note)
