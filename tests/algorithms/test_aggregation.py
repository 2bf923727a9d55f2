"""Robust aggregation: what each rule is, written out in NumPy, and how far a minority can move it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from simulations import simulation_of
from small_gridworld import FLEET, POLICY, Keeping, agent
from tiers import some_slow
from tiny_config import BASE, changed

import perfedrl as pf
from perfedrl.algorithms import AGGREGATIONS, Robust, average, unwrapped
from perfedrl.algorithms.aggregation import Aggregation, GeometricMedian, Krum, Mean, Median, TrimmedMean
from perfedrl.experiments.config import make_config
from perfedrl.experiments.training import train

MADE = {name: AGGREGATIONS[name]() for name in AGGREGATIONS} | {"multi-krum": Krum(1, keep=3)}
ROBUST = {name: made for name, made in MADE.items() if name != "mean"}
OWN = pf.FedAvgPG(1.0, 0.3, local_steps=2, m=3)


def draw(n, key=0, shape=(3, 2)):
    """Uploads of two leaves, one a matrix and one a vector."""
    rng = np.random.default_rng(key)
    return {"w": rng.normal(size=(n, *shape)).astype(np.float32), "b": rng.normal(size=(n, 4)).astype(np.float32)}


def flat(tree, lead=0):
    """The leaves as one vector, behind so many leading axes."""
    leaves = [np.asarray(x, float) for x in jax.tree.leaves(tree)]
    return np.concatenate([x.reshape(*x.shape[:lead], -1) for x in leaves], axis=-1)


def ones(n):
    return jnp.ones(n)


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_the_median_is_that_of_every_coordinate(n):
    uploads = draw(n)
    np.testing.assert_allclose(
        flat(jax.jit(Median())(uploads, ones(n))), np.median(flat(uploads, 1), axis=0), rtol=1e-6
    )


def test_the_trimmed_mean_leaves_out_both_ends_of_every_coordinate():
    uploads = draw(10)
    by_hand = np.sort(flat(uploads, 1), axis=0)[2:8].mean(axis=0)
    np.testing.assert_allclose(flat(jax.jit(TrimmedMean(0.2))(uploads, ones(10))), by_hand, rtol=1e-4, atol=1e-6)
    # A quarter of seven agents is 1.75 of them: the second counts with a quarter of its weight.
    x = np.sort(flat(draw(7), 1), axis=0)
    by_hand = (0.25 * (x[1] + x[5]) + x[2:5].sum(axis=0)) / 3.5
    np.testing.assert_allclose(flat(jax.jit(TrimmedMean(0.25))(draw(7), ones(7))), by_hand, rtol=1e-4, atol=1e-6)


def test_the_geometric_median_has_the_least_sum_of_distances():
    uploads, weights = draw(7), np.asarray([1.0, 2.0, 0.5, 1.0, 1.0, 3.0, 1.0])
    x = flat(uploads, 1)
    total = lambda at, w=weights: (w * np.linalg.norm(x - at, axis=1)).sum()  # noqa: E731
    best = minimize(total, np.median(x, axis=0), method="BFGS", options={"gtol": 1e-9})
    found = flat(jax.jit(GeometricMedian())(uploads, jnp.asarray(weights)))
    np.testing.assert_allclose(found, best.x, atol=1e-3)
    assert total(found) <= best.fun * (1 + 1e-6)


def test_the_geometric_median_leaves_an_upload_that_it_starts_at():
    """The medians of coordinates are the first upload, where the sum of distances is not least."""
    x = np.asarray([[0.0, 0.0], [10.0, 1.0], [-1.0, -10.0]], np.float32)
    best = minimize(lambda at: np.linalg.norm(x - at, axis=1).sum(), [1.0, -1.0], method="Nelder-Mead")
    np.testing.assert_allclose(jax.jit(GeometricMedian())(x, ones(3)), best.x, atol=0.01)
    same = np.asarray([[1.0, 2.0]] * 3 + [[5.0, 5.0]], np.float32)
    np.testing.assert_allclose(jax.jit(GeometricMedian())(same, ones(4)), [1, 2], atol=1e-6, err_msg="most agree")


def krum_by_hand(x, f, keep, weights):
    """Scores one by one: each upload's n - f - 2 smallest squared distances to others."""
    n = len(x)
    scores = []
    for i in range(n):
        squares = sorted(((x[i] - x[j]) ** 2).sum() for j in range(n) if j != i)
        scores.append(sum(squares[: n - f - 2]))
    best = np.argsort(scores)[:keep]
    return np.average(x[best], axis=0, weights=weights[best])


