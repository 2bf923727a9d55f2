"""Planning with Corollary 1: settings that reach an accuracy, their binding conditions, and their cost."""

from dataclasses import dataclass
from math import ceil, inf, sqrt
from typing import Literal

from perfedrl.errors import UserError
from perfedrl.theory import bounds
from perfedrl.theory.bounds import Bound, Variant, accuracy
from perfedrl.theory.worst_case import Constants

Bias = Literal["crude", "sharp", "best"]
"""Bound on the bias that a plan uses: Lemma 3(ii), Prop. 1, or the smaller of both."""

SLACK = 1e-9
"""Relative tolerance for conditions that hold with equality up to rounding."""

ROUNDING = 1e-12
"""Relative tolerance before a count is rounded up to the next whole number."""

BYTES = 4
"""Bytes per transmitted parameter (float32)."""


@dataclass(frozen=True)
class Problem:
    """Input of the planner: constants and size of the fleet, and `gap`, the distance of F(theta^0) from sup F."""

    constants: Constants
    agents: int
    parameters: int
    gap: float
    variant: Variant = "exact"

    def bias(self, m_in: float, kind: Bias) -> float:
        """Bound on the bias of the estimate for an inner batch of m_in."""
        crude, sharp = (f(self.constants, m_in, self.variant) for f in (bounds.bias, bounds.sharp_bias))
        return {"crude": crude, "sharp": sharp, "best": min(crude, sharp)}[kind]

    def second_moment(self, m_in: float, m_h: float, m_out: float) -> float:
        """Bound on the mean squared error of the estimate for these batch sizes."""
        return bounds.second_moment(self.constants, m_in, m_h, m_out, self.variant)

    def guarantee(
        self, rounds: int, tau: int, beta: float, m_in: int, m_h: int, m_out: int, bias: Bias = "best"
    ) -> Bound:
        """Evaluate Theorem 1 for these settings; raises `UserError` if beta is too large for the theorem."""
        return bounds.convergence(
            self.constants,
            rounds=rounds,
            tau=tau,
            beta=beta,
            n=self.agents,
            gap=self.gap,
            bias=self.bias(m_in, bias),
            second_moment=self.second_moment(m_in, m_h, m_out),
        )


@dataclass(frozen=True)
class Condition:
    """A condition of Corollary 1, written as value <= limit."""

    name: str
    what: str
    value: float
    limit: float

    @property
    def used(self) -> float:
        """Ratio of value to limit: at most 1 if the condition holds, 1 if it binds."""
        if self.value == 0:
            return 0.0
        return self.value / self.limit if self.limit > 0 else inf

    @property
    def margin(self) -> float:
        """Share of the limit that is not used."""
        return 1 - self.used

    @property
    def holds(self) -> bool:
        """Whether value <= limit up to rounding."""
        return self.used <= 1 + SLACK


@dataclass(frozen=True)
class Plan:
    """Settings for which Corollary 1 guarantees a mean squared meta-gradient of at most epsilon."""

    problem: Problem
    epsilon: float
    bias: Bias
    K: int
    tau: int
    beta: float
    m_in: int
    m_h: int
    m_out: int

    @property
    def conditions(self) -> list[Condition]:
        """Conditions (i) to (iv) and the number of rounds; each keeps its term of Theorem 1 below epsilon / 4."""
        p, quarter = self.problem, self.epsilon / 4
        noise = p.second_moment(self.m_in, self.m_h, self.m_out)
        return [
            Condition("(i) ceiling", "beta", self.beta, bounds.ceiling(p.constants)),
            Condition("(ii) drift", "beta tau", self.beta * self.tau if self.tau > 1 else 0.0, reach(p, self.epsilon)),
            Condition("(iii) bias", "9/2 b^2", 9 / 2 * p.bias(self.m_in, self.bias) ** 2, quarter),
            Condition("(iv) variance", "beta", self.beta, noise_limit(p, self.epsilon, noise)),
            Condition("rounds", "8 Delta / (beta tau epsilon)", rounds(p, self.epsilon, self.beta * self.tau), self.K),
        ]

    @property
    def binding(self) -> list[str]:
        """Names of the conditions (i) to (iv) that bind, up to one per cent for rounding to whole numbers."""
        return [condition.name for condition in self.conditions[:4] if condition.used > 0.99]

    @property
    def bound(self) -> Bound:
        """Terms of Theorem 1 for this plan, whose total is at most epsilon."""
        p = self.problem
        return p.guarantee(self.K, self.tau, self.beta, self.m_in, self.m_h, self.m_out, self.bias)

    @property
    def trajectories(self) -> int:
        """Number of trajectories per agent."""
        return self.K * self.tau * (self.m_in + self.m_h + self.m_out)

    @property
    def steps(self) -> int:
        """Number of environment steps per agent."""
        return self.trajectories * (self.problem.constants.H + 1)

    @property
    def bytes(self) -> int:
        """Bytes that each agent sends and receives: its parameters in both directions, every round."""
        return 2 * BYTES * self.problem.parameters * self.K


