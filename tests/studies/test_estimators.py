"""`perfedrl estimators`: measured bias and variance agree with exact ones; output, files and errors of the command."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import Listed, batch, enumerate_trajectories, index_key, law
from fixtures import write
from tiny_config import BASE

import perfedrl as pf
from perfedrl import exact
from perfedrl.estimators import BASELINES, CURVATURES, PolicyObjective, Sampled, forms
from perfedrl.report import interactive, static
from perfedrl.report.plots import rows
from perfedrl.simulation.simulator import Simulation
from perfedrl.studies.estimators import CURVATURE, GRADIENT, ValueWithError, compare_estimators
from perfedrl.studies.estimators import figures as estimators_figures
from perfedrl.studies.estimators import tables as estimators_tables
from perfedrl.studies.estimators.candidates import candidates
from perfedrl.studies.estimators.moments import error, moments, ratio
from perfedrl.studies.estimators.points import exactly, from_many, plays_by, train
from perfedrl.theory.fleet_problem import first_parameters

GRID = {
    **BASE,
    **{"name": "small-grid", "seeds": 1, "rounds": 4},
    "fleet": {"env": "gridworld", "width": 3, "horizon": 4},
    "algorithm": {"name": "per-fedavg-pg", "alpha": 1.0, "beta": 0.3, "m_h": 4},
}
LISTED = {**GRID, "fleet": {"env": "random-mdps", "agents": 2, "states": 2, "actions": 3, "horizon": 1}}
PLAIN = ("none", "leave-one-out", "ridge")


@pytest.fixture(scope="module")
def small():
    """Some estimators on the small grid at its start and its end."""
    some = ("score", "causal", "lvc", "dice", "taypo")
    return compare_estimators(
        pf.make_config(GRID),
        ("end", "start"),
        replicates=4000,
        agents=1,
        forms=some,
        baselines=("none", "leave-one-out"),
    )


@pytest.mark.slow
def test_unbiased_forms_show_no_bias_and_the_low_variance_form_shows_its_own(small):
    for row in small.rows:
        found, name = row.error, (row.stage, row.estimator.name)
        if row.estimator.form == "lvc":
            assert found.seen, name
            assert found.bias_squared.value > 20 * found.bias_squared.error > 0, name
        elif row.estimator.unbiased:
            assert not found.seen, name
            assert abs(found.bias_squared.value) < 4 * found.bias_squared.error, name
            assert found.bias_at_most < 0.1 * found.length**2, name


@pytest.mark.slow
def test_rows_and_recommendations_of_every_stage(small):
    names = [(row.stage, row.estimator.name) for row in small.rows]
    assert len(names) == len(set(names)) == 2 * (5 * 2 + 2)
    assert small.stages == ["start", "end"]
    assert {row.round for row in small.rows} == {0, 4}
    assert small.reference is None
    for stage in small.stages:
        found, products = small.recommendation(stage), small.at(stage, CURVATURE)
        assert found.paper.ratio == (1, 0)
        assert found.best.estimator.form == "causal"
        assert found.best.ratio.value < 0.9
        assert "taypo" in [row.estimator.form for row in found.equal], "one estimate by two names"
        least = min(row.error.variance.value for row in products if row.estimator.unbiased)
        assert found.best.error.variance.value == pytest.approx(least, rel=1e-4)
        assert found.closest.error.square == min(row.error.square for row in products)


def listed_variances(config, names, m):
    """The exact variance of estimates from m trajectories at the start, over all batches, mean over agents."""
    policy, mdps = config.experiment.policy, [config.experiment.fleet.task(i) for i in range(2)]
    theta = jnp.asarray(first_parameters(policy), jnp.float64)

    @jax.jit
    def estimates(trajectories, v):
        n = len(trajectories.reward)
        made = {}
        for form, baseline in names:
            of_gradient = form == "policy gradient"
            made_of = forms("score" if of_gradient else form, baseline)
            agent = PolicyObjective(Listed(trajectories), policy, mdps[0].discount, made_of)
            gradient = lambda j, agent=agent: agent.gradient(theta, index_key(j), m)  # noqa: E731
            product = lambda j, agent=agent: agent.curvature(theta, v, index_key(j), m)  # noqa: E731
            made[form, baseline] = jax.vmap(gradient if of_gradient else product)(jnp.arange(n**m))
        return made

    total = dict.fromkeys(names, 0.0)
    for mdp in mdps:
        t = enumerate_trajectories(mdp)
        n = len(t.states)
        q = np.prod(np.asarray(law(policy, theta, t))[np.arange(n**m)[:, None] // n ** np.arange(m) % n], axis=1)
        v = exact.gradient(mdp, theta + exact.gradient(mdp, theta, policy), policy)
        for name, x in estimates(batch(t), jnp.asarray(v / np.linalg.norm(v))).items():
            x = np.reshape(x, (n**m, -1))
            total[name] += float(q @ np.sum((x - q @ x) ** 2, axis=1)) / len(mdps)
    return total


def test_the_measured_variance_is_that_of_all_enumerated_batches():
    config, some = pf.make_config(LISTED), {"forms": ("score", "lvc"), "baselines": ("none", "leave-one-out")}
    study = compare_estimators(config, ("start",), m=2, replicates=20_000, **some)
    with jax.enable_x64(True):
        true = listed_variances(config, [(row.estimator.form, row.estimator.baseline) for row in study.rows], m=2)
    assert len(study.rows) == 2 * 2 + 2
    for row in study.rows:
        e, found = row.estimator, row.error.variance
        assert found.value == pytest.approx(true[e.form, e.baseline], abs=4 * found.error), e.name
        assert found.error < 0.02 * found.value, "as the root of 20,000 replicates lets expect"


def test_the_squared_bias_is_estimated_without_bias_and_its_error_is_right():
    rng = np.random.default_rng(0)
    shape, scale = (40, 6), np.asarray([3.0, 1.0, 1.0, 0.5, 0.2, 0.1])
    for bias in (0.0, 0.4):
        found = []
        for _ in range(2000):
            truth = 1 + 0.3 * rng.normal(size=(20, 6))
            found.append(error([moments(1 + bias + scale * rng.normal(size=shape), truth)]))
        squares = np.asarray([x.bias_squared.value for x in found])
        assert squares.mean() == pytest.approx(6 * bias**2, abs=4 * squares.std() / np.sqrt(2000))
        errors = np.sqrt(np.mean([x.bias_squared.error**2 for x in found]))
        assert 0.95 < errors / squares.std() < 1.5, "right or on the safe side"
        variance = np.mean([x.variance.value for x in found])
        assert variance == pytest.approx(np.sum(scale**2), rel=0.02)
        if bias == 0:
            assert np.mean([x.seen for x in found]) < 0.01
            assert found[0].length == pytest.approx(np.sqrt(6), rel=0.3)


def test_an_exact_truth_adds_no_noise_and_shared_noise_cancels_in_a_ratio():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(50, 3))
    alone, known = moments(x, np.zeros((1, 3))), error([moments(x, np.zeros((1, 3)))])
    assert alone.noise == pytest.approx(x.var(axis=0, ddof=1).sum() / 50)
    assert known.bias_squared.value == pytest.approx((x.mean(axis=0) ** 2).sum() - alone.noise)
    assert np.isnan(known.length)
    assert np.isnan(known.relative)
    half = ratio([moments(x / 2, np.zeros((1, 3)))], [alone])
    assert half.value == pytest.approx(0.25)
    assert half.error == pytest.approx(0, abs=1e-12)
    assert np.isnan(ratio([alone], [moments(0 * x, np.zeros((1, 3)))]).value)


@pytest.mark.slow
def test_the_reference_agrees_with_the_exact_truth_within_noise():
    config = pf.make_config(GRID)
    policy, task = config.experiment.policy, config.experiment.fleet.task(1)
    theta = 0.5 * jax.random.normal(jax.random.key(3), (9, 4))
    v, truth = jax.jit(exactly)(policy, task, theta, 1.0)
    w, estimated = jax.jit(from_many, static_argnums=5)(policy, task, theta, 1.0, jax.random.key(4), 40)
    assert float(jnp.sum(v * w)) > 0.98, "nearly the same direction"
    hessian = exact.hessian(task, theta, policy).reshape(36, 36)
    for made, true in ((estimated[CURVATURE], hessian @ np.ravel(w)), (estimated[GRADIENT], truth[GRADIENT][0])):
        found = error([moments(np.asarray(made), np.asarray(true)[None])])
        assert not found.seen
        assert found.bias_at_most < 0.01 * found.length**2
    np.testing.assert_allclose(truth[CURVATURE][0], hessian @ np.ravel(v), atol=1e-5)


def test_training_stages_use_the_configs_participation():
    """With participation 0.5 the message at a stage is the simulator's, and not that of full participation."""
    found = {}
    for share in (0.5, 1.0):
        config = pf.make_config({**GRID, "participation": share})
        simulation = Simulation(config.experiment, [0])
        message = simulation.advance(simulation.start(), 0, 4).server.message[0]
        ((_, visited),) = train(config, {"end": 4}, 0, lambda _: None)
        np.testing.assert_array_equal(visited, message)
        found[share] = np.asarray(visited)
    assert np.any(found[0.5] != found[1.0])


