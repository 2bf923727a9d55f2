"""Options of Per-FedAvg-PG's local steps: optimizers, where their state is, and falling rates."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiers import some_slow

import perfedrl as pf
from perfedrl.algorithms import ControlVariate, PerFedAvgPG
from perfedrl.algorithms.annealing import LAST_SHARE
from perfedrl.algorithms.local_optimizer import LearnerMessage
from perfedrl.algorithms.per_fedavg_pg import LearnedMessage, OptimizedState
from perfedrl.experiments.config import make_config
from perfedrl.theory.fleet_problem import settings

GRID, TABLE = pf.gridworld(width=3, horizon=5), pf.TableSoftmax(9, 4)
ALPHA, BETA, KEY = 0.25, 0.1, jax.random.key(0)


class Bowl(eqx.Module):
    """J(theta) = -|theta - top|^2 / 2, without noise."""

    top: float
    traceable: bool = eqx.field(static=True, default=True)

    def gradient(self, params, key, m):
        return self.top - params

    def curvature(self, params, v, key, m):
        return -v

    def value(self, params, key, m):
        return -jnp.sum((params - self.top) ** 2) / 2


def direction(theta, top):
    """The meta-gradient of a bowl by hand: (1 - alpha) times the gradient at the adapted parameters."""
    return (1 - ALPHA) * (top - (theta + ALPHA * (top - theta)))


def algorithm(**options):
    return PerFedAvgPG(ALPHA, BETA, local_steps=2, m_in=1, m_h=1, m_out=1, **options)


def rounds(made, tops, count):
    """The server's messages and the agents' states, round by round, from theta = 0."""
    server, state = made.init(jnp.zeros(3))
    states = [state] * len(tops)
    messages, seen = [server.message], [states]
    for _ in range(count):
        work = [made.client(server.message, s, Bowl(top), KEY) for s, top in zip(states, tops, strict=True)]
        uploads = jax.tree.map(lambda *xs: jnp.stack(xs), *[upload for upload, _ in work])
        server, states = made.server(server, uploads, jnp.ones(len(tops))), [s for _, s in work]
        messages.append(server.message)
        seen.append(states)
    return messages, seen


def by_hand(optimizer, theta, state, top):
    """Two local steps of optax's own."""
    for _ in range(2):
        change, state = optimizer.update(-direction(theta, top), state, theta)
        theta = optax.apply_updates(theta, change)
    return theta, state


LEARNED = {"variant": "first-order", "learn_alpha": "scalar"}


@pytest.mark.parametrize("options", some_slow([{}, LEARNED], [LEARNED]))
def test_steps_of_sgd_are_the_plain_steps_bit_for_bit(options):
    ends = []
    for optimizer in ({}, {"optimizer": "sgd"}):
        made = PerFedAvgPG(1.0, 0.3, local_steps=2, m_in=3, m_h=3, m_out=3, **options, **optimizer)
        assert not made.uploads_auxiliaries
        run = pf.simulate(GRID, TABLE, made, rounds=2, seeds=1, every=2, baseline="leave-one-out")
        ends.append(run)
    assert np.abs(ends[0].params).max() > 0.01
    np.testing.assert_array_equal(ends[0].params, ends[1].params)
    np.testing.assert_array_equal(ends[0].history.after, ends[1].history.after)
    assert ends[0].history.bytes.tolist() == ends[1].history.bytes.tolist()


@pytest.mark.parametrize("where", ["averaged", "personal", "reset"])
def test_steps_of_adam_are_optaxs_from_a_state_that_is_averaged_kept_or_forgotten(where):
    """Two rounds of two agents, written out with optax."""
    made, tops, adam = algorithm(optimizer="adam", optimizer_state=where), (1.0, -2.0), optax.adam(BETA)
    messages, _ = rounds(made, tops, 2)
    theta, first = jnp.zeros(3), adam.init(jnp.zeros(3))
    starts = [first, first]
    for _ in range(2):
        ends = [by_hand(adam, theta, start, top) for start, top in zip(starts, tops, strict=True)]
        theta = (ends[0][0] + ends[1][0]) / 2
        mean = jax.tree.map(
            lambda a, b: (a + b) / 2 if jnp.issubdtype(a.dtype, jnp.floating) else a, *[e[1] for e in ends]
        )
        starts = {"averaged": [mean, mean], "personal": [e[1] for e in ends], "reset": [first, first]}[where]
    np.testing.assert_allclose(made.shared(messages[-1]), theta, rtol=1e-5, atol=1e-7)


