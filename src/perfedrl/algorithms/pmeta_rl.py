"""pMeta-RL: a personal policy for every agent near a meta-policy that all of them move."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PRNGKeyArray

from perfedrl.algorithms.base import AveragedParameters, ServerState, local_steps, static
from perfedrl.algorithms.checks import check_counts
from perfedrl.algorithms.proximal import ProximalState, check_proximal, following, looseness, near_step, start
from perfedrl.estimators import Objective, StepKeys
from perfedrl.estimators.meta import iterate, step_keys
from perfedrl.types import Params, Scalar


class MetaPolicyCarry(NamedTuple):
    """The carry of a round: the agent's policy, and the sum of its steps' pulls on the meta-policy."""

    theta: Params
    pull: Params


class PMetaRL(AveragedParameters):
    """Alternate between personal policies near a meta-policy w and w itself, which stays fixed during a round.

    In a round agent i takes `local_steps` steps of size alpha from m trajectories each on J_i(theta) - weight/2 |theta
    - w|^2, from its theta_i of the last round. It sends w + beta times the mean over these steps of weight (theta_i -
    w). The server averages.

    At weight 0, w stays where it is and theta_i is LocalPG's with beta = alpha, trajectory for trajectory. At weight =
    inf, theta_i is w, and w moves as FedAvgPG's with one local step from all of a round's trajectories.
    """

    alpha: float
    beta: float
    weight: float = 1.0
    local_steps: int = static(5)
    m: int = static(30)

    def __check_init__(self) -> None:
        check_proximal(self.alpha, self.beta, self.weight)
        check_counts(local_steps=self.local_steps, m=self.m)

    @property
    def trajectories_per_round(self) -> int:
        return self.local_steps * self.m

    def init(self, params: Params) -> tuple[ServerState, ProximalState]:
        return start(params)

    def client(
        self, message: Params, state: ProximalState, agent: Objective, key: PRNGKeyArray
    ) -> tuple[Params, ProximalState]:
        """Take proximal steps of the agent's policy, and one step of the meta-policy."""
        first = self._begin(following(state, message, self._s))

        def step(going: MetaPolicyCarry, keys: StepKeys) -> MetaPolicyCarry:
            return self.step(agent, message, self.m, going, keys.outer)

        end = local_steps(step, first, agent, key, self.local_steps)
        meta = optax.tree.add_scale(message, self.beta / self.local_steps, end.pull)
        return meta, ProximalState(end.theta, message, jnp.ones_like(state.trained))

    def step(self, agent: Objective, w: Params, m: int, going: MetaPolicyCarry, key: PRNGKeyArray) -> MetaPolicyCarry:
        """Take one proximal step of the agent's policy."""
        g = agent.gradient(going.theta, key, m)
        theta, pull = near_step(going.theta, w, g, self.alpha, self._s)
        return MetaPolicyCarry(theta, optax.tree.add(going.pull, pull))

    def personalize(self, message: Params, state: ProximalState, agent: Objective, key: PRNGKeyArray, m: int) -> Params:
        """Return the agent's policy; one that never took part takes a round's steps from w with the m trajectories."""
        learned = following(state, message, self._s)
        if m == 0:
            return learned
        steps = max(1, min(self.local_steps, m))

        def step(going: MetaPolicyCarry, key: PRNGKeyArray) -> tuple[MetaPolicyCarry, tuple[()]]:
            return self.step(agent, message, m // steps, going, key), ()

        new = iterate(agent, step, self._begin(message), step_keys(key, steps))[0].theta
        return jax.tree.map(lambda own, new: jnp.where(state.trained > 0, own, new), learned, new)

    @property
    def _s(self) -> Scalar:
        return looseness(self.alpha, self.weight)

    def _begin(self, theta: Params) -> MetaPolicyCarry:
        return MetaPolicyCarry(theta, jax.tree.map(jnp.zeros_like, theta))
