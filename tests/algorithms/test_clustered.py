"""Clusters of initializations: the choice, the mean of each cluster, empty clusters, deployment and costs."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quadratic import Quadratic
from simulations import simulation_of
from tiers import some_slow

import perfedrl as pf
from perfedrl.algorithms import Clustered, ServerState
from perfedrl.algorithms.clustered import ClusteredMessage, ClusterState
from perfedrl.compilation import jit
from perfedrl.simulation.experiment import Experiment
from perfedrl.simulation.measurements import choose_and_adapt

FLEET, POLICY = pf.gridworld(width=3, horizon=5), pf.TableSoftmax(9, 4)
KEY = jax.random.key(7)
SMALL = {"local_steps": 2, "m": 4, "m_in": 3, "m_h": 2, "m_out": 3}
INNER = {
    "plain": pf.FedAvgPG(1.0, 0.3, local_steps=2, m=4),
    "first-order": pf.PerFedAvgPG(1.0, 0.3, local_steps=2, m_in=3, m_out=3, variant="first-order"),
    "exact": pf.PerFedAvgPG(1.0, 0.3, local_steps=2, m_in=3, m_h=2, m_out=3),
}


@pytest.mark.parametrize("variant", some_slow(INNER, ["first-order"]))
def test_one_cluster_is_the_inner_algorithm_trajectory_for_trajectory(variant):
    """With weights, client sampling and unseen agents; it costs the same, but for the number of its members."""
    fleet = pf.gridworld(width=3, horizon=5, held_out=[(1, 1)])
    alone, inner, found = Clustered(1.0, 0.3, clusters=1, variant=variant, **SMALL), INNER[variant], []
    assert alone.trajectories_per_round == inner.trajectories_per_round
    weights = tuple(range(1, fleet.agents + 1))
    for algorithm in (alone, inner):
        simulation = simulation_of(fleet, POLICY, [algorithm], [5], participation=0.4, weights=weights)
        state = simulation.advance(simulation.start(), 0, 3)
        found.append((state.server.message, simulation.measure(state, 3)))
    (message, history), (theta, expected) = found
    assert np.abs(theta).max() > 0.05
    np.testing.assert_allclose(message.theta[:, 0], theta, rtol=0, atol=1e-6)
    for part in ("before", "after", "held_out_before", "held_out_after", "trajectories"):
        np.testing.assert_allclose(getattr(history, part), getattr(expected, part), rtol=0, atol=1e-5)


def message_of(*theta, members=None):
    return ClusteredMessage(jnp.asarray(theta, float), jnp.asarray(members or [0.0] * len(theta)))


def took_part(choice):
    return ClusterState(jnp.asarray(float(choice)))


NEW = took_part(-1)


def test_the_server_averages_every_cluster_over_the_agents_that_chose_it():
    """Every assignment of four weighted agents to three clusters, against a mean that is written out."""
    algorithm, theta = Clustered(1.0, 0.3, clusters=3, reseed=False), np.asarray([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
    moved, weights = np.random.default_rng(0).normal(size=(4, 2)), np.asarray([1.0, 2.0, 0.5, 3.0])
    choices = np.stack(np.meshgrid(*[range(3)] * 4), axis=-1).reshape(-1, 4)
    before = ServerState(message_of(*theta))

    def after(choice):
        uploads = ClusteredMessage(jnp.asarray(moved), jax.nn.one_hot(choice, 3))
        return algorithm.server(before, uploads, jnp.asarray(weights)).message

    found = jit(jax.vmap(after))(choices)
    for choice, centers, members in zip(choices, *found, strict=True):
        for k in range(3):
            mine = choice == k
            mean = theta[k] if not mine.any() else theta[k] + np.average(moved[mine], axis=0, weights=weights[mine])
            np.testing.assert_allclose(centers[k], mean, atol=1e-6)
            assert members[k] == pytest.approx(weights[mine].sum() / weights.sum(), abs=1e-6)


def test_whatever_an_agent_sends_as_its_membership_it_counts_once():
    algorithm, before = Clustered(1.0, 0.3), ServerState(message_of([0.0], [10.0]))
    moved, weights = jnp.asarray([[1.0], [3.0], [-2.0]]), jnp.ones(3)
    honest = algorithm.server(before, ClusteredMessage(moved, jnp.eye(2)[jnp.asarray([0, 0, 1])]), weights)
    lies = jnp.asarray([[1e9, -4.0], [0.3, 0.2], [-7.0, -6.0]])
    told = algorithm.server(before, ClusteredMessage(moved, lies), weights)
    jax.tree.map(np.testing.assert_array_equal, told, honest)
    np.testing.assert_allclose(honest.message.theta, [[2.0], [8.0]])


def test_a_cluster_that_nobody_chose_takes_the_agent_farthest_from_its_mean_or_stays():
    """Agents end at 1, 3 and 8, their mean is 4: the farthest is 8, then 1, then 3."""
    moved = jnp.asarray([[1.0], [3.0], [8.0]])
    for clusters, expected in ((2, [4, 8]), (3, [4, 8, 1]), (5, [4, 8, 1, 3, 0])):
        before = ServerState(message_of(*[[0.0]] * clusters))
        uploads = ClusteredMessage(moved, jnp.eye(clusters)[jnp.zeros(3, int)])
        for reseed, wanted in ((True, expected), (False, [4] + [0] * (clusters - 1))):
            after = Clustered(1.0, 0.3, clusters=clusters, reseed=reseed).server(before, uploads, jnp.ones(3))
            np.testing.assert_allclose(after.message.theta[:, 0], wanted, atol=1e-6)
    still = ClusteredMessage(jnp.zeros((3, 1)), jnp.eye(2)[jnp.zeros(3, int)])
    after = Clustered(1.0, 0.3).server(ServerState(message_of([5.0], [1.0])), still, jnp.ones(3))
    np.testing.assert_array_equal(after.message.theta, [[5.0], [1.0]], "nobody is away from the mean")


@pytest.mark.parametrize("variant", some_slow(("plain", "exact"), ["plain"]))
def test_two_groups_of_agents_are_told_apart_from_equal_starts(variant, x64):
    """Quadratic agents around two places: from any key each cluster gets one group, and tends to that group's mean."""
    places = jnp.asarray([[4.0, 0.1], [4.2, -0.1], [3.8, 0.0], [-4.0, 1.0], [-4.4, 0.6], [-3.6, 0.8]])
    algorithm = Clustered(0.2, 0.3, variant=variant, local_steps=2)

    def run(key):
        server, client = algorithm.init(jnp.zeros(2))

        def one_round(carry, key):
            server, states = carry
            work = lambda place, state, key: algorithm.client(server.message, state, Quadratic(place), key)  # noqa: E731
            uploads, states = jax.vmap(work)(places, states, jax.random.split(key, 6))
            return (algorithm.server(server, uploads, jnp.ones(6)), states), ()

        start = server, jax.tree.map(lambda x: jnp.broadcast_to(x, 6), client)
        (server, states), _ = jax.lax.scan(one_round, start, jax.random.split(key, 60))
        return server.message, states.choice

    message, choices = jit(jax.vmap(run))(jax.random.split(KEY, 20))
    for theta, members, chosen in zip(*message, choices, strict=True):
        assert len(set(chosen[:3].tolist())) == len(set(chosen[3:].tolist())) == 1
        assert chosen[0] != chosen[3]
        np.testing.assert_allclose(theta[chosen[::3].astype(int)], [places[:3].mean(0), places[3:].mean(0)], atol=1e-9)
        np.testing.assert_allclose(members, 0.5)


