"""The simulator: results do not depend on pieces, chunks, other seeds or devices, and a sweep compiles once."""

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulations import simulation_of
from tiers import some_slow

import perfedrl as pf
from perfedrl import compilation
from perfedrl.algorithms import ServerState
from perfedrl.simulation import compiled as engine
from perfedrl.simulation import keys as run_keys

FLEETS = {"gridworld": pf.gridworld(), "random": pf.envs.random_mdps(agents=5, states=4, actions=3)}
ALGORITHMS = {
    "exact": pf.PerFedAvgPG(2.0, 0.3, 3, 6, 6, 6),
    "first-order": pf.PerFedAvgPG(2.0, 0.3, 3, 6, 6, 6, variant="first-order"),
    "fedavg-pg": pf.FedAvgPG(2.0, 0.3, 3, 18),
}


def policies(fleet):
    mdps = fleet.train
    features = np.eye(mdps.states * mdps.actions).reshape(mdps.states, mdps.actions, -1)
    return {"table": pf.TableSoftmax(mdps.states, mdps.actions), "log-linear": pf.LogLinearSoftmax(features)}


def final(fleet, policy, algorithm, seeds, chunk=None, cuts=(6,)):
    simulation = simulation_of(fleet, policy, [algorithm] * len(seeds), list(seeds), chunk=chunk)
    state, done = simulation.start(), 0
    for rounds in cuts:
        state, done = simulation.advance(state, done, rounds), done + rounds
    return state.server.message


@pytest.mark.parametrize("kind", some_slow(["tabular", "neural"], ["tabular"]))
def test_a_small_run_is_bitwise_the_same_in_pieces_in_chunks_and_alone(kind):
    """A fast version of the slow tests below; the neural curvature batch is processed in two slices."""
    if kind == "tabular":
        fleet, policy, algorithm = pf.gridworld(width=2, horizon=3), pf.TableSoftmax(4, 4), ALGORITHMS["first-order"]
    else:
        fleet, policy = pf.arc(goals=3, held_out=0, horizon=3), pf.MLPSoftmax((2, 4, 8))
        algorithm = pf.PerFedAvgPG(1.0, 0.2, 1, 3, 150, 3)

    def run(seeds, **how):
        return final(fleet, policy, algorithm, seeds, **how)

    def same(one, two):
        jax.tree.map(np.testing.assert_array_equal, one, two)

    whole = run([0, 1, 2], cuts=(3,))
    same(whole, run([0, 1, 2], cuts=(1, 2)))
    same(jax.tree.map(lambda x: x[[1]], whole), run([1], cuts=(3,)))
    if kind == "tabular":
        same(whole, run([0, 1, 2], chunk=2, cuts=(3,)))


