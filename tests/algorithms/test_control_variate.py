"""Control variates: the plain algorithm with everybody there, at rest with a few, and nothing more sent up."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulations import simulation_of
from tiers import some_slow
from tiny_config import FEDAVG

import perfedrl as pf
from perfedrl.algorithms import SGMRL, ControlVariate, FedOpt, Personal, Private, StormPG
from perfedrl.algorithms.control_variate import WithControl
from perfedrl.errors import UserError
from perfedrl.exact.tabular import Exact
from perfedrl.experiments.config import make_config
from perfedrl.federation.server.network_config import networked
from perfedrl.studies.client_sampling.training import sampling

FLEET = pf.gridworld(width=3, horizon=5)
POLICY = pf.TableSoftmax(9, 4)
N = FLEET.agents
MANY = pf.PerFedAvgPG(1.0, 0.3, 3, 4, 4, 4)
ONE = pf.PerFedAvgPG(1.0, 0.3, 1, 4, 4, 4)
TABLE = {
    **FEDAVG,
    "name": "controlled",
    "seeds": 1,
    "participation": 0.25,
    "algorithm": {"name": "per-fedavg-pg", "alpha": 1.0, "beta": 0.2, "local_steps": 2},
    "control_variate": "round",
}


def after(algorithm, rounds, exact=True, fleet=FLEET, seed=0, **how):
    """The state of one replica after some rounds, by default without sampling noise."""
    simulation = simulation_of(fleet, POLICY, [algorithm], [seed], Exact(POLICY) if exact else None, **how)
    return jax.tree.map(lambda x: x[0], simulation.advance(simulation.start(), 0, rounds))


@pytest.mark.parametrize("memory", some_slow([0.3, 1.0], [0.3]))
@pytest.mark.parametrize(("mode", "inner"), [("round", MANY), ("step", ONE)])
def test_with_full_participation_it_is_the_inner_algorithm(mode, inner, memory):
    """By rounds at any number of local steps; by steps at one, since between steps it corrects drift."""
    algorithm = ControlVariate(inner, mode, N, memory)
    plain, controlled = after(inner, 6), after(algorithm, 6)
    shared = algorithm.shared(controlled.server.message)
    assert np.abs(plain.server.message).max() > 0.01
    np.testing.assert_allclose(shared, plain.server.message, atol=1e-13)


@pytest.mark.slow
def test_sampled_rounds_with_full_participation_are_the_inner_ones_up_to_rounding():
    plain, controlled = after(MANY, 5, exact=False), after(ControlVariate(MANY, "round", N), 5, exact=False)
    np.testing.assert_allclose(controlled.server.message, plain.server.message, atol=1e-6)


def test_identical_agents_are_averaged_as_without_control_variates():
    fleet = pf.Fleet(jax.tree.map(lambda x: np.repeat(x[:1], 3, axis=0), FLEET.train))
    plain, stepped = after(MANY, 4, fleet=fleet), after(ControlVariate(MANY, "step", 3), 4, fleet=fleet)
    np.testing.assert_allclose(stepped.server.message.inner, plain.server.message, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("mode", some_slow(["round", "step"], ["step"]))
def test_the_server_knows_the_mean_of_all_agents_controls(mode):
    """Also with weights, and although it hears of a few agents at a time."""
    weights = [float(i) for i in range(1, 1 + N)]
    weighted = {"weights": weights}
    cases = ((MANY, 1.0, {}), (FedOpt(MANY, "sgd", 0.25), 0.3, {}), (FedOpt(MANY, "adam", 0.1), 0.5, weighted))
    for inner, memory, how in cases:
        total = sum(weights) if how else N
        state = after(ControlVariate(inner, mode, total, memory), 7, participation=0.25, **how)
        control = state.server.private.control if mode == "round" else state.server.message.control
        own = np.average(state.clients.control, axis=0, weights=how.get("weights"))
        assert np.abs(own).max() > 1e-3
        np.testing.assert_allclose(control, own, atol=1e-12)


class Pulled:
    """An agent whose return has the gradient target - theta, in one number."""

    traceable = True

    def __init__(self, target):
        self.target = target

    def gradient(self, params, key, m):
        return self.target - params

    def curvature(self, params, v, key, m):
        return -v

    def value(self, params, key, m):
        return -0.5 * (self.target - params) ** 2


@pytest.mark.parametrize("memory", [0.25, 1.0])
def test_one_round_by_hand(memory):
    """One of two agents, with two steps of beta = 1/2: its displacement is 3/4 of the way to its target."""
    inner = pf.FedAvgPG(0.0, 0.5, 2, 1)
    key, theta = jax.random.key(0), jnp.asarray(0.2)
    by_round, by_step = (ControlVariate(inner, mode, 2, memory) for mode in ("round", "step"))
    server, client = by_round.init(theta)
    upload, client = by_round.client(theta, client._replace(control=jnp.asarray(0.1)), Pulled(1.0), key)
    assert upload == pytest.approx(0.2 + 0.75 * 0.8 - 0.1)
    assert client.control == pytest.approx(0.1 + memory * (0.6 - 0.1))
    server = by_round.server(server._replace(private=WithControl((), jnp.asarray(0.3))), upload[None], jnp.ones(1))
    assert server.message == pytest.approx(0.2 + 0.3 + 0.5)
    assert server.private.control == pytest.approx(0.3 + memory * 0.5 * 0.5)
    server, client = by_step.init(theta)
    server = server._replace(message=WithControl(theta, jnp.asarray(0.3)))
    upload, client = by_step.client(server.message, client._replace(control=jnp.asarray(0.1)), Pulled(1.0), key)
    first = 0.2 + 0.5 * 0.8 + 0.2
    second = first + 0.5 * (1 - first) + 0.2
    assert upload == pytest.approx(second)
    assert client.control == pytest.approx(0.1 + memory * ((second - 0.2) / 2 - 0.3))
    server = by_step.server(server, upload[None], jnp.ones(1))
    assert server.message.inner == pytest.approx(second)
    assert server.message.control == pytest.approx(0.3 + memory * 0.5 * ((second - 0.2) / 2 - 0.3))


def test_a_server_rate_scales_the_corrected_step_and_not_the_learning_of_c():
    """The round by hand before a server of rate 1/4."""
    inner, key, theta = FedOpt(pf.FedAvgPG(0.0, 0.5, 2, 1), "sgd", 0.25), jax.random.key(0), jnp.asarray(0.2)
    algorithm = ControlVariate(inner, "round", 2, 0.5)
    server, client = algorithm.init(theta)
    upload, client = algorithm.client(theta, client._replace(control=jnp.asarray(0.1)), Pulled(1.0), key)
    server = algorithm.server(
        server._replace(private=server.private._replace(control=jnp.asarray(0.3))), upload[None], jnp.ones(1)
    )
    assert server.message == pytest.approx(0.2 + 0.25 * (0.3 + 0.5))
    assert server.private.control == pytest.approx(0.3 + 0.5 * 0.5 * 0.5)
    algorithm = ControlVariate(inner, "step", 2, 0.5)
    server, client = algorithm.init(theta)
    server = server._replace(message=WithControl(theta, jnp.asarray(0.3)))
    upload, client = algorithm.client(server.message, client._replace(control=jnp.asarray(0.1)), Pulled(1.0), key)
    server = algorithm.server(server, upload[None], jnp.ones(1))
    moved = upload - 0.2
    assert server.message.inner == pytest.approx(0.2 + 0.25 * moved)
    assert server.message.control == pytest.approx(0.3 + 0.5 * 0.5 * (moved / 2 - 0.3))


@pytest.mark.slow
def test_memories_share_a_program_and_each_has_its_own_bits():
    """Also where a server's optimizer has moments."""
    inner = FedOpt(MANY, "adam", 0.1)
    few = [ControlVariate(inner, "round", N, memory) for memory in (0.1, 1.0)]
    together = simulation_of(FLEET, POLICY, few, [3, 3], participation=0.5)
    message = together.advance(together.start(), 0, 3).server.message
    assert np.abs(message[0] - message[1]).max() > 1e-3
    for i, algorithm in enumerate(few):
        alone = simulation_of(FLEET, POLICY, [algorithm], [3], participation=0.5)
        np.testing.assert_array_equal(alone.advance(alone.start(), 0, 3).server.message[0], message[i])