def test_without_new_seeds_all_agents_may_stay_in_one_cluster(x64):
    """Where a cluster is empty in the first round and all agents like the other one better than the start."""
    places, algorithm = jnp.asarray([[5.0, 1.0], [5.0, -1.0]]), Clustered(0.2, 0.3, reseed=False)
    message, states = message_of([2.0, 0.0], [0.0, 0.0]), [took_part(0)] * 2
    for _ in range(5):
        work = [algorithm.client(message, s, Quadratic(p), KEY) for s, p in zip(states, places, strict=True)]
        uploads = jax.tree.map(lambda *xs: jnp.stack(xs), *[upload for upload, _ in work])
        message, states = algorithm.server(ServerState(message), uploads, jnp.ones(2)).message, [s for _, s in work]
    assert [int(s.choice) for s in states] == [0, 0]
    np.testing.assert_array_equal(message.theta[1], 0)


class Cliff(eqx.Module):
    """J(0) = 1 and J(0.4) = 0.6, but a step leads from 0 nowhere and from 0.4 to a larger return."""

    traceable = True

    def gradient(self, params, key, m):
        return jnp.where(params > 0, 1.0, 0.0)

    def curvature(self, params, v, key, m):
        return jnp.zeros_like(v)

    def value(self, params, key, m):
        return jnp.where(params[0] < 0.5, 1 - params[0], 3 * params[0])


