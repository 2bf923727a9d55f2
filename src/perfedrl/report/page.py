"""The report page: one HTML file that opens offline, with results, figures and costs of runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from perfedrl.experiments.files import write_atomically
from perfedrl.experiments.store import Run
from perfedrl.report.plots import Plot, Ranges, caption

STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")


@dataclass(frozen=True)
class PageTable:
    """A table of text; `mark` has a CSS class for each row, "" for none."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    mark: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """The content of a page, from top to bottom."""

    title: str
    summary: str
    command: str
    facts: Mapping[str, str] = field(default_factory=dict)
    tables: Sequence[PageTable] = ()
    plots: Sequence[Plot] = ()
    runs: Sequence[Run] = ()


def write(report: Report, path: str | Path) -> Path:
    """Write the page of a report and return its path."""
    path = Path(path)
    write_atomically(path, html(report).encode())
    return path


def html(report: Report) -> str:
    """The page as HTML, with the drawing library inside so that nothing is fetched."""
    from plotly.offline import get_plotlyjs  # slow to import

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
    """An interactive figure with its caption as HTML."""
    from perfedrl.report.interactive import draw  # imports plotly, which is slow to import

    buttons = [["toImage", "zoom2d", "pan2d", "resetScale2d"]]
    config = {"displaylogo": False, "responsive": True, "modeBarButtons": buttons}
    drawn = draw(plot).to_html(full_html=False, include_plotlyjs=False, div_id=f"plot-{plot.name}", config=config)
    note = f"<p>{escape(plot.note)}</p>" if isinstance(plot, Ranges) and plot.note else ""
    return f"<figure><figcaption>{escape(caption(plot))}</figcaption>{note}{drawn}</figure>"


def table_html(table: PageTable) -> str:
    """A table with its title and its note as HTML."""
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


def costs(runs: Iterable[Run]) -> PageTable:
    """Trajectories, bytes and wall time of runs, with device and date."""
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
    return PageTable("Cost", header, rows, note)