def test_with_the_compilers_usual_settings_a_seed_has_the_same_bits_alone_and_beside_others():
    """In another process, since the fast tests have settings of their own."""
    code = """
import numpy as np, perfedrl as pf
from perfedrl.simulation.experiment import Experiment
parts = pf.gridworld(width=2, horizon=3), pf.TableSoftmax(4, 4), pf.PerFedAvgPG(2.0, 0.3, 3, 6, 6, 6)
def message(*seeds):
    simulation = pf.Simulation(Experiment(*parts), list(seeds))
    return np.asarray(simulation.advance(simulation.start(), 0, 3).server.message)
together = message(0, 1, 2)
assert np.abs(together).max() > 0.01
np.testing.assert_array_equal(message(1), together[1:2])
"""
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "XLA_FLAGS": ""}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("fleet", "policy"), [("gridworld", "table"), ("random", "log-linear")])
def test_the_bits_of_a_seed_do_not_depend_on_pieces_chunks_or_other_seeds(fleet, algorithm, policy):
    fleet, algorithm = FLEETS[fleet], ALGORITHMS[algorithm]

    def run(seeds, **how):
        return final(fleet, policies(fleet)[policy], algorithm, seeds, **how)

    whole = run(range(16))
    assert np.abs(whole).max() > 0.01
    assert not (whole[0] == whole[1]).all()
    same = np.testing.assert_array_equal
    same(whole, run(range(16)), err_msg="a repetition differs")
    same(whole, run(range(16), cuts=(1, 3, 2)), err_msg="a run in pieces differs")
    for seeds in ([0], [1, 2], [4, 1, 3]):
        same(whole[seeds], run(seeds), err_msg=f"seeds {seeds} differ beside other seeds")
    for chunk in (1, 2, 4):
        same(whole, run(range(16), chunk=chunk), err_msg=f"chunks of {chunk} agents differ")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_bits_of_a_neural_seed_do_not_depend_on_pieces_chunks_or_other_seeds(algorithm):
    """Also where agents run one by one for speed, and where the curvature batch is processed in slices."""
    algorithm = ALGORITHMS[algorithm] if algorithm != "exact" else pf.PerFedAvgPG(1.0, 0.2, 2, 6, 150, 6)
    fleet, policy = pf.arc(horizon=8), pf.MLPSoftmax((2, 32, 8))

    def run(seeds, **how):
        return final(fleet, policy, algorithm, seeds, **how)

    def same(one, two):
        jax.tree.map(np.testing.assert_array_equal, one, two)

    whole = run(range(7))
    same(whole, run(range(7), cuts=(1, 3, 2)))
    for seeds in ([0], [4, 1, 3]):
        same(jax.tree.map(lambda x, seeds=seeds: x[seeds], whole), run(seeds))
    for chunk in (1, 4):
        same(whole, run(range(7), chunk=chunk))


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_devices(monkeypatch):
    assert len(jax.local_devices()) == 2, "the tests run on two devices"
    fleet = FLEETS["gridworld"]
    two = final(fleet, policies(fleet)["table"], ALGORITHMS["exact"], range(8))
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1])
    one = final(fleet, policies(fleet)["table"], ALGORITHMS["exact"], range(8))
    np.testing.assert_array_equal(one, two)


def test_this_version_of_jax_accepts_our_compiler_options(monkeypatch):
    """Without them compiling would be slow and results would depend on the number of seeds that run together.

    What XLA_FLAGS sets is left to it, as in the fast tests.
    """
    options = compilation.options.__wrapped__  # not what was found for the flags of this process
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=")
    assert options("cpu") == compilation.OPTIONS["cpu"]
    assert options("tpu") == {}
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to= --xla_backend_optimization_level=0")
    assert set(compilation.OPTIONS["cpu"]) - set(options("cpu")) == {"xla_backend_optimization_level"}
    assert not compilation._known("no_such_option", 1)


def test_the_derivation_of_keys_has_not_changed():
    """A change here changes the results of every seed: note it in the changelog and rerun `make reproduce`."""
    key = jax.random.fold_in(run_keys.agent_key(seed=3, agent=1), 2)
    assert jax.random.key_data(run_keys.agent_key(seed=3, agent=1)).tolist() == [1946498123, 2217676430]
    assert jax.random.key_data(key).tolist() == [1162771976, 1047151509]


class Anchored(pf.algorithms.Algorithm):
    """An algorithm with features that the paper's algorithms lack.

    Its message is more than parameters, the server has private state, and each client has a personal vector that is
    added to the shared parameters at deployment.
    """

    beta: Any
    trajectories_per_round = 2

    def init(self, params):
        return ServerState(message={"theta": params, "round": jnp.zeros(())}, private=jnp.zeros(())), jnp.zeros_like(
            params
        )

    def client(self, message, state, agent, key):
        g = agent.gradient(message["theta"] + state, key, 2)
        return {"step": self.beta * g}, state + 0.5 * g

    def server(self, state, uploads, weights):
        theta = state.message["theta"] + jnp.mean(uploads["step"], axis=0)
        return ServerState({"theta": theta, "round": state.message["round"] + 1}, state.private + 1)

    def shared(self, message):
        return message["theta"]

    def personalize(self, message, state, agent, key, m):
        return message["theta"] + state


