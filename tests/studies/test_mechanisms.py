"""What other mechanisms' papers claim: read off the committed measurements, which are what the code measures."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from perfedrl.studies.figures import FIGURES
from perfedrl.studies.mechanisms import shared_policy
from perfedrl.studies.mechanisms import study as mechanisms_study
from perfedrl.studies.mechanisms.client_sampling import FAST, LAST, as_published

from perfedrl.errors import UserError
from perfedrl.experiments.stats import mean_interval
from perfedrl.report import static
from perfedrl.report.plots import rows
from perfedrl.report.tables import claim_cells
from perfedrl.studies import MECHANISMS
from perfedrl.studies.measurement_cache import Kept, Measurement

ROOT = Path(__file__).parents[2]
RESULTS, DRAWN = ROOT / "results" / "mechanisms", ROOT / "docs" / "figures"
KEPT = Kept(RESULTS, only_saved=True)
LONG, PUBLISHED = ("trained for long, batches of 10", "trained for long, batches of 30"), ", as published"
NOISY = (*LONG, "at rest, batches of 10", "at rest, batches of 30")
MISSED = {
    f"share given back by control variates of steps, {LONG[0]}",
    f"share given back by control variates of rounds{PUBLISHED}, at rest, batches of 100",
    *(f"share given back by control variates of {what}s{PUBLISHED}, {x}" for what in ("round", "step") for x in NOISY),
    *(f"F that a quarter costs {reading}, after 80 rounds of all agents (> 0)" for reading in LONG),
}
"""Readings of the claim about control variates that do not show it."""


@pytest.fixture(scope="module")
def evidence():
    return {name: KEPT(name, e.kept(e.seeds)) for name, e in MECHANISMS.items()}


def claims_of(name, evidence):
    return {claim.claim: claim for claim in MECHANISMS[name].claims(evidence)}


def test_nothing_is_kept_that_no_experiment_asks_for():
    wanted = {one.file(name) for name, e in MECHANISMS.items() for one in e.kept(e.seeds)}
    assert {path.name for path in RESULTS.iterdir()} == wanted | {"claims.json"}


def test_the_claims_are_met_but_for_the_readings_that_say_so_and_the_page_repeats_them(evidence):
    claims = [claim for name, e in MECHANISMS.items() for claim in e.claims(evidence[name])]
    assert {claim.claim for claim in claims if not claim.met} == MISSED
    kept = json.loads((RESULTS / "claims.json").read_text())
    assert [(c.experiment, c.claim, c.met) for c in claims] == [(c["experiment"], c["claim"], c["met"]) for c in kept]
    np.testing.assert_allclose([c.measured for c in claims], [c["measured"] for c in kept])
    page = (ROOT / "docs" / "mechanisms.md").read_text()
    for claim in claims:
        assert "| " + " | ".join(claim_cells(claim)) + " |" in page, f"docs/mechanisms.md lacks {claim}"


def test_the_page_has_what_every_part_of_a_control_variate_does(evidence):
    page, modes = (ROOT / "docs" / "mechanisms.md").read_text(), ("round", "step")
    parts = ("slow", *modes, as_published("round"), LAST, FAST, as_published("step"))
    for reading, arrays in evidence["client-sampling"].items():
        level = mechanisms_study.ends(arrays)
        shares = " | ".join(f"{100 * mechanisms_study.given_back(arrays, name).mean:.0f} %" for name in parts)
        found = [(level[name].mean(), np.std(level[name], ddof=1) / np.sqrt(20)) for name in ("full", "plain", *parts)]
        for row in (shares, " | ".join(f"{mean:.3f} ± {error:.3f}" for mean, error in found)):
            assert f"| {reading} | {row} |" in page


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_figures_are_drawn_from_the_measurements(name, evidence):
    page = (ROOT / "docs" / "mechanisms.md").read_text()
    for plot in FIGURES[name](evidence[name]):
        table = io.StringIO()
        header, body = rows(plot)
        csv.writer(table, lineterminator="\n").writerows([header, *body])
        assert (DRAWN / f"{plot.name}.csv").read_text() == table.getvalue()
        assert (DRAWN / f"{plot.name}.png").is_file()
        assert f"(figures/{plot.name}.png)" in page
        figure = static.draw(plot)
        figure.canvas.draw()
        (legend,), (axes,) = figure.legends, figure.axes
        assert not legend.get_window_extent().overlaps(axes.get_window_extent())


def test_what_is_kept_is_what_the_code_measures(evidence):
    exact = evidence["fednpg"][mechanisms_study.EXACT]
    again = shared_policy.npg_exact((0.5,), rounds=4).errors
    np.testing.assert_allclose(exact["errors.policy"][1, :5], again["policy"][0], rtol=1e-9)
    kept = evidence["fast-fedpg"][mechanisms_study.RESTS]
    anew = mechanisms_study.rests([5], mechanisms_study.ALPHA, mechanisms_study.BETA)
    at = mechanisms_study.LOCAL_STEPS.index(5)
    assert kept["fedavg-pg.gradient"][at] == pytest.approx(anew["fedavg-pg"].gradient[0], abs=1e-10)
    assert anew["fast-fedpg"].gradient[0] < 1e-11


def test_a_method_that_does_otherwise_misses_the_claims(evidence):
    npg = {key: dict(arrays) for key, arrays in evidence["fednpg"].items()}
    slow = npg[mechanisms_study.EXACT]["errors.policy"] ** 0.5
    npg[mechanisms_study.EXACT]["errors.policy"] = slow
    assert sum(not c.met for c in claims_of("fednpg", npg).values()) == 4, "all rates, and the end at c = 1"
    sarsa = {key: dict(arrays) for key, arrays in evidence["fedsarsa"].items()}
    sarsa[mechanisms_study.HETEROGENEITY]["errors.own"] = sarsa[mechanisms_study.HETEROGENEITY]["errors.own"][::-1]
    sarsa[mechanisms_study.AGENTS]["errors.mean"] = sarsa[mechanisms_study.AGENTS]["errors.mean"][::-1]
    assert sum(c.met for c in claims_of("fedsarsa", sarsa).values()) == 2, "those about the mean MDP"
    drift = evidence["fast-fedpg"][mechanisms_study.RESTS]
    swap = {"fedavg-pg": "fast-fedpg", "fast-fedpg": "fedavg-pg"}
    swapped = {f"{swap[key.partition('.')[0]]}.{key.partition('.')[2]}": x for key, x in drift.items()}
    assert not any(c.met for c in claims_of("fast-fedpg", {mechanisms_study.RESTS: swapped}).values())
    reading = f"{mechanisms_study.REST}, {mechanisms_study.QUIET}"
    plain = evidence["client-sampling"][reading] | {
        f"{mode}.after": evidence["client-sampling"][reading]["plain.after"] for mode in ("round", "step")
    }
    gap, *shares = claims_of("client-sampling", {reading: plain}).values()
    assert gap.met
    assert [(c.measured, c.met) for c in shares[:2]] == [(0.0, False)] * 2
    ahead = plain | {"plain.after": plain["full.after"], "full.after": plain["plain.after"]}
    (gap,) = claims_of("client-sampling", {reading: ahead}).values()
    assert not gap.met, "and nothing can be given back"


def test_a_ratio_of_means_by_hand():
    rng = np.random.default_rng(0)
    x = rng.normal(3, 1, 10)
    assert mechanisms_study.ratio_interval(x, np.full(10, 2.0)) == pytest.approx([v / 2 for v in mean_interval(x)])
    assert mechanisms_study.ratio_interval(0.7 * x, x) == pytest.approx([0.7, 0.7, 0.7])
    unsure = mechanisms_study.ratio_interval(x, np.asarray([-1.0, 1.1] * 5))
    assert (unsure.low, unsure.high) == (-np.inf, np.inf), "the gap may be zero"


def test_a_rate_is_read_above_rounding():
    assert mechanisms_study.rate(0.3 * 0.5 ** np.arange(60.0) + 1e-13) == pytest.approx(0.5, abs=1e-4)
    assert mechanisms_study.rate(0.9 ** np.arange(60.0)) == pytest.approx(0.9)


def test_a_measurement_is_made_once_and_again_where_it_is_asked_for_otherwise(tmp_path):
    made = []

    def squares(n):
        made.append(n)
        return {"x": np.arange(n) ** 2}

    kept, three = Kept(tmp_path), Measurement("some, squares", squares, {"n": 3})
    for _ in range(2):
        assert kept("study", [three])["some, squares"]["x"].tolist() == [0, 1, 4]
    kept("study", [three._replace(settings={"n": 4})])
    kept._replace(restart=True)("study", [three])
    assert made == [3, 4, 3]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 2
    assert all(name.startswith("study-some-squares-") for name in names)
    with pytest.raises(UserError, match=r"no measurement study-some-squares-.* leave out --saved"):
        Kept(tmp_path, only_saved=True)("study", [three._replace(settings={"n": 5})])


def test_the_command_draws_from_what_is_kept(run, tmp_path, monkeypatch):
    monkeypatch.setattr(mechanisms_study, "rest", lambda *_, **__: pytest.fail("measured again"))
    code, out, _ = run("reproduce", "fast-fedpg", "--saved", "--runs", str(RESULTS))
    assert code == 0
    assert "6 of 6 claims met" in out
    assert (tmp_path / "figures" / "mechanism-fast-fedpg.png").is_file()
    code, _, err = run("reproduce", "mechanisms", "--saved", "--runs", "empty")
    assert code == 2
    assert "no measurement fednpg-exact-" in err
