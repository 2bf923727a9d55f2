"""A fleet of 3 x 3 gridworlds, its policy, one of its agents, and a server that records uploads."""

import jax.numpy as jnp

import perfedrl as pf
from perfedrl.algorithms import ServerState, Wrapper
from perfedrl.estimators import Sampled

FLEET, POLICY = pf.gridworld(width=3, horizon=5), pf.TableSoftmax(9, 4)


def agent(i, policy=POLICY):
    """The i-th agent of the fleet, with the default estimators."""
    return Sampled(policy)(FLEET.task(i))


class Keeping(Wrapper):
    """An algorithm whose server keeps the last round's uploads."""

    def init(self, params):
        _, client = self.inner.init(params)
        return ServerState(params, jnp.zeros((FLEET.agents, 9, 4))), client

    def server(self, state, uploads, weights):
        return ServerState(self.inner.server(state, uploads, weights).message, uploads)
