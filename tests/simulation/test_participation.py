"""Client sampling: each round draws its participants from seed and round; other agents neither work nor change."""

import inspect
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulations import simulation_of
from tiny_config import FEDAVG
from untraced import AGENTS, Played

import perfedrl as pf
from perfedrl.algorithms import ALGORITHMS, Attacked, Robust
from perfedrl.algorithms.aggregation import Krum
from perfedrl.algorithms.attacks import SignFlip
from perfedrl.envs.fleet import fleet as fleet_of
from perfedrl.errors import UserError
from perfedrl.estimators import Sampled
from perfedrl.experiments.config import make_config
from perfedrl.federation.server.network_config import networked
from perfedrl.policies import mlp
from perfedrl.simulation import compiled
from perfedrl.simulation import keys as run_keys

FLEET = pf.gridworld(width=3, horizon=5)
POLICY = pf.TableSoftmax(9, 4)
PLAIN = pf.FedAvgPG(1.0, 0.2, 2, 4)
ALONE = pf.LocalPG(0.2, 2, 4)
TABLE = {**FEDAVG, "name": "sampled"}


def same(one, two):
    jax.tree.map(np.testing.assert_array_equal, one, two)


def after(algorithm, rounds=4, cuts=None, seeds=(0, 1), fleet=FLEET, policy=POLICY, **how):
    """The state after some rounds, in one call or in several."""
    simulation = simulation_of(fleet, policy, [algorithm] * len(seeds), list(seeds), **how)
    state, done = simulation.start(), 0
    for count in cuts or (rounds,):
        state, done = simulation.advance(state, done, count), done + count
    return state


def test_participation_of_all_agents_has_the_bits_and_the_program_of_the_default():
    before = compiled.advance_replicas.compilations()
    full = after(PLAIN)
    added = compiled.advance_replicas.compilations() - before
    same(full, after(PLAIN, participation=1))
    same(full, after(PLAIN, participation=1 - 0.4 / FLEET.agents))
    assert compiled.advance_replicas.compilations() == before + added
    assert not np.array_equal(full.server.message, after(PLAIN, participation=0.5).server.message)


def test_participants_are_drawn_uniformly_without_replacement_from_seed_and_round():
    draw = jax.jit(jax.vmap(run_keys.draw_participants, in_axes=(None, 0, None, None)), static_argnums=(2, 3))
    drawn = np.asarray(draw(3, np.arange(6000), 5, 2))
    assert (drawn[:, 0] < drawn[:, 1]).all(), "in the fleet's order, without repetition"
    counts = [int(np.sum((drawn == pair).all(axis=1))) for pair in combinations(range(5), 2)]
    assert sum(counts) == 6000
    assert np.sum((np.asarray(counts) - 600) ** 2 / 600) < 27.9, "chi-square with 9 degrees of freedom, 99.9 %"
    same(drawn, np.asarray(draw(3, np.arange(6000), 5, 2)))
    assert not np.array_equal(drawn, np.asarray(draw(4, np.arange(6000), 5, 2)))
    with jax.enable_x64(True):
        same(drawn[:9], np.asarray([run_keys.draw_participants(3, k, 5, 2) for k in range(9)]))


def test_the_draw_of_participants_has_not_changed():
    """A change here changes every run with client sampling."""
    assert [run_keys.draw_participants(3, k, 8, 2).tolist() for k in range(4)] == GOLDEN


GOLDEN = [[0, 5], [3, 6], [5, 7], [2, 3]]


def test_other_agents_keep_their_state_and_participants_work_as_with_full_participation():
    """With local training, since there an agent's parameters are its state."""
    full, some = after(ALONE, 1), after(ALONE, 1, participation=0.25)
    start = simulation_of(FLEET, POLICY, [ALONE] * 2, [0, 1]).start()
    for replica, seed in enumerate((0, 1)):
        participates = np.isin(np.arange(FLEET.agents), run_keys.draw_participants(seed, 0, FLEET.agents, 2))
        assert participates.sum() == 2
        same(some.clients[replica][participates], full.clients[replica][participates])
        same(some.clients[replica][~participates], start.clients[replica][~participates])


def test_the_server_averages_the_uploads_of_participants_with_their_weights():
    weights = np.arange(1.0, 1 + FLEET.agents)
    some = after(PLAIN, 1, participation=0.25, weights=weights.tolist())
    message = simulation_of(FLEET, POLICY, [PLAIN], [0]).start().server.message[0]
    agent = Sampled(POLICY)
    for replica, seed in enumerate((0, 1)):
        who = run_keys.draw_participants(seed, 0, FLEET.agents, 2).tolist()
        keys = [jax.random.fold_in(run_keys.agent_key(seed, i), 0) for i in who]
        uploads = [PLAIN.client(message, (), agent(FLEET.task(i)), key)[0] for i, key in zip(who, keys, strict=True)]
        mean = np.average(uploads, axis=0, weights=weights[who])
        np.testing.assert_allclose(some.server.message[replica], mean, atol=1e-6)


