"""The paper's bounds as functions of the constants: Lemmas 3-5, Theorem 1, Corollary 2, Remarks 1-2, Props. 1-3."""

from dataclasses import dataclass
from math import inf, sqrt
from typing import Literal

from perfedrl.errors import UserError
from perfedrl.theory.worst_case import Constants

Variant = Literal["exact", "first-order"]


def bias(c: Constants, m_in: float, variant: Variant = "exact") -> float:
    """Bound b-hat on the bias of the meta-gradient estimate: Lemma 3(ii), or Corollary 2 if first-order.

    The first-order estimate drops the curvature term, a bias that no batch size reduces.
    """
    sampling = _over(c.alpha * c.L_J * c.G_J, sqrt(m_in))
    return c.stretch * sampling if variant == "exact" else sampling + residual(c)


def sharp_bias(c: Constants, m_in: float, variant: Variant = "exact", variance: float | None = None) -> float:
    """Bound b-hat-star of Prop. 1 on the bias; it falls as 1 / m_in, Lemma 3's bound only as 1 / sqrt(m_in).

    `variance` is the variance of one trajectory's policy gradient, at most G_J^2. For the first-order estimate the same
    argument applies to the sampling part of the bias in Corollary 2.
    """
    spread = c.G_J**2 if variance is None else variance
    sampling = _over(c.alpha**2 * c.rho_J * spread, 2 * m_in)
    return c.stretch * sampling if variant == "exact" else sampling + residual(c)


@dataclass(frozen=True)
class Moment:
    """Bound sigma-hat^2 = fixed + in / m_in + h / m_h + out / m_out as a function of the batch sizes.

    Lemma 3(iii) for the exact estimate; Corollary 2 for the first-order one, which has a fixed part instead of a
    curvature batch.
    """

    fixed: float
    m_in: float
    m_h: float
    m_out: float

    def __call__(self, m_in: float, m_h: float, m_out: float) -> float:
        parts = _over(self.m_in, m_in), _over(self.m_h, m_h), _over(self.m_out, m_out)
        return self.fixed + sum(parts)


def moment(c: Constants, variant: Variant = "exact") -> Moment:
    """Build the bound on the mean squared error of the estimate as a function of the batch sizes."""
    a, b, scale = (c.alpha * c.L_J) ** 2, c.stretch**2, 3 * c.G_J**2
    if variant == "exact":
        return Moment(0.0, m_in=scale * a * b, m_h=scale * a, m_out=scale * b)
    return Moment(scale * a, m_in=scale * a, m_h=0.0, m_out=scale)


def second_moment(c: Constants, m_in: float, m_h: float, m_out: float, variant: Variant = "exact") -> float:
    """Bound sigma-hat^2 on the mean squared error of the meta-gradient estimate: Lemma 3(iii), Corollary 2."""
    return moment(c, variant)(m_in, m_h, m_out)


def drift(c: Constants, beta: float, t: float) -> float:
    """Bound beta t G_F on |theta_i^{k,t} - theta^k|, the distance moved in t local steps, Lemma 4(i).

    The bound holds surely. Its square bounds the mean squared distance of the agents from their average, Lemma 4(ii).
    """
    return beta * t * c.G_F


def dissimilarity(c: Constants) -> float:
    """Bound on the mean squared distance of the agents' gradients from their mean, Remark 1."""
    return c.G_J**2


def residual(c: Constants) -> float:
    """Bound on the meta-gradient at a fixed point of the exact first-order dynamics, Prop. 2."""
    return c.alpha * c.L_J * c.G_J


def ceiling(c: Constants) -> float:
    """Largest local step size beta allowed by Lemma 5 and Theorem 1, 1 / (6 L_F)."""
    return 1 / (6 * c.L_F)


def one_step_progress(
    c: Constants, beta: float, t: int, n: int, squared_gradient: float, bias: float, second_moment: float
) -> float:
    """Lower bound on E F(theta^{t+1}) - F(theta^t), the gain of local step t at the agents' average, Lemma 5."""
    check_ceiling(c, beta)
    lost = 9 / 4 * beta * (c.L_F**2 * drift(c, beta, t) ** 2 + bias**2)
    return beta / 2 * squared_gradient - lost - c.L_F * beta**2 * second_moment / (2 * n)


@dataclass(frozen=True)
class Bound:
    """The terms of Theorem 1, a bound on the mean of |grad F|^2 along a run."""

    optimization: float
    drift: float
    bias: float
    variance: float

    @property
    def total(self) -> float:
        return self.optimization + self.drift + self.bias + self.variance