def test_a_shorter_memory_holds_less_of_the_noise_of_one_round():
    """Of a mean and noise it holds the first, and memory / (2 - memory) of the other's power."""
    noise = np.random.default_rng(0).normal(size=4000)
    algorithm = ControlVariate(pf.FedAvgPG(0.0, 1.0, 1, 1), "round", 1, 0.1)
    control, kept = jnp.zeros(()), []
    for move in noise:
        control = algorithm._remembered(control, jnp.asarray(2.0 + move))
        kept.append(float(control))
    assert np.mean(kept[100:]) == pytest.approx(2, abs=0.05)
    assert np.var(kept[100:]) == pytest.approx(0.1 / 1.9, rel=0.3)


def test_at_a_fixed_point_sampling_moves_nothing_in_either_mode():
    """Agents at three targets rest together at their mean; by itself any one of them would tear it away."""
    targets, key = jnp.asarray([0.9, -0.5, 0.2]), jax.random.key(0)
    inner = pf.FedAvgPG(0.0, 0.5, 2, 1)
    for mode, moves in (("round", 0.75 * (targets - 0.2)), ("step", 0.5 * (targets - 0.2))):
        algorithm = ControlVariate(inner, mode, 3)
        server, _ = algorithm.init(jnp.asarray(0.2))
        for i in range(3):
            upload, after = algorithm.client(server.message, WithControl((), moves[i]), Pulled(targets[i]), key)
            moved = algorithm.server(server, upload[None], jnp.ones(1))
            assert algorithm.shared(moved.message) == pytest.approx(0.2, abs=1e-7)
            assert after.control == pytest.approx(float(moves[i]), abs=1e-7)
    assert inner.client(jnp.asarray(0.2), (), Pulled(0.9), key)[0] == pytest.approx(0.2 + 0.75 * 0.7)


