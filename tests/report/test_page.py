"""The report page: one file that opens offline in a real browser, with tables and hover boxes."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiers import some_slow

from perfedrl.report import interactive, page, static
from perfedrl.report.plots import Axis, Lines, Series, band, caption
from perfedrl.studies import GROUPS, demonstration
from perfedrl.studies.demonstration import AgentRow, ReturnAndSuccess
from perfedrl.studies.reproduction import reproduction_page

ABOUT = {"seconds": 1.0, "device": "2 x cpu (cpu)", "finished": "2026-01-01T00:00:00", "perfedrl": "0", "jax": "0"}


def described(runs):
    return {key: replace(run, provenance={**ABOUT, "python": "3", "commit": None}) for key, run in runs.items()}


AGENT = AgentRow(0, 0.0, "unseen", True, *4 * [ReturnAndSuccess(1.0, 0.5)])
MEASURED = ("theory", "lqr")
"""Studies that train nothing."""


@pytest.fixture(scope="module")
def reports():
    """The page of all studies, made once for the tests of this file."""
    return []


@pytest.fixture
def report(reports, request):
    """A page of all studies with made-up runs."""
    if not reports:
        reports.append(page_of_all_studies(request.getfixturevalue("runs_of")))
    return reports[0]


def page_of_all_studies(runs_of):
    claims, plots, runs = [], [], {}
    for name, study in GROUPS["all"].items():
        evidence = runs_of[name]
        if name == "curvature":
            evidence = evidence._replace(runs=described(evidence.runs))
        elif name not in MEASURED:
            evidence = described(evidence)
        claims += study.claims(evidence)
        plots += study.figures(evidence)
        trained = {} if name in MEASURED else evidence.runs if name == "curvature" else evidence
        runs |= {run.config.folder: run for run in trained.values()}
    return reproduction_page(
        list(GROUPS["all"].values()), claims, plots, list(runs.values()), "perfedrl reproduce all <&>"
    )


def test_the_page_is_complete_and_fetches_nothing(report):
    html = page.html(report)
    outside = re.sub(r"<script[^>]*>.*?</script>", "", html, flags=re.S)
    assert "http" not in outside
    assert not re.search(r"<(script|img|link)[^>]*\b(src|href)\s*=\s*[\"'](?!data:)", html)
    assert "perfedrl reproduce all &lt;&amp;&gt;" in html, "text is escaped"
    for plot in report.plots:
        assert f'id="plot-{plot.name}"' in html
    for run in report.runs:
        assert run.folder.name in html


def test_the_claims_table_marks_missed_claims(report):
    html = page.html(report)
    claims = report.tables[0]
    assert html.count("<tr") == sum(len(t.rows) + 1 for t in [*report.tables, page.costs(report.runs)])
    assert html.count('class="missed"') == sum(mark == "missed" for mark in claims.mark)
    assert f"{sum(row[-1] == 'yes' for row in claims.rows)} of {len(claims.rows)} met" in html


def test_the_demonstration_page_has_its_table_and_figures(deployed_runs):
    runs = described(deployed_runs)
    html = page.html(demonstration.demonstration_page(runs, [AGENT], "perfedrl demo"))
    assert "in 75% of episodes" in html
    assert "in 86% after one policy-gradient step from 200 trajectories" in html
    assert [row.trajectories for row in demonstration.rows(runs)] == [0, 20, 100, 200]
    assert 'id="plot-e7"' in html


def test_captions_say_what_points_and_bands_are(report):
    """On the page as in the files: each figure over seeds says what its band or its points are."""
    html = page.html(report)
    for name, words in (
        ("e1", "mean ± 1 s.d. of 3 seeds"),
        ("e4", "seeds and their median"),
        ("e5-success", "mean ± 1 s.d. of 3 seeds, in [0, 1]"),
    ):
        (plot,) = (plot for plot in report.plots if plot.name == name)
        assert caption(plot).endswith(words)
        assert f"<figcaption>{caption(plot)}</figcaption>" in html
        assert caption(plot) in [axes.get_title() for axes in static.draw(plot).axes]


def test_bands_of_shares_stay_within_0_and_1():
    series = Series("s", np.arange(2), np.asarray([[0.2, 0.5], [1.0, 0.5]]), "#0072B2")
    shares, others = (Lines("p", "t", Axis("x"), "y", (series,), (0, 1), percent=x) for x in (True, False))
    assert band(shares, series)[1][0] == 1 < band(others, series)[1][0]


def test_hover_boxes_list_few_seeds_and_the_range_of_many():
    series = lambda n: Series("s", np.arange(3), np.arange(3.0 * n).reshape(n, 3), "#0072B2")  # noqa: E731
    plot = lambda n: Lines("p", "t", Axis("rounds"), "y", (series(n),), tuple(range(10, 10 + n)))  # noqa: E731
    few, many = (interactive.hover_text(plot(n), plot(n).series[0], 1) for n in (3, 30))
    assert "seed 12: 7.000" in few
    assert "mean of 3 seeds: 4.000" in few
    assert "from 1.000 to 88.000" in many


@pytest.fixture
def opened(browser, report, tmp_path):
    path: Path = page.write(report, tmp_path / "report.html")
    browser.set_window_size(1100, 1000)
    browser.get(path.as_uri())
    return browser


def test_in_a_browser_the_page_loads_without_errors_and_shows_every_figure(opened, report):
    assert [entry for entry in opened.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    rows = opened.find_elements("css selector", "#claims tbody tr")
    assert len(rows) == len(report.tables[0].rows)
    for plot in report.plots:
        drawing = opened.find_element("css selector", f"#plot-{plot.name} .main-svg")
        assert drawing.size["width"] > 400
        assert drawing.size["height"] > 300
    loaded = opened.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert [name for name in loaded if not name.startswith(("data:", "blob:"))] == [], "nothing is fetched"
    width = opened.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert width <= 0, "the page does not scroll sideways"


@pytest.mark.parametrize(
    ("plot", "words"),
    some_slow([("e1", "of 3 seeds"), ("e4", "seed"), ("e5-success", "%"), ("e7", "episode")], [("e1", "of 3 seeds")]),
)
def test_in_a_browser_hovering_over_a_point_shows_its_values(opened, plot, words):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.support.ui import WebDriverWait

    figure = opened.find_element("id", f"plot-{plot}")
    opened.execute_script("arguments[0].scrollIntoView({block: 'center'})", figure)
    point = figure.find_elements("css selector", ".scatterlayer .trace .points path")[-3]
    ActionChains(opened).move_to_element(point).perform()
    shown = lambda _: [e.text for e in figure.find_elements("css selector", ".hoverlayer .hovertext") if e.text]  # noqa: E731
    assert words in " ".join(WebDriverWait(opened, 5).until(shown))
