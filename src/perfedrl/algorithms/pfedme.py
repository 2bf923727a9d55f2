"""pFedMe: federated maximization of the Moreau envelopes of the agents' returns, by policy gradients."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float, PRNGKeyArray

from perfedrl.algorithms.base import Algorithm, ServerState, average, local_steps, static
from perfedrl.algorithms.checks import check_counts, check_positive
from perfedrl.algorithms.proximal import ProximalState, check_proximal, following, looseness, near_step, start
from perfedrl.estimators import Objective, StepKeys
from perfedrl.estimators.meta import iterate, step_keys
from perfedrl.types import Array, Params, Scalar


class ProximalCarry(NamedTuple):
    """The carry of a round: the agent's copy of the shared parameters, and its personal policy."""

    w: Params
    near: ProximalState


class PFedMe(Algorithm):
    """Maximize the mean over agents of max_theta J_i(theta) - weight/2 |theta - w|^2 over w (Dinh et al. 2020).

    A local step approximates agent i's maximizer theta_i by `proximal_steps` steps of size alpha from m trajectories
    each, then moves w_i by beta weight (theta_i - w_i). The server moves w by `server_mix` towards the mean of the w_i.
    theta_i stays with the agent, which deploys it.

    At weight 0, w stays where it is and theta_i is LocalPG's with beta = alpha; at weight = inf, with one proximal
    step, w is FedAvgPG's, and so is theta_i: both trajectory for trajectory.
    """

    alpha: float
    beta: float
    weight: float = 1.0
    server_mix: float = 1.0
    proximal_steps: int = static(1)
    local_steps: int = static(5)
    m: int = static(30)

    def __check_init__(self) -> None:
        check_proximal(self.alpha, self.beta, self.weight)
        check_positive(server_mix=self.server_mix)
        check_counts(proximal_steps=self.proximal_steps, local_steps=self.local_steps, m=self.m)

    @property
    def trajectories_per_round(self) -> int:
        return self.local_steps * self.proximal_steps * self.m

    def init(self, params: Params) -> tuple[ServerState, ProximalState]:
        return start(params)

    def client(
        self, message: Params, state: ProximalState, agent: Objective, key: PRNGKeyArray
    ) -> tuple[Params, ProximalState]:
        """Take local steps of w_i, each after proximal steps of theta_i, which continues from its last round."""
        near = ProximalState(following(state, message, self._s), message, jnp.ones_like(state.trained))
        end = local_steps(partial(self.step, agent), ProximalCarry(message, near), agent, key, self.local_steps)
        return end.w, end.near

    def step(self, agent: Objective, going: ProximalCarry, keys: StepKeys) -> ProximalCarry:
        """Take one local step: proximal steps of the agent's policy around w_i, then w_i towards it."""
        theta = following(going.near, going.w, self._s)
        theta, pull = self._nearest(agent, theta, going.w, keys.outer, self.m, self.proximal_steps)
        w = optax.tree.add_scale(going.w, self.beta, pull)
        return ProximalCarry(w, ProximalState(theta, going.w, going.near.trained))

    def server(self, state: ServerState, uploads: Params, weights: Float[Array, " n"]) -> ServerState:
        """Compute (1 - server_mix) w + server_mix times the mean of the w_i."""

        def mix(w: Array, mean: Array) -> Array:
            return (1 - self.server_mix) * w + self.server_mix * mean

        return ServerState(jax.tree.map(mix, state.message, average(uploads, weights)))

    def shared(self, message: Params) -> Params:
        return message

    def personalize(self, message: Params, state: ProximalState, agent: Objective, key: PRNGKeyArray, m: int) -> Params:
        """Return the agent's policy; one that never took part takes proximal steps from w with the m trajectories."""
        learned = following(state, message, self._s)
        if m == 0:
            return learned
        steps = max(1, min(self.proximal_steps, m))
        new, _ = self._nearest(agent, message, message, key, m // steps, steps)
        return jax.tree.map(lambda own, new: jnp.where(state.trained > 0, own, new), learned, new)

    @property
    def _s(self) -> Scalar:
        return looseness(self.alpha, self.weight)

    def _nearest(
        self, agent: Objective, theta: Params, w: Params, key: PRNGKeyArray, m: int, steps: int
    ) -> tuple[Params, Params]:
        """Take proximal steps from theta around w; also return the pull of the last step on w."""

        def step(carry: tuple[Params, Params], key: PRNGKeyArray) -> tuple[tuple[Params, Params], tuple[()]]:
            g = agent.gradient(carry[0], key, m)
            return near_step(carry[0], w, g, self.alpha, self._s), ()

        return iterate(agent, step, (theta, theta), step_keys(key, steps))[0]