def test_only_parameters_that_actions_depend_on_are_counted():
    fleet = pf.envs.arc(goals=2, held_out=0)
    policy = pf.policies.POLICIES["actor-critic"](fleet=fleet, hidden=(4,), critic=(4,))
    counted = jax.jit(plays_by)(policy, fleet.task(0), policy.init(jax.random.key(0)), jax.random.key(1))
    assert all(np.all(np.asarray(x) == 1) for x in jax.tree.leaves(counted["actor"]))
    assert all(np.all(np.asarray(x) == 0) for x in jax.tree.leaves(counted["critic"]))


def test_the_marginalized_form_is_the_same_whatever_the_baseline():
    config = pf.make_config(GRID)
    make = lambda baseline: Sampled(config.experiment.policy, "marginalized", baseline)(config.experiment.fleet.task(0))  # noqa: E731
    agents = [make("none"), make("leave-one-out")]
    theta = 0.5 * jax.random.normal(jax.random.key(3), (9, 4))
    played = jax.jit(lambda theta: agents[0].sampler.sample(theta, jax.random.key(5), 20))(theta)
    one, two = (agent.product(agent.forms.curvature, theta, played, theta) for agent in agents)
    assert np.any(one != 0)
    np.testing.assert_array_equal(one, two)


def test_every_form_goes_with_every_baseline_once():
    listed = candidates(pf.make_config(GRID), 4)
    products = [(e.form, e.baseline) for e in listed if e.quantity == CURVATURE]
    expected = {(form, baseline) for form in CURVATURES for baseline in PLAIN if form != "marginalized"}
    assert set(products) == expected | {("marginalized", "its own")}
    assert len(products) == len(set(products))
    assert [e.baseline for e in listed if e.quantity == GRADIENT] == list(PLAIN)


