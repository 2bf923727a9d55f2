"""Claims of other mechanisms' papers and of aggregations, computed from committed measurements."""

import csv
import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from committed_claims import check_committed, check_on_page

from perfedrl.errors import UserError
from perfedrl.experiments.stats import mean_interval
from perfedrl.report import static
from perfedrl.report.plots import rows
from perfedrl.studies import GROUPS
from perfedrl.studies.client_sampling.study import NO_NOISE, REST, ends, ratio_interval, recovered
from perfedrl.studies.client_sampling.training import FAST, LAST, as_published
from perfedrl.studies.fast_fedpg import study as fast_fedpg_study
from perfedrl.studies.fast_fedpg.study import RESTS, rests
from perfedrl.studies.fednpg.study import EXACT, npg_exact, rate
from perfedrl.studies.fedsarsa.study import EQUAL_AGENTS, HETEROGENEITY
from perfedrl.studies.measurement_cache import Measurement, MeasurementCache
from perfedrl.studies.robustness import collusion

ROOT = Path(__file__).parents[2]
RESULTS, DRAWN = ROOT / "results" / "mechanisms", ROOT / "docs" / "figures"
CLAIMS = RESULTS / "claims.json"
MECHANISMS = GROUPS["mechanisms"]
PAGES = dict.fromkeys(MECHANISMS, "mechanisms.md") | {"collusion": "robustness.md"}
COMMITTED = MeasurementCache(RESULTS, only_saved=True)
LONG, PUBLISHED = ("trained for long, batches of 10", "trained for long, batches of 30"), ", as published"
NOISY = (*LONG, "at rest, batches of 10", "at rest, batches of 30")
MISSED = {
    f"share given back by control variates of steps, {LONG[0]}",
    f"share given back by control variates of rounds{PUBLISHED}, at rest, batches of 100",
    *(f"share given back by control variates of {what}s{PUBLISHED}, {x}" for what in ("round", "step") for x in NOISY),
    *(f"F that a quarter costs {reading}, after 80 rounds of all agents (> 0)" for reading in LONG),
}
"""The claims about client sampling that are not met."""


@pytest.fixture(scope="module")
def evidence():
    return {name: COMMITTED.load(name, study.measurements(study.seeds)) for name, study in MECHANISMS.items()}


def claims_of(name, evidence):
    return {claim.claim: claim for claim in MECHANISMS[name].claims(evidence)}


def test_every_committed_measurement_belongs_to_a_study():
    wanted = {one.file(name) for name, study in MECHANISMS.items() for one in study.measurements(study.seeds)}
    assert {path.name for path in RESULTS.iterdir()} == wanted | {CLAIMS.name}


def test_claims_match_the_committed_ones_and_the_document(evidence):
    made = {name: study.claims(evidence[name]) for name, study in MECHANISMS.items()}
    missed = {claim.claim for name, claims in made.items() for claim in claims if name != "collusion" and not claim.met}
    assert missed == MISSED
    check_committed([claim for claims in made.values() for claim in claims], json.loads(CLAIMS.read_text()))
    for name, claims in made.items():
        check_on_page(claims, PAGES[name])


def test_the_document_has_the_recovered_share_of_each_method(evidence):
    page, modes = (ROOT / "docs" / "mechanisms.md").read_text(), ("round", "step")
    parts = ("slow", *modes, as_published("round"), LAST, FAST, as_published("step"))
    for variant, arrays in evidence["client-sampling"].items():
        level = ends(arrays)
        shares = " | ".join(f"{100 * recovered(arrays, name).mean:.0f} %" for name in parts)
        found = [(level[name].mean(), np.std(level[name], ddof=1) / np.sqrt(20)) for name in ("full", "plain", *parts)]
        for row in (shares, " | ".join(f"{mean:.3f} ± {error:.3f}" for mean, error in found)):
            assert f"| {variant} | {row} |" in page


def test_the_document_has_the_return_by_each_aggregation_under_collusion(evidence):
    page = (ROOT / "docs" / "robustness.md").read_text()
    cases = [(collusion.CLEAN, 0), *((attack, n) for attack in collusion.ATTACKS for n in (1, 2, 3))]
    for fleet in collusion.FLEETS:
        for attack, n in cases:
            found = collusion.returns(evidence["collusion"], fleet, attack, n)
            row = " | ".join(f"{x.mean():.2f} ± {np.std(x, ddof=1) / np.sqrt(len(x)):.2f}" for x in found.values())
            what = f"{collusion.ATTACKS[attack]}, {n}" if n else "no attack"
            assert f"| {fleet}, {what} | {row} |" in page


def test_measuring_collusion_again_gives_the_committed_number(evidence, monkeypatch):
    """One aggregation, attack and seed: seeds do not depend on what runs beside them."""
    monkeypatch.setattr(collusion, "RULES", {"geometric median": collusion.RULES["geometric median"]})
    (again,) = collusion.colluding(collusion.GRID, collusion.OPPOSITE, 1, [0])["after"]
    row = list(evidence["collusion"]["gridworld, opposite, 1"]["after"][3])
    assert again[0] == pytest.approx(row[0], abs=2 * float(collusion.GRAIN))