@pytest.mark.parametrize(("n", "f", "keep"), [(3, 0, 1), (5, 1, 1), (9, 2, 4), (10, 3, 7)])
def test_krum_keeps_the_uploads_nearest_to_their_neighbours(n, f, keep):
    uploads, weights = draw(n), np.arange(1.0, n + 1)
    found = flat(jax.jit(Krum(f, keep))(uploads, jnp.asarray(weights)))
    np.testing.assert_allclose(found, krum_by_hand(flat(uploads, 1), f, keep, weights), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MADE)
def test_an_aggregation_is_a_hashable_part_and_knows_no_order_of_agents(name):
    rule, uploads, weights = MADE[name], draw(9), np.arange(1.0, 10)
    assert isinstance(rule, Aggregation)
    assert hash(rule) == hash(type(rule)(**vars(rule)))
    order = np.random.default_rng(1).permutation(9)
    apply = jax.jit(rule)
    forth, back = apply(uploads, weights), apply(jax.tree.map(lambda x: x[order], uploads), weights[order])
    np.testing.assert_allclose(flat(forth), flat(back), rtol=1e-4, atol=1e-5)
    assert jax.tree.map(jnp.shape, forth) == {"w": (3, 2), "b": (4,)}
    assert {x.dtype for x in jax.tree.leaves(forth)} == {np.dtype(np.float32)}


@pytest.mark.parametrize("name", MADE)
def test_equal_weights_give_the_unweighted_aggregation(name):
    one, other = (flat(jax.jit(MADE[name])(draw(8), w * ones(8))) for w in (1.0, 0.3))
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["mean", "median", "trimmed-mean", "geometric-median"])
def test_an_integer_weight_counts_as_that_many_copies(name):
    uploads, counts = draw(5), np.asarray([2, 1, 3, 1, 2])
    weighted = jax.jit(MADE[name])(uploads, jnp.asarray(counts, float))
    repeated = jax.jit(MADE[name])(jax.tree.map(lambda x: np.repeat(x, counts, axis=0), uploads), ones(counts.sum()))
    np.testing.assert_allclose(flat(weighted), flat(repeated), rtol=1e-4, atol=1e-5)


MEDIAN, TRIMMED, CENTRE, KRUM, SEVERAL = map(
    jax.jit, (Median(), TrimmedMean(0.2), GeometricMedian(), Krum(2), Krum(2, keep=7))
)
BAD = st.sampled_from([0.0, 3.0, -50.0, 1e8, -1e20, 1e38, np.inf, -np.inf, np.nan])


def attacked(n, bad, seed):
    """Honest uploads of some agents, and all of them with arbitrary ones of the others in between."""
    honest = draw(n - len(bad), seed)
    arbitrary = jax.tree.map(lambda x: np.stack([np.full(x.shape[1:], b, np.float32) for b in bad]), honest)
    order = np.random.default_rng(seed).permutation(n)
    return honest, jax.tree.map(lambda x, y: np.concatenate([x, y])[order], honest, arbitrary)


@given(st.lists(BAD, min_size=2, max_size=2), st.integers(0, 1000))
def test_a_minority_cannot_move_a_coordinate_out_of_the_others_range(bad, seed):
    honest, uploads = attacked(10, bad, seed)
    low, high = flat(honest, 1).min(axis=0), flat(honest, 1).max(axis=0)
    for rule in (MEDIAN, TRIMMED):
        found = flat(rule(uploads, ones(10)))
        assert (found >= low - 1e-5).all(), rule
        assert (found <= high + 1e-5).all(), rule


@given(st.lists(BAD, min_size=3, max_size=3), st.integers(0, 1000))
def test_a_minority_cannot_move_the_geometric_median_far(bad, seed):
    honest, uploads = attacked(10, bad, seed)
    x, q = flat(honest, 1), 0.3
    centre = x.mean(axis=0)
    radius = np.linalg.norm(x - centre, axis=1).max()
    moved = np.linalg.norm(flat(CENTRE(uploads, ones(10))) - centre)
    assert moved <= 2 * (1 - q) / (1 - 2 * q) * radius


