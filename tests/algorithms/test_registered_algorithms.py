"""Algorithms: what they are without noise, what they refuse before any run, and that each has its page."""

import re
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from enumeration import index_key, random_mdp
from names_of_tests import TESTS
from simulations import simulation_of
from small_gridworld import FLEET, POLICY, agent
from tiers import some_slow

import perfedrl as pf
from perfedrl import exact
from perfedrl.algorithms import ALGORITHMS, SGMRL
from perfedrl.algorithms.checks import check_counts
from perfedrl.algorithms.sg_mrl import ReturnAverage, debiased_gradient
from perfedrl.compilation import jit
from perfedrl.estimators import PolicyObjective, Sampled, StepKeys, forms
from perfedrl.experiments.config import make_config
from perfedrl.simulation.keys import agent_keys
from perfedrl.types import Trajectory

SETTINGS = {"alpha": 1.0, "beta": 0.3, "local_steps": 2, "m_in": 3, "m_h": 3, "m_out": 3, "m": 3}
ONE_STEP = ["afedpg", "fast-fedpg", "fedavg-pg", "fednpg", "fedsarsa", "per-fedavg-pg", "per-fedavg-storm"]
ONE_STEP += ["sg-mrl", "softmax-fedpg"]


def make(name, **change):
    """A registered algorithm with small batches; it takes of the settings what it has."""
    accepted = ALGORITHMS.parameters(name)
    return ALGORITHMS[name](**{k: v for k, v in {**SETTINGS, **change}.items() if k in accepted})