def test_unsuitable_forms_are_left_out_and_the_configs_own_are_added():
    own = {"curvature": {"name": "taypo", "decay": 0.5}, "baseline": {"name": "ridge", "strength": 0.1}}
    listed = candidates(pf.make_config({**GRID, **own}), m=1)
    names = {(e.form, e.baseline) for e in listed}
    assert ("taypo, as set", "ridge, as set") in names
    assert not any(form.startswith("central") for form, _ in names), "one trajectory has no two sides"
    assert "critic" not in {baseline for _, baseline in names}, "a table has no value network"
    (spent,) = {
        e.trajectories
        for e in candidates(pf.make_config(GRID), 5, ("central-fresh",))
        if e.form != "score" and e.quantity == CURVATURE
    }
    assert spent == 4
    named = candidates(pf.make_config(GRID), 3, ("causal",), ("ridge",))
    assert [e.name for e in named] == [
        "causal, ridge",
        "score, none",
        "policy gradient, none",
        "policy gradient, ridge",
    ], "the paper's are always there"
    assert BASELINES["none"]() == named[1].subtracted


@pytest.mark.slow
def test_the_figure_has_every_estimator_once_and_is_drawn_on_paper_and_in_a_browser(small, tmp_path):
    plot = estimators_figures.comparison(small)
    assert "causal = taypo, leave-one-out" in plot.labels
    assert "causal = dice = taypo, none" in plot.labels
    assert "lvc, none (biased)" in plot.labels
    assert len(set(plot.labels)) == len(plot.labels) == 5 * 2 - 3 + 2
    header, body = rows(plot)
    assert len(header) == len(body[0])
    assert len(body) == len(plot.labels) * (2 + 2 + 1)
    assert {path.suffix for path in static.save(plot, tmp_path)} == {".png", ".pdf", ".csv"}
    figure = static.draw(plot)
    figure.canvas.draw()
    (legend,) = figure.legends
    assert not any(legend.get_window_extent().overlaps(axes.get_window_extent()) for axes in figure.axes)
    assert [axes.get_xscale() for axes in figure.axes] == ["log", "log", "linear"]
    drawn = interactive.draw(plot)
    assert len(drawn.data) == 5
    assert "causal" in str(drawn.layout.yaxis.ticktext)


def test_numbers_are_rounded_by_their_standard_error():
    shown = {(0.494, 0.038): "0.49 ± 0.04", (18.8, 3.28): "19 ± 3", (0.00612, 0.0009): "0.0061 ± 0.0009", (1, 0): "1"}
    assert [estimators_tables.with_error(ValueWithError(*x)) for x in shown] == list(shown.values())
    assert estimators_tables.short(float("nan")) == estimators_tables.with_error(ValueWithError(np.nan, np.nan)) == "–"