def convergence(
    c: Constants, *, rounds: int, tau: int, beta: float, n: int, gap: float, bias: float, second_moment: float
) -> Bound:
    """Evaluate Theorem 1, eq. (8), for `rounds` rounds of tau local steps.

    `gap` is Delta = F* - F(theta^0), at most 2 R-bar. At tau = 1 the drift term is zero, since the sum that the theorem
    bounds from above is empty (proof of Corollary 1, step 6).
    """
    check_ceiling(c, beta)
    return Bound(
        optimization=2 * gap / (beta * rounds * tau),
        drift=3 / 2 * (c.L_F * drift(c, beta, tau)) ** 2 if tau > 1 else 0.0,
        bias=9 / 2 * bias**2,
        variance=c.L_F * beta * second_moment / n,
    )


def check_ceiling(c: Constants, beta: float) -> None:
    """Reject a step size above the limit of Lemma 5 and Theorem 1."""
    if beta > ceiling(c) * (1 + 1e-12):
        times = beta / ceiling(c)
        raise UserError(f"condition (i) fails: beta = {beta:.4g} is {times:.3g} times the ceiling 1 / (6 L_F)")


def certificate(c: Constants, meta_gradient: float) -> float:
    """Bound |grad J_i(theta_i^+)|, the agent's gradient after adaptation, given |grad F_i(theta)|: Remark 2.

    The paper states it for alpha <= 1 / (2 L_J), where the factor 1 / (1 - alpha L_J) is at most 2. It holds for
    alpha < 1 / L_J; for larger alpha the result is infinite.
    """
    slope = 1 - c.alpha * c.L_J
    return meta_gradient / slope if slope > 0 else inf


@dataclass(frozen=True)
class SmallAdaptation:
    """Bounds on the distance of F and grad F from those of f, the mean return without adaptation: Prop. 3."""

    gradient: float
    value: float


def small_adaptation(c: Constants) -> SmallAdaptation:
    """Evaluate |grad F - grad f| <= 2 alpha L_J G_J and |F - f| <= alpha G_J^2, Prop. 3."""
    return SmallAdaptation(2 * c.alpha * c.L_J * c.G_J, c.alpha * c.G_J**2)


@dataclass(frozen=True)
class Regime:
    """The regime of Section 5 of an adaptation step size, with the step sizes where regimes end."""

    alpha: float
    name: str
    meaning: str
    moderate: float
    """1 / (2 L_J): up to it the adaptation's Jacobian is well conditioned and Remark 2's factor is at most 2 (R2)."""
    dagger: float
    """alpha-dagger = L_J / (rho_J G_J): above it the third-order term of L_F exceeds L_J."""
    vanishing: float
    """sqrt(epsilon) / (3 sqrt(2) L_J G_J): below it the first-order variant is admissible, and grad F is within
    sqrt(epsilon) / 2 of grad f (Corollary 2, R1); 0 if no accuracy is given."""


def regime(c: Constants, epsilon: float | None = None) -> Regime:
    """Determine the regime of alpha: none, vanishing (R1), moderate (R2), or above."""
    moderate, dagger = 1 / (2 * c.L_J), c.L_J / (c.rho_J * c.G_J)
    vanishing = 0.0 if epsilon is None else sqrt(accuracy(epsilon) / 18) / (c.L_J * c.G_J)
    if c.alpha == 0:
        name, meaning = "none", "F is f: federated policy gradient without personalization"
    elif c.alpha <= vanishing:
        name, meaning = (
            "vanishing (R1)",
            "grad F is within sqrt(epsilon) / 2 of grad f, and first-order is admissible",
        )
    elif c.alpha <= moderate:
        name, meaning = (
            "moderate (R2)",
            "recommended: an agent whose own grad F_i is small is nearly stationary once adapted",
        )
    else:
        name, meaning = "above moderate", "all constants grow with alpha, and from 1 / L_J on Remark 2 is silent"
    return Regime(c.alpha, name, meaning, moderate, dagger, vanishing)


def accuracy(epsilon: float) -> float:
    """Check that epsilon is finite and positive, and convert it to a float."""
    if not 0 < epsilon < inf:
        raise UserError(f"epsilon, the accuracy to plan for, must be a finite number > 0; it is {epsilon}")
    return float(epsilon)


def _over(a: float, b: float) -> float:
    """Divide a by b with 0 / 0 = 0, since an unused batch contributes no error."""
    if b == 0:
        return 0.0 if a == 0 else inf
    return a / b