@pytest.mark.parametrize("name", some_slow(ONE_STEP, ["afedpg", "fednpg", "per-fedavg-pg"]))
def test_personalization_is_one_policy_gradient_step__algorithm_1_line_12(name):
    algorithm, theta, key = make(name), jax.random.normal(jax.random.key(3), (9, 4)), jax.random.key(4)
    server, state = algorithm.init(theta)
    deployed = lambda m: algorithm.personalize(server.message, state, agent(1), key, m)  # noqa: E731
    by_hand = theta + algorithm.alpha * agent(1).gradient(theta, key, 20)
    np.testing.assert_allclose(deployed(20), by_hand, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(deployed(0), theta, "no data, no step")


def test_local_pg_sends_nothing_and_every_agent_climbs_its_own_return():
    fleet, policy = pf.gridworld(width=3, horizon=6), pf.TableSoftmax(9, 4)
    result = pf.simulate(fleet, policy, pf.LocalPG(0.5), rounds=20, seeds=1, every=5, noiseless=True)
    assert (np.diff(result.history.after[0], axis=0) > 0).all(), "each agent by itself"
    assert result.history.bytes.tolist() == [0] * 5
    assert result.history.trajectories.tolist() == [0, 100, 200, 300, 400]
    alone = np.zeros((9, 4))
    for _ in range(20):
        alone = alone + 0.5 * pf.exact.gradient(fleet.task(2), alone)
    assert result.history.after[0, -1, 2] == pytest.approx(float(pf.exact.expected_return(fleet.task(2), alone)))
    np.testing.assert_array_equal(result.params[0], 0, "the start is all that is shared")


def test_exact_dynamics_climb_the_meta_objective_and_first_order_stalls_below():
    """Without sampling noise: each exact round increases F, and after as many rounds the exact variant is ahead."""
    fleet, policy = pf.gridworld(width=3, horizon=6), pf.TableSoftmax(9, 4)
    exact = pf.simulate(fleet, policy, pf.PerFedAvgPG(2.0, 0.3), rounds=30, seeds=1, every=3, noiseless=True)
    first = pf.simulate(
        fleet, policy, pf.PerFedAvgPG(2.0, 0.3, variant="first-order"), rounds=30, seeds=1, every=3, noiseless=True
    )
    F = exact.history.after.mean(axis=-1)[0]
    assert exact.params.dtype == np.float64
    assert (np.diff(F) > 0).all()
    assert F[-1] > first.history.after.mean(axis=-1)[0, -1]


def test_one_exact_local_step_is_one_step_of_gradient_ascent_on_F__eq_6():
    fleet, policy, beta, alpha = pf.gridworld(width=3, horizon=6), pf.TableSoftmax(9, 4), 0.3, 1.5
    run = pf.simulate(fleet, policy, pf.PerFedAvgPG(alpha, beta, local_steps=1), rounds=1, seeds=1, noiseless=True)
    expected = beta * pf.exact.meta_gradient(fleet, np.zeros((9, 4)), alpha)
    np.testing.assert_allclose(run.params[0], expected, rtol=0, atol=1e-12)
    first = pf.PerFedAvgPG(alpha, beta, local_steps=1, variant="first-order")
    run = pf.simulate(fleet, policy, first, rounds=1, seeds=1, noiseless=True)
    expected = beta * pf.exact.first_order_direction(fleet, np.zeros((9, 4)), alpha)
    np.testing.assert_allclose(run.params[0], expected, rtol=0, atol=1e-12)


class Urn:
    """Batches of a bandit with two arms by how often they pull the second one, which their key carries."""

    traceable = True

    def __init__(self, rewards):
        self.rewards = jnp.asarray(rewards)

    def sample(self, params, key, m):
        action = (jnp.arange(m) < jax.random.key_data(key)[1]).astype(int)[:, None]
        return Trajectory(jnp.zeros_like(action), action, self.rewards[action], jnp.ones(action.shape))


def expected_step(bandit, theta, alpha, m_in):
    """The mean of sg-mrl's local step of length beta = 1: over all inner batches, by their law, and outer pulls."""
    policy, algorithm = exact.softmax_of(bandit), SGMRL(alpha, 1.0, m_in=m_in, m_out=1)
    seen, counts = ReturnAverage(jnp.zeros(()), jnp.zeros(())), jnp.arange(m_in + 1)
    agent = PolicyObjective(Urn(bandit.r[0]), policy, bandit.discount, forms(baseline="none"))

    def after(k):
        adapted = theta + alpha * agent.gradient(theta, index_key(k), m_in)
        step = lambda a: algorithm.step(agent, (theta, seen), StepKeys(*map(index_key, (k, 0, a))))[0]  # noqa: E731
        return jnp.tensordot(policy.probabilities(adapted)[0], jax.vmap(step)(jnp.arange(2)) - theta, 1)

    law = jax.scipy.stats.binom.pmf(counts, m_in, policy.probabilities(theta)[0, 1])
    return jnp.tensordot(law, jax.vmap(after)(counts), 1)


def test_as_m_in_grows_sg_mrl_climbs_the_objective_of_per_fedavg_pg__at_rate_1_over_m_in(x64):
    bandit, alpha = random_mdp(np.random.default_rng(3), (1, 2, 0), 0.9), 1.5
    theta = jnp.asarray([[0.3, -0.4]])
    target = exact.meta_gradient([bandit], np.asarray(theta), alpha)
    apart = {m: jit(lambda theta, m=m: expected_step(bandit, theta, alpha, m))(theta) - target for m in (10, 100, 1000)}
    length = {m: float(jnp.linalg.norm(x)) for m, x in apart.items()}
    assert length[10] > 1e-3 * np.linalg.norm(target), "with few trajectories it is another objective"
    for m in (10, 100):
        np.testing.assert_allclose(m * apart[m], 1000 * apart[1000], rtol=0, atol=3 * 1000 * length[1000] / m)


@pytest.mark.slow
def test_with_one_local_step_sg_mrl_is_centralized():
    """Every round is one step along the mean of all agents' debiased gradients at the same parameters."""
    algorithm, seed, rounds = SGMRL(1.0, 0.3, local_steps=1, m_in=3, m_out=3, score_baseline=False), 5, 2
    simulation = simulation_of(FLEET, POLICY, [algorithm], [seed])
    federated = simulation.advance(simulation.start(), 0, rounds).server.message[0]

    @jit
    def gradients(theta, keys):
        one = lambda task, key: debiased_gradient(  # noqa: E731
            Sampled(POLICY)(task), theta, 1.0, StepKeys(*jax.random.split(key, (1, 3))[0]), 3, 3, 0.0
        )
        return jax.vmap(one)(FLEET.train, keys)[0]

    theta = POLICY.init()
    for k in range(rounds):
        keys = jax.vmap(lambda key, k=k: jax.random.fold_in(key, k))(agent_keys(seed, FLEET.train))
        theta = theta + 0.3 * jnp.mean(gradients(theta, keys), axis=0)
    assert np.abs(theta).max() > 0.01
    np.testing.assert_allclose(federated, theta, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"alpha": -1.0},
        {"beta": 0.0},
        {"beta": -0.1},
        {"alpha": float("nan")},
        {"local_steps": 0},
        {"beta": float("inf")},
        {"m": 0},
    ],
    ids=lambda change: " ".join(map(str, *change.items())),
)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_bad_settings_are_refused(name, change):
    if next(iter(change)) not in ALGORITHMS.parameters(name):
        pytest.skip("this algorithm has no such setting")
    with pytest.raises(pf.UserError, match=next(iter(change))):
        make(name, **change)