@pytest.mark.slow
def test_tables_notes_and_recommendation_of_a_comparison(small):
    content = estimators_tables.as_content(small)
    assert len(content["rows"]) == len(small.rows)
    assert set(content["verdicts"]) == {"start", "end"}
    assert content["verdicts"]["end"]["least_variance_without_bias"]["form"] == "causal"
    assert estimators_tables.stage(small, "end").row_count == len(small.rows) // 2
    text = estimators_tables.recommendation(small, "end")
    assert "without bias 'causal'" in text
    assert "(the same estimate: " in text
    assert "with bias 'lvc'" in text
    assert any("the truth is exact" in note for note in estimators_tables.notes(small))


def test_the_command_prints_tables_and_writes_rows_and_a_figure(run, tmp_path):
    config = write(tmp_path / "grid.toml", GRID)
    code, out, err = run(
        "estimators",
        config,
        "--form",
        "causal",
        "--form",
        "lvc",
        "--baseline",
        "none",
        "--m",
        "3",
        "--replicates",
        "50",
        "--agents",
        "1",
        "--json",
        "said.json",
    )
    assert (code, err.startswith("measuring: ")) == (0, True)
    for words in ("start of training (round 0)", "middle of training (round 2)", "end of training (round 4)"):
        assert words in out
    assert "50 estimates each for 1 agent of seed 0; the truth is exact" in out
    said = json.loads((tmp_path / "said.json").read_text())
    assert (said["m"], said["replicates"], said["agents"]) == (3, 50, 1)
    names = [(row["stage"], row["quantity"], row["form"], row["baseline"]) for row in said["rows"]]
    assert len(names) == len(set(names)) == 3 * (2 + 1 + 1)
    assert all(row["trajectories"] == 3 and row["microseconds"] > 0 for row in said["rows"])
    figures = {path.name for path in (tmp_path / "figures").iterdir()}
    assert figures == {f"estimators-{pf.make_config(GRID).folder}.{x}" for x in ("png", "pdf", "csv")}


@pytest.mark.slow
def test_the_truth_of_other_fleets_is_a_reference(run, tmp_path):
    table = {**GRID, "fleet": {"env": "arc", "goals": 2, "held_out": 0}, "policy": {"name": "mlp", "hidden": [3]}}
    args = ("--stage", "start", "--form", "score", "--baseline", "none", "--reference", "5000", "--replicates", "9")
    code, out, err = run("estimators", write(tmp_path / "arc.toml", table), *args, "--json", "said.json")
    assert (code, err.startswith("measuring: ")) == (0, True)
    assert "from 5,000 trajectories, their noise allowed for" in out
    said = json.loads((tmp_path / "said.json").read_text())
    assert said["reference_trajectories"] == 5000
    assert [row["quantity"] for row in said["rows"]] == [CURVATURE, GRADIENT]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--m", "0"), "m must be at least 1; it is 0"),
        (("--replicates", "1"), "replicates must be a whole number from 2 to 100000; it is 1"),
        (("--agents", "9"), "agents must be a whole number from 1 to 8; it is 9"),
        (("--agents", "0"), "agents must be"),
        (("--seed", "-1"), "seed must be a whole number"),
        (("--reference", "10"), "reference must be a whole number from 5000"),
        (("--stage", "late"), "late"),
        (("--form", "casual"), "unknown curvature estimator 'casual'; did you mean 'causal'?"),
        (("--baseline", "rigde"), "unknown baseline 'rigde'; did you mean 'ridge'?"),
        (("--baseline", "critic"), "needs a policy with a value network"),
        (("--form", "central-fresh", "--m", "1"), "at least two trajectories"),
        (("--figures", "taken"), "taken is a file; expected a folder"),
        (("--json", "taken/x.json"), "taken is a file"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(run, tmp_path, args, says):
    (tmp_path / "taken").write_text("a file")
    code, out, err = run("estimators", write(tmp_path / "grid.toml", GRID), *args)
    assert (code, out) == (2, "")
    assert err.count("error: ") == 1
    assert says in err.replace("\n", " ")


def test_configs_without_a_shared_initialization_are_refused(run, tmp_path):
    table = {**GRID, "algorithm": {"name": "local-pg", "beta": 0.1}}
    code, out, err = run("estimators", write(tmp_path / "alone.toml", table))
    assert (code, out) == (2, "")
    assert "local-pg trains every agent alone" in err
    code, _, err = run("estimators", "no.toml")
    assert code == 2
    assert "there is no config no.toml" in err


def test_the_help_has_examples_and_baselines_are_listed(run):
    code, out, err = run("estimators", "--help")
    assert code == 0
    assert "Examples: perfedrl estimators" in " ".join((out + err).split())
    code, out, _ = run("list", "baselines")
    assert code == 0
    assert "leave-one-out" in out