def corollary_1(problem: Problem, epsilon: float, bias: Bias = "crude") -> Plan:
    """Build the paper's plan: tau = ceil(epsilon^-1/2), beta from the drift condition, m_in from the bias condition.

    The other batches, which the paper keeps constant, have one trajectory each. Beta is lowered if the noise condition
    or the ceiling requires it (proof of Corollary 1, step 4).
    """
    epsilon = accuracy(epsilon)
    m_in = inner_batch(problem, epsilon, bias)
    m_h, m_out = (1 if bounds.moment(problem.constants, problem.variant).m_h else 0), 1
    tau = ceil(epsilon**-0.5)
    noise = problem.second_moment(m_in, m_h, m_out)
    drift = reach(problem, epsilon) / tau if tau > 1 else inf
    beta = min(bounds.ceiling(problem.constants), drift, noise_limit(problem, epsilon, noise))
    K = whole_rounds(problem, epsilon, beta * tau)
    return Plan(problem, epsilon, bias, K, tau, beta, m_in, m_h, m_out)


def inner_batch(problem: Problem, epsilon: float, bias: Bias) -> int:
    """Compute the smallest m_in that meets condition (iii), or (iii*) with the sharp bias."""
    c = problem.constants
    if c.alpha == 0:
        return 0  # without adaptation there is no bias and no inner batch
    allowed = sqrt(epsilon / 18)
    residual = 0.0 if problem.variant == "exact" else bounds.residual(c)
    if residual >= allowed:
        raise UserError(
            f"condition (iii) fails for every m_in: the first-order variant's bias does not fall below alpha L_J G_J = "
            f"{residual:.4g}, {residual / allowed:.3g} times what epsilon = {epsilon:g} allows; it needs alpha < "
            f"{c.alpha * allowed / residual:.4g}"
        )
    one = problem.bias(1, "crude") - residual, problem.bias(1, "sharp") - residual
    crude, sharp = (one[0] / (allowed - residual)) ** 2, one[1] / (allowed - residual)
    return max(1, ceil({"crude": crude, "sharp": sharp, "best": min(crude, sharp)}[bias] * (1 - ROUNDING)))


def reach(problem: Problem, epsilon: float) -> float:
    """Largest beta tau allowed by condition (ii), which applies for tau > 1 only."""
    c = problem.constants
    return sqrt(epsilon / 6) / (c.L_F * c.G_F)


def noise_limit(problem: Problem, epsilon: float, second_moment: float) -> float:
    """Largest beta allowed by condition (iv)."""
    if second_moment == 0:
        return inf
    return problem.agents * epsilon / (4 * problem.constants.L_F * second_moment)


def rounds(problem: Problem, epsilon: float, progress: float) -> float:
    """Number of rounds 8 Delta / (beta tau epsilon) that a progress of beta tau per round needs."""
    return 8 * problem.gap / (progress * epsilon)


def whole_rounds(problem: Problem, epsilon: float, progress: float) -> int:
    """Number of rounds, rounded up."""
    return max(1, ceil(rounds(problem, epsilon, progress) * (1 - ROUNDING)))