def test_an_algorithm_with_private_and_personal_state_trains_resumes_and_is_measured():
    fleet = pf.gridworld(width=2, horizon=3, held_out=[(0, 1)])
    policy = pf.TableSoftmax(4, 4)
    simulation = simulation_of(fleet, policy, [Anchored(0.2), Anchored(0.4)], [0, 1])
    *_, whole = simulation.run(simulation.begin(), [2, 4, 6])
    half = next(iter(simulation.run(simulation.begin(), [3])))
    *_, resumed = simulation_of(fleet, policy, [Anchored(0.2), Anchored(0.4)], [0, 1], chunk=3).run(half, [3, 6])
    for one, two in zip(jax.tree.leaves(whole.fleet_state), jax.tree.leaves(resumed.fleet_state), strict=True):
        np.testing.assert_array_equal(one, two)
    assert whole.fleet_state.server.message["round"].tolist() == [6, 6]
    own = np.float64(whole.fleet_state.server.message["theta"][1]) + whole.fleet_state.clients[1, 2]
    assert whole.history.after[1, -1, 2] == pytest.approx(
        float(pf.exact.expected_return(fleet.task(2), own)), abs=1e-12
    )
    np.testing.assert_array_equal(
        whole.history.held_out_after, whole.history.held_out_before, err_msg="a new agent has no personal state yet"
    )
    assert whole.history.bytes[-1] == 6 * 4 * (16 + 1 + 16), "parameters and a counter down, a step up"


def test_a_sweep_over_alpha_beta_and_seeds_compiles_once():
    jax.clear_caches()
    before = engine.advance_replicas.compilations()
    fleet = pf.gridworld(width=2, horizon=3)
    policy = pf.TableSoftmax(4, 4)
    sweep = [(0.0, 0.1), (0.5, 0.1), (2.0, 0.3), (3.0, 0.2)]
    replicas = [pf.PerFedAvgPG(alpha, beta, 2, 2, 2, 2) for alpha, beta in sweep]
    simulation = simulation_of(fleet, policy, replicas, [0, 1, 2, 3])
    state = simulation.advance(simulation.start(), 0, 3)
    simulation.advance(state, 3, 5)
    again = simulation_of(fleet, policy, replicas[::-1], [7, 8, 9, 10])
    again.advance(again.start(), 0, 1)
    assert engine.advance_replicas.compilations() == before + 1
    alone = simulation_of(fleet, policy, replicas[2:3], [2])
    np.testing.assert_array_equal(alone.advance(alone.start(), 0, 3).server.message[0], state.server.message[2])


@pytest.mark.slow
def test_history_has_labelled_axes_and_costs():
    fleet = pf.gridworld(width=3, horizon=4, held_out=[(1, 1), (1, 2)])
    result = pf.simulate(fleet, pf.TableSoftmax(9, 4), pf.PerFedAvgPG(1.0, 0.3, 2, 3, 4, 5), rounds=5, seeds=3, every=2)
    history = result.history
    assert history.rounds.tolist() == [0, 2, 4, 5]
    assert history.after.shape == history.before.shape == (3, 4, 8)
    assert history.held_out_after.shape == (3, 4, 2)
    assert history.trajectories.tolist() == [r * 2 * (3 + 4 + 5) for r in (0, 2, 4, 5)]
    assert history.bytes.tolist() == [r * 2 * 36 * 4 for r in (0, 2, 4, 5)]
    theta = result.params[1]
    np.testing.assert_allclose(history.after[1, -1], pf.exact.returns(fleet, theta, 1.0)[1], rtol=0, atol=1e-12)
    assert result.params.dtype == np.float32


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"seeds": [-1]}, "seeds"),
        ({"rounds": 0}, "rounds"),
        ({"every": 0}, "every"),
        ({"chunk": 0}, "chunk"),
        ({"seeds": []}, "seed"),
    ],
)
def test_bad_settings_are_rejected_before_compiling(change, word):
    fleet = pf.gridworld(width=2)
    settings = {"rounds": 1, "seeds": 1, **change}
    with pytest.raises(pf.UserError, match=word):
        pf.simulate(fleet, pf.TableSoftmax(4, 4), pf.FedAvgPG(1.0, 0.1), **settings)


def test_a_policy_that_does_not_fit_the_fleet_is_rejected():
    with pytest.raises(pf.UserError, match=r"policy is for \(4, 4\) states and actions, the fleet has \(9, 4\)"):
        pf.simulate(pf.gridworld(width=3), pf.TableSoftmax(4, 4), pf.FedAvgPG(1.0, 0.1), rounds=1)


def test_divergence_is_an_error():
    fleet, policy = pf.gridworld(width=2), pf.TableSoftmax(4, 4)
    with pytest.raises(pf.UserError, match="diverged between rounds 0 and 1: lower alpha or beta"):
        pf.simulate(fleet, policy, pf.FedAvgPG(1.0, 1e38, m=2), rounds=1, seeds=1, baseline="none")