@given(st.lists(BAD, min_size=2, max_size=2), st.integers(0, 1000))
def test_krum_keeps_only_uploads_near_an_honest_one(bad, seed):
    n, f = 9, 2
    honest, uploads = attacked(n, bad, seed)
    x = flat(honest, 1)
    diameter = max(np.linalg.norm(a - b) for a in x for b in x)
    found = flat(KRUM(uploads, ones(n)))
    assert np.linalg.norm(x - found, axis=1).min() <= np.sqrt((n - f - 2) / (n - 2 * f - 1)) * diameter * (1 + 1e-5)
    several = flat(SEVERAL(uploads, ones(n)))
    assert np.linalg.norm(x - several, axis=1).min() <= 2 * diameter


def test_a_single_agent_moves_the_mean_anywhere():
    _, uploads = attacked(10, [1e8], 0)
    assert flat(Mean()(uploads, ones(10))).min() > 9e6
    np.testing.assert_array_equal(flat(Mean()(draw(4), ones(4))), flat(average(draw(4), ones(4))))


@pytest.mark.parametrize("rule", [m for m in ROBUST.values() if m.least_agents == 1], ids=lambda r: type(r).__name__)
def test_robust_of_one_agent_is_that_agent(rule):
    wrapped, upload = Robust(OWN, rule), jax.random.normal(jax.random.key(1), (1, 9, 4))
    server, _ = wrapped.init(jnp.zeros((9, 4)))
    np.testing.assert_allclose(wrapped.server(server, upload, ones(1)).message, upload[0], rtol=1e-6)


def test_robust_delegates_the_client_and_the_contract_to_the_inner_algorithm():
    inner = pf.PerFedAvgPG(1.0, 0.3, 2, 3, 3, 3, adaptation_steps=2, deployment_alpha=2.0)
    wrapped = Robust(inner, Median())
    server, state = inner.init(jnp.zeros((9, 4)))
    for made in (wrapped, jax.tree.map(lambda x: x, wrapped)):
        one, other = (a.client(server.message, state, agent(2), jax.random.key(5))[0] for a in (inner, made))
        np.testing.assert_array_equal(np.asarray(one).view(np.int32), np.asarray(other).view(np.int32))
        assert (made.personalization_steps, made.curvature_trajectories) == (2, 3)
        assert (made.adaptation_step_size(server.message), made.deployment_step_size(server.message)) == (1.0, 2)
        assert made.trajectories_per_round == inner.trajectories_per_round
        assert made.diagnostics(state) == {}
    storm = pf.algorithms.StormPG(1.0, 0.3)
    weights = storm.init(jnp.zeros((9, 4)))[1]
    assert list(Robust(storm, Median()).diagnostics(weights)) == list(storm.diagnostics(weights)) != []
    assert jax.tree.leaves(wrapped) == jax.tree.leaves(inner), "step sizes stay leaves"
    assert jax.tree.structure(wrapped) != jax.tree.structure(Robust(inner, TrimmedMean()))
    assert unwrapped(Robust(wrapped, Mean())) is inner


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", some_slow([GeometricMedian(8), Krum(1, 2)], [Krum(1, 2)]), ids=lambda r: type(r).__name__
)
def test_a_seed_does_not_depend_on_what_runs_beside_it(rule):
    def final(seeds, chunk=None):
        simulation = simulation_of(FLEET, POLICY, [Robust(OWN, rule)] * len(seeds), seeds, chunk=chunk)
        return simulation.advance(simulation.start(), 0, 3).server.message

    np.testing.assert_array_equal(final([4, 5, 6])[1], final([5], chunk=2)[0])


def test_weights_reach_the_server():
    weights = [1.0, 2.0, 3.0, 0.5, 1.0, 1.0, 1.0, 4.0][: FLEET.agents]
    plain, weighted = (simulation_of(FLEET, POLICY, [OWN], [3], weights=w) for w in (None, weights))
    uploads = simulation_of(FLEET, POLICY, [Keeping(OWN)], [3])
    kept = uploads.advance(uploads.start(), 0, 1).server.private[0]
    for simulation, w in ((plain, np.ones(FLEET.agents)), (weighted, weights)):
        message = simulation.advance(simulation.start(), 0, 1).server.message[0]
        np.testing.assert_allclose(message, np.average(kept, axis=0, weights=w), rtol=1e-5, atol=1e-6)
    alike = simulation_of(FLEET, POLICY, [OWN], [3], weights=[1.0] * FLEET.agents)
    same = [s.advance(s.start(), 0, 3).server.message for s in (plain, alike)]
    np.testing.assert_array_equal(same[0].view(np.int32), same[1].view(np.int32))


