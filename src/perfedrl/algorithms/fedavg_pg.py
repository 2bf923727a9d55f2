"""FedAvg-PG: federated policy gradient for one shared policy, the paper's non-personalized baseline."""

from jaxtyping import PRNGKeyArray

from perfedrl.algorithms.local_ascent import LocalAscent
from perfedrl.estimators import Objective, adapt
from perfedrl.types import Params


class FedAvgPG(LocalAscent):
    """Local policy-gradient steps on each agent's own return, then averaging.

    Each step uses one estimate from m trajectories: m = m_in + m_h + m_out gives it the budget of exact Per-FedAvg-PG.
    Training ignores alpha: it is the step size of the adaptation before an evaluation, as for the other algorithms.
    """

    def personalize(self, message: Params, state: tuple[()], agent: Objective, key: PRNGKeyArray, m: int) -> Params:
        return adapt(agent, message, self.alpha, key, m)