@pytest.mark.parametrize("name", MECHANISMS)
def test_figures_match_the_committed_ones(name, evidence):
    page = (ROOT / "docs" / PAGES[name]).read_text()
    for plot in MECHANISMS[name].figures(evidence[name]):
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


def test_measuring_again_gives_the_committed_numbers(evidence):
    exact = evidence["fednpg"][EXACT]
    again = npg_exact((0.5,), rounds=4).errors
    np.testing.assert_allclose(exact["errors.policy"][1, :5], again["policy"][0], rtol=1e-9)
    committed = evidence["fast-fedpg"][RESTS]
    anew = rests([5], fast_fedpg_study.ALPHA, fast_fedpg_study.BETA)
    at = fast_fedpg_study.LOCAL_STEPS.index(5)
    assert committed["fedavg-pg.gradient"][at] == pytest.approx(anew["fedavg-pg"].gradient[0], abs=1e-10)
    assert anew["fast-fedpg"].gradient[0] < 1e-11


def test_other_measurements_fail_the_claims(evidence):
    npg = {key: dict(arrays) for key, arrays in evidence["fednpg"].items()}
    slow = npg[EXACT]["errors.policy"] ** 0.5
    npg[EXACT]["errors.policy"] = slow
    assert sum(not c.met for c in claims_of("fednpg", npg).values()) == 4, "all rates, and the end at c = 1"
    sarsa = {key: dict(arrays) for key, arrays in evidence["fedsarsa"].items()}
    sarsa[HETEROGENEITY]["errors.own"] = sarsa[HETEROGENEITY]["errors.own"][::-1]
    sarsa[EQUAL_AGENTS]["errors.mean"] = sarsa[EQUAL_AGENTS]["errors.mean"][::-1]
    assert sum(c.met for c in claims_of("fedsarsa", sarsa).values()) == 2, "those about the mean MDP"
    drift = evidence["fast-fedpg"][RESTS]
    swap = {"fedavg-pg": "fast-fedpg", "fast-fedpg": "fedavg-pg"}
    swapped = {f"{swap[key.partition('.')[0]]}.{key.partition('.')[2]}": x for key, x in drift.items()}
    assert not any(c.met for c in claims_of("fast-fedpg", {RESTS: swapped}).values())
    reading = f"{REST}, {NO_NOISE}"
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
    assert ratio_interval(x, np.full(10, 2.0)) == pytest.approx([v / 2 for v in mean_interval(x)])
    assert ratio_interval(0.7 * x, x) == pytest.approx([0.7, 0.7, 0.7])
    unsure = ratio_interval(x, np.asarray([-1.0, 1.1] * 5))
    assert (unsure.low, unsure.high) == (-np.inf, np.inf), "the gap may be zero"


def test_a_rate_is_fitted_above_rounding():
    assert rate(0.3 * 0.5 ** np.arange(60.0) + 1e-13) == pytest.approx(0.5, abs=1e-4)
    assert rate(0.9 ** np.arange(60.0)) == pytest.approx(0.9)


def test_a_measurement_is_cached_by_its_settings(tmp_path):
    made = []

    def squares(n):
        made.append(n)
        return {"x": np.arange(n) ** 2}

    cache, three = MeasurementCache(tmp_path), Measurement("some, squares", squares, {"n": 3})
    for _ in range(2):
        assert cache.load("study", [three])["some, squares"]["x"].tolist() == [0, 1, 4]
    cache.load("study", [three._replace(settings={"n": 4})])
    cache._replace(restart=True).load("study", [three])
    assert made == [3, 4, 3]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 2
    assert all(name.startswith("study-some-squares-") for name in names)
    with pytest.raises(UserError, match=r"no measurement study-some-squares-.* leave out --saved"):
        MeasurementCache(tmp_path, only_saved=True).load("study", [three._replace(settings={"n": 5})])


def test_a_measurement_of_a_run_is_cached_by_the_runs_name(untyped, tmp_path):
    def size(run, factor):
        return {"x": np.asarray(factor * run.size)}

    runs, other = ({"a": SimpleNamespace(config=SimpleNamespace(folder=f"run-{i}"), size=i)} for i in (1, 2))
    cache, one = MeasurementCache(tmp_path), Measurement("size", size, {"factor": 10}, "a")
    for _ in range(2):
        assert [cache.load("study", [one], runs=x)["size"]["x"] for x in (runs, other)] == [10, 20]
    assert {path.name for path in tmp_path.iterdir()} == {one.file("study", runs), one.file("study", other)}


def test_the_command_uses_saved_measurements(run, tmp_path, monkeypatch):
    monkeypatch.setattr(fast_fedpg_study, "noiseless_limit", lambda *_, **__: pytest.fail("measured again"))
    code, out, _ = run("reproduce", "fast-fedpg", "--saved", "--runs", str(RESULTS))
    assert code == 0
    assert "6 of 6 claims met" in out
    assert (tmp_path / "figures" / "mechanism-fast-fedpg.png").is_file()
    code, _, err = run("reproduce", "mechanisms", "--saved", "--runs", "empty")
    assert code == 2
    assert "no measurement fednpg-exact-" in err