def test_uploads_are_as_large_as_without_it_and_only_steps_need_a_broadcast():
    size = lambda algorithm: simulation_of(FLEET, POLICY, [algorithm], [0]).experiment.bytes_per_round  # noqa: E731
    plain, number = size(MANY), 4 * 36
    assert plain == 2 * number
    assert size(ControlVariate(MANY, "round", N)) == plain
    assert size(ControlVariate(MANY, "step", N)) == plain + number


def test_newcomers_and_learned_step_sizes_are_served_in_both_modes():
    learned = pf.PerFedAvgPG(1.0, 0.3, 2, 2, 2, 2, learn_alpha="scalar")
    for mode in ("round", "step"):
        algorithm = ControlVariate(learned, mode, N)
        server, client = algorithm.init(jnp.zeros((9, 4)))
        agent = Exact(POLICY)(FLEET.task(0))
        kept = algorithm.personalize(server.message, client, agent, jax.random.key(0), 0)
        np.testing.assert_array_equal(
            kept, learned.personalize(learned.init(jnp.zeros((9, 4)))[0].message, (), agent, jax.random.key(0), 0)
        )
        assert algorithm.deployment_step_size(server.message) == 1.0
        simulation_of(FLEET, POLICY, [algorithm], [0], participation=0.5)


def test_personal_parameters_stay_with_the_agents_under_controls_of_rounds():
    params = {"own": jnp.ones(3), "ours": jnp.ones(2)}
    algorithm = ControlVariate(Personal(pf.FedAvgPG(0.0, 0.5, 1, 1), ("own",)), "round", 2)
    server, client = algorithm.init(params)
    assert algorithm.unchanged_upload(server.message)["own"].size == client.control["own"].size == 0
    with pytest.raises(UserError, match="mode = 'round'"):
        ControlVariate(Personal(MANY, ("own",)), "step", 2)