@pytest.mark.parametrize(("variant", "best"), [("plain", 0), ("first-order", 1)])
def test_an_agent_chooses_by_the_objective_that_its_steps_climb(variant, best):
    algorithm, message = Clustered(1.0, 0.3, variant=variant, local_steps=1), message_of([0.0], [0.4])
    upload, state = algorithm.client(message, NEW, Cliff(), KEY)
    assert (int(state.choice), int(jnp.argmax(upload.members))) == (best, best)
    assert float(upload.theta[0]) == pytest.approx(0.3 * best), "the displacement of what it chose"
    deployed = algorithm.personalize(message, NEW, Cliff(), KEY, 20)
    assert float(deployed[0]) == pytest.approx([0.0, 1.4][best])


def test_ties_go_to_the_last_choice_and_at_first_to_any_cluster():
    algorithm, message = Clustered(1.0, 0.3, clusters=3), message_of([1.0], [1.0], [1.0])
    choose = jit(lambda state, key: algorithm.client(message, state, Quadratic(jnp.zeros(1)), key)[1].choice)
    keys = [jax.random.fold_in(KEY, i) for i in range(30)]
    assert {int(choose(NEW, key)) for key in keys} == {0, 1, 2}
    assert {int(choose(took_part(1), key)) for key in keys} == {1}


def test_an_initialization_without_a_number_for_its_value_is_not_chosen():
    message = message_of([jnp.nan], [9.0])
    _, state = Clustered(1.0, 0.3).client(message, NEW, Quadratic(jnp.zeros(1)), KEY)
    assert int(state.choice) == 1


class Counting:
    """An agent that JAX cannot trace, which writes down how many trajectories it samples, and for what."""

    traceable = False

    def __init__(self, maximizer):
        self.inner, self.drawn = Quadratic(jnp.asarray(maximizer)), []

    def gradient(self, params, key, m):
        self.drawn.append(("step", m))
        return self.inner.gradient(params, key, m)

    def curvature(self, params, v, key, m):
        self.drawn.append(("curvature", m))
        return self.inner.curvature(params, v, key, m)

    def value(self, params, key, m):
        self.drawn.append(("value", m))
        return self.inner.value(params, key, m)

    @property
    def total(self):
        return sum(m for _, m in self.drawn)


@pytest.mark.parametrize("clusters", [1, 3])
@pytest.mark.parametrize("variant", INNER)
def test_a_round_samples_as_many_trajectories_as_it_says(variant, clusters):
    algorithm = Clustered(0.1, 0.3, clusters=clusters, variant=variant, m_choose=7, **SMALL)
    agent = Counting([1.0])
    algorithm.client(message_of(*[[0.0]] * clusters), NEW, agent, KEY)
    assert agent.total == algorithm.trajectories_per_round == algorithm.trajectories_after(1)
    choosing = {1: 0, 3: 3 * (7 + (0 if variant == "plain" else 3))}[clusters]
    assert algorithm.trajectories_per_round == INNER[variant].trajectories_per_round + choosing


