"""Neural policies: the simulator equals an independent NumPy implementation with the same uniforms, up to rounding."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from simulations import simulation_of
from tiers import some_slow

import perfedrl as pf
from perfedrl.estimators import PAPER, Sampled, StepKeys
from perfedrl.rollout import noise_size
from perfedrl.simulation.keys import agent_key

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import numpy_navigation as peer

FLEET = pf.arc(goals=3, held_out=0)
POLICY = pf.MLPSoftmax((2, 5, 8))


def net(params) -> peer.Net:
    first, second = params
    return peer.Net(*(np.asarray(x, float) for x in (first["weight"], first["bias"], second["weight"], second["bias"])))


@pytest.mark.parametrize(
    ("variant", "m_h"), some_slow([("exact", 6), ("exact", 230), ("first-order", 0)], [("exact", 6)])
)
def test_the_simulator_equals_numpy_given_the_same_uniforms(variant, m_h, x64):
    """A curvature batch of 230 is processed in slices, the last of which is smaller."""
    seed, how = 3, {"alpha": 0.7, "beta": 0.4, "m_in": 5, "m_h": m_h, "m_out": 4}
    algorithm = pf.PerFedAvgPG(local_steps=2, variant=variant, **how)

    def uniforms(k, i, t, batch, m):
        keys = jax.random.split(jax.random.fold_in(agent_key(seed, i), k), (2, 3))
        key = getattr(StepKeys(*keys[t]), batch)
        return np.asarray(jax.random.uniform(key, (m, noise_size(POLICY, FLEET.task(i)))))

    simulation = simulation_of(FLEET, POLICY, [algorithm], [seed], Sampled(POLICY, **PAPER))
    start = simulation.start()
    first = jax.tree.map(lambda x: x[0], start.server.message)
    expected = peer.train(net(first), list(FLEET.train.goal), uniforms, rounds=2, local_steps=2, **how)
    came = net(jax.tree.map(lambda x: x[0], simulation.advance(start, 0, 2).server.message))
    assert max(np.abs(a - b).max() for a, b in zip(came, net(first), strict=True)) > 0.01
    for a, b in zip(came, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)