def test_algorithms_that_cannot_be_corrected_are_rejected():
    with pytest.raises(UserError, match="no upload to correct"):
        ControlVariate(pf.LocalPG(0.1), "round", N)
    for inner in (StormPG(1.0, 0.1), SGMRL(1.0, 0.1)):
        with pytest.raises(UserError, match="choose mode = 'round'"):
            ControlVariate(inner, "step", N)
    for inner in (Private(MANY, 1.0, 0.1), FedOpt(Private(MANY, 1.0, 0.1), "sgd", 0.5)):
        with pytest.raises(UserError, match="goes inside Private"):
            ControlVariate(inner, "round", N)
    learned = pf.PerFedAvgPG(1.0, 0.1, learn_alpha="scalar")
    with pytest.raises(UserError, match="holds more than these"):
        FedOpt(ControlVariate(learned, "step", N), "adam", 0.1).check_supports(FLEET, POLICY)
    FedOpt(learned, "adam", 0.1).check_supports(FLEET, POLICY)
    with pytest.raises(UserError, match="at most 1"):
        ControlVariate(MANY, "round", N, 2.0)
    with pytest.raises(UserError, match=r"add up to 8; .* made for 4"):
        simulation_of(FLEET, POLICY, [ControlVariate(MANY, "round", 4)], [0])
    with pytest.raises(UserError, match="holds more than these"):
        make_config({**TABLE, "algorithm": {"name": "fast-fedpg", "alpha": 1.0, "beta": 0.1}})


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"privacy": {"clip": 1.0, "noise": 0.1}}, "as they are"),
        ({"aggregation": "median"}, "as they are"),
        ({"attack": {"name": "sign-flip", "agents": 1}, "participation": 1}, "as they are"),
        ({"control_variate": "steps"}, "control_variate"),
        ({"control_variate": {"memory": 0.0}}, "memory"),
        ({"control_variate": {"memory": 1.5}}, "memory"),
    ],
)
def test_a_config_rejects_incompatible_tables(more, why):
    with pytest.raises(UserError, match=why):
        make_config({**TABLE, **more})


def test_a_config_asks_for_it_by_a_table_or_its_mode(tmp_path):
    config = make_config(TABLE)
    assert config == make_config({**TABLE, "control_variate": {"mode": "round"}})
    published = make_config({**TABLE, "control_variate": {"memory": 1}})
    assert published.trains_with == config.trains_with
    assert len({config.digest, published.digest, make_config({**TABLE, "control_variate": "step"}).digest}) == 3
    assert '"memory"' in json.dumps(config.model_dump(mode="json", exclude_defaults=True)), "of the digest, always"
    assert isinstance(config.experiment.algorithm, ControlVariate)
    assert config.experiment.algorithm.total == N
    assert networked(make_config({**TABLE, "participation": 1})).aggregation == {"name": "mean"}, "it needs each upload"
    server = {"optimizer": "sgd", "rate": 0.25}
    run = pf.train(make_config({**TABLE, "control_variate": "step", "server": server}), tmp_path, compile_cache=False)
    assert np.isfinite(run.history.after).all()


def test_weights_of_a_config_reach_the_control_variate_and_every_evaluation_of_the_run(tmp_path):
    weights = [float(i + 1) for i in range(N)]
    config = make_config({**TABLE, "aggregation": {"name": "mean", "weights": weights}})
    assert (config.experiment.algorithm.total, config.experiment.weights) == (sum(weights), tuple(weights))
    run = pf.train(config, tmp_path, compile_cache=False)
    assert len(pf.evaluate(run)) == config.experiment.fleet.agents + config.experiment.fleet.held_out_agents


@pytest.mark.slow
def test_round_controls_recover_the_loss_of_sampling_at_a_fixed_point():
    """Without noise; those of steps are as near to stationary as the rest was, or nearer."""
    study = sampling(0.5, 2, m=None, rounds=40, seeds=range(2), stops=8, rested=1500, fleet=FLEET)
    level = {name: float(found.after[:, -2:].mean()) for name, found in study.items()}
    gap = level["full"] - level["plain"]
    assert gap > 1e-3
    assert level["round-as-published"] == pytest.approx(level["full"], abs=0.1 * gap)
    assert min(level["round"], level["step"]) > level["full"] - 0.1 * gap
    assert level["slow"] > level["plain"]
    assert level["step-as-published"] > level["plain"]