def test_too_few_agents_are_refused_also_where_fewer_answer_than_expected():
    rule = Krum(2, keep=6)
    assert rule.least_agents == 8
    with pytest.raises(pf.UserError, match="needs at least 8 agents; 7 sent something"):
        rule(draw(7), ones(7))
    with pytest.raises(pf.UserError, match="sent something"):
        jax.eval_shape(Robust(OWN, rule).server, OWN.init(jnp.zeros((9, 4)))[0], jnp.zeros((3, 9, 4)), ones(3))
    with pytest.raises(pf.UserError, match=f"at least 23 training agents; there are {FLEET.agents}"):
        simulation_of(FLEET, POLICY, [Robust(OWN, Krum(10))], [0])


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("trimmed-mean", {"share": 0.5}, "everybody would be cut"),
        ("trimmed-mean", {"share": -0.1}, "share"),
        ("geometric-median", {"iterations": 0}, "iterations"),
        ("geometric-median", {"smoothing": 0.0}, "smoothing"),
        ("krum", {"malicious": -1}, "malicious"),
        ("krum", {"keep": 0}, "keep"),
    ],
)
def test_bad_settings_are_refused(name, params, message):
    with pytest.raises(pf.UserError, match=message):
        AGGREGATIONS[name](**params)


def test_algorithms_without_uploads_reject_an_aggregation():
    with pytest.raises(pf.UserError, match="sends nothing"):
        Robust(pf.LocalPG(0.1), Median())


TABLES = [
    ({"aggregation": "mediam"}, r"unknown aggregation 'mediam'.*'median'"),
    ({"aggregation": {"name": "krum", "malicious": 1}}, r"at least 5 training agents; there are 4"),
    ({"aggregation": {"name": "trimmed-mean", "share": 0.7}}, r"everybody"),
    ({"aggregation": {"name": "median", "share": 0.1}}, r"no parameter 'share'"),
    ({"aggregation": {"name": "mean", "weights": [1, 2]}}, r"one number per training agent, 4; there are 2"),
    ({"aggregation": {"name": "mean", "weights": [1, 2, 0, 1]}}, r"positive numbers"),
    ({"aggregation": {"name": "mean", "weights": [1, 2, "3", 1]}}, r"positive numbers"),
    ({"aggregation": {"name": "mean", "weights": 3}}, r"weights must be a list"),
    ({"aggregation": 3}, r"a name, or a table"),
    ({"aggregation": {"weights": [1, 1, 1, 1]}}, r"needs name"),
]


@pytest.mark.parametrize(("change", "message"), TABLES)
def test_bad_tables_are_refused_in_one_sentence(change, message):
    with pytest.raises(pf.UserError) as error:
        make_config(changed(**change))
    assert re.search(message, str(error.value)), str(error.value)
    assert "\n" not in str(error.value)


def test_a_config_names_an_aggregation_and_one_without_keeps_its_digest(tmp_path):
    plain, robust = make_config(BASE), make_config(changed(aggregation="geometric-median"))
    for same in ("mean", {"name": "mean"}, None):
        assert make_config(changed(aggregation=same)).digest == plain.digest
    assert "aggregation" not in plain.to_toml()
    assert robust.digest != plain.digest
    spelled = make_config(changed(aggregation={"name": "geometric-median", "iterations": 64}))
    assert spelled == robust
    assert spelled.digest == robust.digest
    assert isinstance(robust.experiment.algorithm, Robust)
    weighted = make_config(changed(aggregation={"name": "mean", "weights": [1, 2.5, 3, 1]}))
    assert isinstance(weighted.experiment.algorithm, pf.PerFedAvgPG), "a mean is no wrapper"
    assert weighted.experiment.weights == (1, 2.5, 3, 1)
    assert (
        robust.trains_with == make_config(changed(aggregation="geometric-median", algorithm={"alpha": 3.0})).trains_with
    )
    for config in (robust, weighted):
        path = tmp_path / "copy.toml"
        path.write_text(config.to_toml())
        assert pf.load_config(path) == config


@pytest.mark.slow
def test_a_run_trains_with_its_weights(tmp_path):
    quick = {**BASE, "rounds": 1, "algorithm": {"name": "fedavg-pg", "alpha": 1.0, "beta": 0.1, "m": 2}}
    config = make_config({**quick, "aggregation": {"name": "mean", "weights": [1, 2.5, 3, 1]}})
    run = train(config, tmp_path)
    assert not np.array_equal(run.params, train(make_config(quick), tmp_path).params)
    assert pf.load_run(run.folder).config.experiment.weights == (1, 2.5, 3, 1)
