"""Per-FedAvg-PG, Algorithm 1 of the paper: local meta-policy-gradient steps, then averaging."""

from functools import partial
from typing import Any, Literal

import equinox as eqx
import optax
from jaxtyping import Float, PRNGKeyArray

from perfedrl.algorithms.base import ServerState, average, check_counts, check_step_sizes, local_steps
from perfedrl.errors import UserError
from perfedrl.estimators import Objective, StepKeys, adapt, first_order_gradient, meta_gradient
from perfedrl.types import Array, Params


class PerFedAvgPG(eqx.Module):
    """Learn an initialization that is good after one policy-gradient step, in both variants of the paper.

    `variant = "exact"` estimates the curvature from m_h trajectories (eq. 7); `"first-order"` drops it (Section 5) and
    spends none.
    """

    alpha: Any
    beta: Any
    local_steps: int = eqx.field(static=True)
    m_in: int = eqx.field(static=True)
    m_h: int = eqx.field(static=True)
    m_out: int = eqx.field(static=True)
    variant: str = eqx.field(static=True)

    def __init__(
        self,
        alpha: float,
        beta: float,
        local_steps: int = 5,
        m_in: int = 10,
        m_h: int = 10,
        m_out: int = 10,
        variant: Literal["exact", "first-order"] = "exact",
    ):
        if variant not in ("exact", "first-order"):
            raise UserError(f"the variant must be 'exact' or 'first-order'; it is {variant!r}")
        check_step_sizes(alpha, beta)
        check_counts(local_steps=local_steps, m_in=m_in, m_out=m_out, **({"m_h": m_h} if variant == "exact" else {}))
        self.alpha, self.beta = alpha, beta
        self.local_steps, self.m_in, self.m_h, self.m_out = local_steps, m_in, m_h, m_out
        self.variant = variant

    @property
    def trajectories_per_round(self) -> int:
        curvature = self.m_h if self.variant == "exact" else 0
        return self.local_steps * (self.m_in + curvature + self.m_out)

    def init(self, params: Params) -> tuple[ServerState, tuple[()]]:
        return ServerState(params), ()

    def client(
        self, message: Params, state: tuple[()], agent: Objective, key: PRNGKeyArray
    ) -> tuple[Params, tuple[()]]:
        """Tau local ascent steps along the estimated meta-gradient, lines 4-8."""
        return local_steps(partial(self.step, agent), message, agent, key, self.local_steps), state

    def step(self, agent: Objective, theta: Params, keys: StepKeys) -> Params:
        """One local ascent step, line 6."""
        if self.variant == "first-order":
            direction = first_order_gradient(agent, theta, self.alpha, keys, self.m_in, self.m_out)
        else:
            direction = meta_gradient(agent, theta, self.alpha, keys, self.m_in, self.m_h, self.m_out)
        return optax.tree.add_scale(theta, self.beta, direction)

    def server(self, state: ServerState, uploads: Params, weights: Float[Array, " n"]) -> ServerState:
        """theta^{k+1}, the mean of the agents' parameters, line 10."""
        return ServerState(average(uploads, weights))

    def shared(self, message: Params) -> Params:
        return message

    def personalize(self, message: Params, state: tuple[()], agent: Objective, key: PRNGKeyArray, m: int) -> Params:
        """theta^K + alpha g_in, line 12."""
        return adapt(agent, message, self.alpha, key, m)