@pytest.mark.parametrize(
    ("variant", "m", "drawn"),
    [
        ("plain", 0, []),
        ("plain", 3, [("step", 3)]),
        ("plain", 23, [("value", 5), ("value", 5), ("step", 13)]),
        ("first-order", 7, [("step", 7)]),
        ("first-order", 23, [("step", 2), ("value", 3)] * 2 + [("step", 13)]),
    ],
)
def test_at_deployment_at_most_half_of_the_trajectories_are_for_the_choice(variant, m, drawn):
    """With too few for each cluster, the last choice counts, and the members for an agent that never took part."""
    algorithm, agent = Clustered(0.1, 0.3, variant=variant, **SMALL), Counting([1.0])
    message = message_of([0.0], [0.8], members=[0.75, 0.25])
    deployed = algorithm.personalize(message, NEW, agent, KEY, m)
    assert agent.drawn == drawn
    assert algorithm.choosing_trajectories(m) == agent.total - (drawn[-1][1] if drawn else 0)
    start = 0.8 if len(drawn) > 1 else 0.0
    assert float(deployed[0]) == pytest.approx(start + 0.1 * (1 - start) * (m > 0))
    if len(drawn) < 2:
        own = algorithm.personalize(message, took_part(1), agent, KEY, m)
        assert float(own[0]) == pytest.approx(0.8 + 0.1 * 0.2 * (m > 0)), "its last choice"


@pytest.mark.parametrize("steps", [1, 3])
def test_steps_that_are_taken_one_by_one_choose_in_the_first(steps):
    """`assess` and `personalize` take them so; 23 trajectories each, five to try each of two clusters."""
    algorithm, agent = Clustered(0.1, 0.3, **SMALL), Counting([1.0])
    message = message_of([0.0], [0.8], members=[0.75, 0.25])
    end, recorded = choose_and_adapt(algorithm, agent, message, NEW, 0.1, KEY, 23, steps, lambda theta: theta)
    assert agent.drawn == [("value", 5), ("value", 5), ("step", 13)] + [("step", 23)] * (steps - 1)
    expected = [1 - 0.2 * 0.9 ** (i + 1) for i in range(steps)]
    np.testing.assert_allclose(recorded[:, 0], expected, atol=1e-6)
    np.testing.assert_array_equal(end, recorded[-1])


def test_before_adaptation_an_agent_has_its_last_choice_and_a_new_one_the_largest_cluster():
    algorithm, message = Clustered(1.0, 0.3, clusters=3), message_of([1.0], [2.0], [3.0], members=[0.2, 0.5, 0.3])
    starts = [algorithm.shared(algorithm.with_personal_part(message, state)) for state in (NEW, took_part(2))]
    assert [float(x[0]) for x in (algorithm.shared(message), *starts)] == [2.0, 2.0, 3.0]
    assert {k: float(x) for k, x in algorithm.diagnostics(took_part(2)).items()} == {
        "in cluster 0": 0.0,
        "in cluster 1": 0.0,
        "in cluster 2": 1.0,
    }
    assert not any(algorithm.diagnostics(NEW).values())


def test_agents_receive_all_clusters_and_send_one():
    """9 x 4 numbers of four bytes per initialization, and the members."""
    sizes = [Experiment(FLEET, POLICY, Clustered(1.0, 0.3, clusters=k)).bytes_per_round for k in (1, 2, 3)]
    assert sizes == [4 * ((k + 1) * 36 + 2 * k) for k in (1, 2, 3)]


@pytest.mark.slow
def test_two_goals_are_told_apart_from_sampled_trajectories():
    """In every one of six seeds two clusters serve two opposite corners better than one shared policy; error < 1e-3.

    A shared policy walks to one corner or the other: its mean return is at most half of the best one's, about 2.3.
    """
    fleet, policy = pf.gridworld(goals=[(0, 0), (4, 4)]), pf.TableSoftmax(25, 4)
    algorithm = Clustered(3.0, 3.0, m=10, m_choose=5)
    history = pf.simulate(fleet, policy, algorithm, rounds=20, seeds=6, every=20).history
    assert history.before[:, -1].min() > 4
    assert (history.outcomes["training.in cluster 0"][:, -1].sum(axis=-1) == 1).all(), "one of the two agents"


def test_client_sampling_needs_clusters_that_stay_when_nobody_is_drawn():
    with pytest.raises(pf.UserError, match="set reseed = false"):
        Clustered(1.0, 0.3).check_participation(4, 2, None)
    for kept in (Clustered(1.0, 0.3, reseed=False), Clustered(1.0, 0.3, clusters=1)):
        kept.check_participation(4, 2, None)
    Clustered(1.0, 0.3).check_participation(4, 4, None)
