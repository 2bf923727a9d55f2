"""Corollary 1 as a planner: what to set, which condition binds, and what it costs."""

from dataclasses import dataclass
from math import ceil, inf, sqrt
from typing import Literal

from perfedrl.errors import UserError
from perfedrl.theory import bounds
from perfedrl.theory.bounds import Bound, Variant, accuracy
from perfedrl.theory.worst_case import Constants

Bias = Literal["crude", "sharp", "best"]
"""Which bound on the bias a plan relies on: Lemma 3(ii), Prop. 1, or whichever is smaller."""

SLACK = 1e-9
"""Conditions that are met with equality may miss it by rounding."""

ROUNDING = 1e-12
"""What a count may exceed a whole number by and still be that number."""

BYTES = 4
"""A parameter crosses the link as float32."""


@dataclass(frozen=True)
class Problem:
    """What a plan is for: the fleet's constants, its size, and how far F is from its supremum at the start."""

    constants: Constants
    agents: int
    parameters: int
    gap: float
    variant: Variant = "exact"

    def bias(self, m_in: float, kind: Bias) -> float:
        crude, sharp = (f(self.constants, m_in, self.variant) for f in (bounds.bias, bounds.sharp_bias))
        return {"crude": crude, "sharp": sharp, "best": min(crude, sharp)}[kind]

    def second_moment(self, m_in: float, m_h: float, m_out: float) -> float:
        return bounds.second_moment(self.constants, m_in, m_h, m_out, self.variant)

    def guarantee(
        self, rounds: int, tau: int, beta: float, m_in: int, m_h: int, m_out: int, bias: Bias = "best"
    ) -> Bound:
        """Theorem 1 for a run with these settings; refused where beta is too large for the theorem."""
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
        """The share of the limit that is used: at most 1 where the condition holds, 1 where it binds."""
        if self.value == 0:
            return 0.0
        return self.value / self.limit if self.limit > 0 else inf

    @property
    def margin(self) -> float:
        return 1 - self.used

    @property
    def holds(self) -> bool:
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
        """(i) to (iv), and the number of rounds: each leaves its term of Theorem 1 a quarter of epsilon at most."""
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
        """Which of the four conditions leave no room, but for a per cent that whole numbers may leave."""
        return [condition.name for condition in self.conditions[:4] if condition.used > 0.99]

    @property
    def bound(self) -> Bound:
        """Theorem 1 for this plan, term by term: epsilon at most."""
        p = self.problem
        return p.guarantee(self.K, self.tau, self.beta, self.m_in, self.m_h, self.m_out, self.bias)

    @property
    def trajectories(self) -> int:
        """Per agent."""
        return self.K * self.tau * (self.m_in + self.m_h + self.m_out)

    @property
    def steps(self) -> int:
        """Of each agent's environment."""
        return self.trajectories * (self.problem.constants.H + 1)

    @property
    def bytes(self) -> int:
        """Sent and received by each agent: its parameters, down and up, every round."""
        return 2 * BYTES * self.problem.parameters * self.K


def corollary_1(problem: Problem, epsilon: float, bias: Bias = "crude") -> Plan:
    """The paper's own choice: tau = ceil(epsilon^-1/2), beta as large as the drift allows, and m_in from the bias.

    The other batches, which the paper keeps constant, are one trajectory each.
    Where the noise or the ceiling allows less, beta is lowered to what they allow (proof of Corollary 1, step 4).
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
    """The smallest m_in that meets condition (iii), or (iii*) under the sharp bias."""
    c = problem.constants
    if c.alpha == 0:
        return 0  # nothing is adapted, so there is no bias and nothing to draw
    allowed = sqrt(epsilon / 18)
    floor = 0.0 if problem.variant == "exact" else bounds.residual(c)
    if floor >= allowed:
        raise UserError(
            f"condition (iii) fails for every m_in: the first-order variant's bias does not fall below alpha L_J G_J = "
            f"{floor:.4g}, {floor / allowed:.3g} times what epsilon = {epsilon:g} allows; it needs alpha < "
            f"{c.alpha * allowed / floor:.4g}"
        )
    one = problem.bias(1, "crude") - floor, problem.bias(1, "sharp") - floor
    crude, sharp = (one[0] / (allowed - floor)) ** 2, one[1] / (allowed - floor)
    return max(1, ceil({"crude": crude, "sharp": sharp, "best": min(crude, sharp)}[bias] * (1 - ROUNDING)))


def reach(problem: Problem, epsilon: float) -> float:
    """The largest beta tau that condition (ii) allows, for tau > 1; a single step drifts nowhere."""
    c = problem.constants
    return sqrt(epsilon / 6) / (c.L_F * c.G_F)


def noise_limit(problem: Problem, epsilon: float, second_moment: float) -> float:
    """The largest beta that condition (iv) allows."""
    if second_moment == 0:
        return inf
    return problem.agents * epsilon / (4 * problem.constants.L_F * second_moment)


def rounds(problem: Problem, epsilon: float, progress: float) -> float:
    """The rounds that a progress beta tau per round needs, 8 Delta / (beta tau epsilon)."""
    return 8 * problem.gap / (progress * epsilon)


def whole_rounds(problem: Problem, epsilon: float, progress: float) -> int:
    return max(1, ceil(rounds(problem, epsilon, progress) * (1 - ROUNDING)))