@pytest.mark.slow
def test_a_sampled_run_has_the_same_bits_in_pieces_in_chunks_and_with_other_seeds():
    whole = after(PLAIN, participation=0.5)
    same(whole, after(PLAIN, participation=0.5, cuts=(1, 2, 1)))
    same(whole, after(PLAIN, participation=0.5, chunk=2))
    same(jax.tree.map(lambda x: x[1:], whole), after(PLAIN, participation=0.5, seeds=(1,)))


def test_the_python_loop_draws_the_participants_of_the_compiled_loop():
    arc = pf.arc(3, 2)
    played = fleet_of([Played(task) for task in AGENTS[0]], [])
    policy = mlp(arc, (4,))
    how = {"rounds": 2, "seeds": (0,), "policy": policy, "participation": 0.34}
    compiled = after(pf.LocalPG(0.5, 1, 40), fleet=arc, **how)
    in_python = after(pf.LocalPG(0.5, 1, 40), fleet=played, **how)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), compiled, in_python)
    assert len(np.unique(np.asarray(jax.tree.leaves(in_python.clients)[0])[0], axis=0)) in (2, 3)


def made(name):
    """An algorithm with small batches, and a number for each required parameter."""
    table = {"alpha": 0.5, "beta": 0.2}
    for key, p in inspect.signature(ALGORITHMS[name]).parameters.items():
        required = p.default is inspect.Parameter.empty
        small = isinstance(p.default, int) and not isinstance(p.default, bool) and p.default > 4
        if key not in table and (required or small):
            table[key] = 4 if small or "int" in str(p.annotation) else 0.3
    known = inspect.signature(ALGORITHMS[name]).parameters
    return ALGORITHMS[name](**{key: x for key, x in table.items() if key in known})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_runs_a_round_of_some_participants(name):
    algorithm = made(name)
    try:
        state = simulation_of(FLEET, POLICY, [algorithm], [0]).start()
    except UserError as error:
        pytest.skip(f"not for this fleet: {error}")
    state = jax.tree.map(lambda x: jnp.asarray(x[0]), state)
    keys, who = run_keys.agent_keys(0, FLEET.train), run_keys.draw_participants(0, 0, FLEET.agents, 3)

    def one_round(state):
        return compiled.fleet_round(algorithm, Sampled(POLICY), FLEET.train, state, keys, 0, None, None, who)

    def shapes(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype), tree)

    assert shapes(jax.eval_shape(one_round, state)) == shapes(state)


def test_costs_are_means_over_all_agents():
    costs = [
        pf.simulate(FLEET, POLICY, PLAIN, rounds=5, every=5, seeds=1, participation=share).history
        for share in (1.0, 0.25)
    ]
    full, some = ((history.trajectories.tolist(), history.bytes.tolist()) for history in costs)
    assert full == ([0, 40], [0, 5 * 2 * 36 * 4])
    assert some == ([0, round(40 * 2 / FLEET.agents)], [0, round(full[1][1] * 2 / FLEET.agents)])


@pytest.mark.parametrize("share", [0, -0.5, 1.5, True, float("nan"), "half"])
def test_participation_must_be_above_0_and_at_most_1(share, untyped):
    with pytest.raises(UserError, match="above 0 and at most 1"):
        simulation_of(FLEET, POLICY, [PLAIN], [0], participation=share)


def test_too_few_participants_for_an_aggregation_and_sampled_attackers_are_rejected():
    with pytest.raises(UserError, match=r"at least 5 agents .* lets 2 take part"):
        simulation_of(FLEET, POLICY, [Robust(PLAIN, Krum())], [0], participation=0.25)
    with pytest.raises(UserError, match="all agents in every round"):
        simulation_of(FLEET, POLICY, [Attacked(PLAIN, SignFlip(), 1)], [0], participation=0.5)


def test_a_config_sets_participation_and_the_default_does_not_change_the_digest():
    plain, some = make_config(TABLE), make_config({**TABLE, "participation": 0.25})
    assert plain.digest == make_config({**TABLE, "participation": 1}).digest != some.digest
    assert plain.trains_with != some.trains_with
    for share in (0, 1.2):
        with pytest.raises(UserError, match="participation"):
            make_config({**TABLE, "participation": share})
    assert networked(some).participation == 0.25


@pytest.mark.slow
def test_a_trained_config_samples_agents(tmp_path):
    run = pf.train(make_config({**TABLE, "participation": 0.25}), tmp_path, compile_cache=False)
    sampled = pf.simulate(FLEET, POLICY, pf.FedAvgPG(1.0, 0.2), rounds=2, seeds=2, participation=0.25)
    same(run.history.after, sampled.history.after)
    same(run.history.trajectories, sampled.history.trajectories)