def test_an_unknown_variant_is_refused(untyped):
    with pytest.raises(pf.UserError, match="'exact' or 'first-order'"):
        pf.PerFedAvgPG(1.0, 0.3, variant="fo")


@pytest.mark.parametrize("value", [2.5, "3", True])
def test_counts_must_be_whole_numbers(value, untyped):
    with pytest.raises(pf.UserError, match="whole number"):
        check_counts(m_in=value)


@pytest.mark.parametrize("batch", ["m_in", "m_h", "m_out"])
def test_batches_under_1_are_refused(batch):
    with pytest.raises(pf.UserError, match=batch):
        pf.PerFedAvgPG(1.0, 0.3, **{batch: 0})


def test_the_first_order_variant_needs_no_curvature_batch():
    assert pf.PerFedAvgPG(1.0, 0.3, 5, 10, 0, 10, variant="first-order").trajectories_per_round == 100


GRID = {"fleet": {"env": "gridworld", "width": 3, "horizon": 5}, "policy": {"name": "table"}}
ARC = {"fleet": {"env": "arc", "horizon": 5}, "policy": {"name": "mlp"}}
UNSERVED = {
    "context": (ARC, {}, "MLPSoftmax does not have.*'context-mlp'.*'promp'", {"algorithm": {"name": "promp"}}),
    "fednpg": (ARC, {}, "needs the policy 'table'.*fedavg-pg", {"algorithm": {"name": "fedavg-pg"}}),
    "fedsarsa": (ARC, {}, "needs the policy 'table'.*fedavg-pg", {"algorithm": {"name": "fedavg-pg"}}),
    "softmax-fedpg": (ARC, {}, "needs a softmax policy.*fedavg-pg", {"algorithm": {"name": "fedavg-pg"}}),
    "shared-representation": (GRID, {}, "hidden layer.*no network.*'mixing'", {"algorithm": {"name": "mixing"}}),
    "mixing": (
        GRID,
        {"gradient": "zeroth-order", "m": 1},
        "two points.*nearest choice is m = 2",
        {"algorithm": {"name": "mixing", "gradient": "zeroth-order", "m": 2}},
    ),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_a_config_refuses_what_an_algorithm_cannot_serve_and_names_what_works(name):
    where, settings, why, instead = UNSERVED[name]
    config = lambda algorithm: make_config(  # noqa: E731
        {"name": "tried", "seeds": 1, "rounds": 1, **where, "algorithm": {"alpha": 1.0, "beta": 0.3, **algorithm}}
    )
    with pytest.raises(pf.UserError, match=why):
        config({"name": name, **settings})
    assert config(instead["algorithm"]).experiment.algorithm is not None


FOLDER = Path(__file__).parents[2] / "docs" / "algorithms"
INDEX = (FOLDER / "index.md").read_text()
SECTIONS = ["What it optimizes", "Update", "Shared and personal", "Departures", "What to expect"]
SPECIAL_CASES = re.findall(r"^\| (.+) \| `(test_\w+)` \|$", INDEX, re.MULTILINE)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_its_page_with_all_sections_and_settings_that_work(name):
    page = (FOLDER / f"{name}.md").read_text()
    assert page.startswith(f"# `{name}`: ")
    assert not [section for section in SECTIONS if f"\n**{section}.**" not in page]
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    settings = tomllib.loads(block)["algorithm"]
    assert settings.pop("name") == name
    ALGORITHMS[name](**ALGORITHMS.resolve(name, settings))


def test_the_index_of_algorithms_has_a_row_for_each_with_a_link_to_its_page():
    rows = re.findall(r"^\| `([\w-]+)` \|(.*)\|$", INDEX, re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(ALGORITHMS)
    for name, row in rows:
        *cells, links = [cell.strip() for cell in row.split("|")]
        assert len(cells) == 3
        assert all(cells)
        assert f"[page]({name}.md)" in links


@pytest.mark.parametrize("page", sorted(FOLDER.glob("*.md")), ids=lambda page: page.stem)
def test_links_of_the_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert (FOLDER / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize(("claim", "test"), SPECIAL_CASES, ids=[claim for claim, _ in SPECIAL_CASES])
def test_every_special_case_that_is_claimed_is_tested(claim, test):
    assert test in TESTS


def test_the_list_of_special_cases_is_whole():
    assert len(SPECIAL_CASES) == INDEX.count("`test_") >= 16
