"""Reptile: local policy-gradient steps, and a server that moves a part of the way to their mean."""

import jax
from jaxtyping import Float, PRNGKeyArray

from perfedrl.algorithms.base import ServerState, average, static
from perfedrl.algorithms.checks import check_counts, check_positive
from perfedrl.algorithms.fine_tuned import fine_tune
from perfedrl.algorithms.local_ascent import LocalAscent
from perfedrl.estimators import Objective
from perfedrl.types import Array, Params


class Reptile(LocalAscent):
    """Learn an initialization for a few local steps without second derivatives.

    Agents work as in FedAvg-PG; the server moves theta to theta + `server_step` (mean_i theta_i - theta). With more
    local steps, more of the mean displacement is due to the curvature that an adaptation step meets. At deployment
    `adaptation_steps` steps of size alpha share the agent's trajectories.
    """

    server_step: float = 0.5
    adaptation_steps: int = static(1)

    def __check_init__(self) -> None:
        check_positive(server_step=self.server_step)
        check_counts(adaptation_steps=self.adaptation_steps)

    @property
    def personalization_steps(self) -> int:
        return self.adaptation_steps

    def server(self, state: ServerState, uploads: Params, weights: Float[Array, " n"]) -> ServerState:
        # A mean of the two, not a displacement, so that server_step = 1 is bitwise FedAvg-PG.
        s = self.server_step
        nearer = jax.tree.map(lambda x, y: (1 - s) * x + s * y, state.message, average(uploads, weights))
        return ServerState(nearer)

    def personalize(self, message: Params, state: tuple[()], agent: Objective, key: PRNGKeyArray, m: int) -> Params:
        return fine_tune(agent, message, self.alpha, key, m, self.adaptation_steps)