def test_a_message_has_no_more_parts_than_the_options_need():
    start = jnp.zeros(3)

    def parts(**options):
        server, state = algorithm(variant="first-order", **options).init(start)
        return server.message, state

    assert all(isinstance(x, jax.Array) for x in (parts()[0], parts(optimizer="adam", optimizer_state="reset")[0]))
    assert parts()[1] == ()
    assert parts(optimizer="adam", optimizer_state="reset")[1] == OptimizedState((), ())
    message, state = parts(optimizer="adam", optimizer_state="personal")
    assert isinstance(message, jax.Array)
    assert len(jax.tree.leaves(state.moments)) == 3
    message, state = parts(optimizer="adam", anneal=3, learn_alpha="scalar")
    assert isinstance(message, LearnerMessage)
    assert isinstance(message.learned, LearnedMessage)
    assert len(jax.tree.leaves(message.moments)) == 3
    assert float(message.round) == 0
    assert jax.tree.leaves(state) == []
    message, _ = parts(anneal=3)
    assert jax.tree.leaves(message.moments) == []


def test_the_rate_of_plain_steps_is_annealed():
    messages, _ = rounds(algorithm(anneal=2), (1.0,), 4)
    theta = 0.0
    for message, share in zip(messages[1:], (1, (1 + LAST_SHARE) / 2, LAST_SHARE, LAST_SHARE), strict=True):
        for _ in range(2):
            theta = theta + BETA * share * direction(theta, 1.0)
        np.testing.assert_allclose(message.learned, theta, rtol=1e-5)
    assert float(messages[-1].round) == 4


def test_agents_that_cannot_be_traced_take_the_same_steps():
    made = algorithm(optimizer="adam", anneal=3)
    message, state = made.init(jnp.zeros(3))[0].message, made.init(jnp.zeros(3))[1]
    compiled, looped = (made.client(message, state, Bowl(1.0, traceable), KEY)[0] for traceable in (True, False))
    assert jax.tree.structure(compiled) == jax.tree.structure(looped)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), compiled, looped)
    assert float(looped.moments[0].count) == 2


def test_the_learned_step_size_is_used_at_deployment_beside_an_optimizers_moments():
    made = algorithm(optimizer="adam", learn_alpha="scalar")
    message = made.init(jnp.zeros(3))[0].message
    message = message._replace(learned=LearnedMessage(jnp.zeros(3), jnp.log(2.0)))
    assert float(made.deployment_step_size(message)) == pytest.approx(2 * ALPHA)
    np.testing.assert_allclose(made.personalize(message, (), Bowl(1.0), KEY, 1), 2 * ALPHA, rtol=1e-6)


def test_what_counts_on_plain_steps_says_so():
    made = algorithm(optimizer="adam", optimizer_state="reset")
    with pytest.raises(pf.UserError, match=r"no plain local steps .* mode = 'round'"):
        ControlVariate(made, "step", 2)
    with pytest.raises(pf.UserError, match="leave out optimizer and anneal"):
        settings(made)
    ControlVariate(made, "round", GRID.agents).check_supports(GRID, TABLE)
    with pytest.raises(pf.UserError, match="holds more than these"):
        ControlVariate(algorithm(anneal=3), "round", GRID.agents).check_supports(GRID, TABLE)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer": "adma"}, "there is no optimizer 'adma'; did you mean .*'adam'"),
        ({"optimizer_settings": {"b1": 0.5}}, "need an optimizer"),
        ({"optimizer_state": "reset", "anneal": 3}, "need an optimizer"),
        ({"anneal": 0}, "anneal must be at least 1"),
        ({"schedule": "cosine"}, "schedule = 'cosine' needs anneal"),
        ({"anneal": 3, "schedule": "steps"}, "should be 'linear' or 'cosine'"),
    ],
)
def test_bad_settings_are_one_sentence_before_compiling(options, said, untyped):
    parts = {"fleet": {"env": "gridworld", "width": 3, "horizon": 5}, "policy": {"name": "table"}}
    table = {"name": "per-fedavg-pg", "alpha": 1.0, "beta": 0.3, **options}
    with pytest.raises(pf.UserError, match=said):
        _ = make_config({"name": "tried", "seeds": 1, "rounds": 1, "algorithm": table, **parts}).experiment
