"""Search for the plan with the fewest trajectories that meets the conditions of Corollary 1.

For a given beta the smallest batches have a closed form, and rounds times local steps are 8 Delta / (beta epsilon).
The remaining search is over beta, and the cost is convex in log beta (a geometric program). Rounding to whole numbers
matters most for few rounds, so small numbers of rounds are tried one by one.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from math import ceil, exp, floor, inf, log, sqrt

from scipy.optimize import minimize_scalar

from perfedrl.errors import UserError
from perfedrl.theory import bounds
from perfedrl.theory.bounds import accuracy
from perfedrl.theory.plan import (
    ROUNDING,
    SLACK,
    Bias,
    Plan,
    Problem,
    inner_batch,
    noise_limit,
    reach,
    rounds,
    whole_rounds,
)

BATCHES = ("m_in", "m_h", "m_out")

SMALLEST_SHARE = 1e-12
"""Lower end of the search for beta, as a share of the largest allowed beta."""

FEW_ROUNDS = 50
"""Every number of rounds up to this one is tried."""

AS_CHEAP = 1.01
"""Plans within this factor of the cheapest count as equally cheap; the one with the fewest rounds is chosen."""


@dataclass(frozen=True)
class Given:
    """Quantities fixed by the user; the planner chooses the others. K is an upper limit on the rounds."""

    K: int | None = None
    tau: int | None = None
    beta: float | None = None
    m_in: int | None = None
    m_h: int | None = None
    m_out: int | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not (0 < value < inf and (name == "beta" or value == int(value))):
                kind = "a finite number > 0" if name == "beta" else "a whole number of at least 1"
                raise UserError(f"{name} must be {kind}; it is {value}")

    @property
    def batches(self) -> dict[str, int]:
        """The batch sizes that are fixed."""
        return {name: value for name in BATCHES if (value := getattr(self, name)) is not None}


def cheapest(problem: Problem, epsilon: float, given: Given | None = None, bias: Bias = "best") -> Plan:
    """Find the plan with the fewest trajectories and, among equally cheap ones, the fewest rounds."""
    search = Search(problem, accuracy(epsilon), given or Given(), bias)
    plans = [plan for plan in search.plans() if search.allows(plan)]
    least = min(plan.trajectories for plan in plans)
    return min((plan for plan in plans if plan.trajectories <= AS_CHEAP * least), key=lambda plan: plan.K)


class Search:
    """The conditions of Corollary 1 as limits on beta, for given fixed quantities."""

    def __init__(self, problem: Problem, epsilon: float, given: Given, bias: Bias):
        self.problem, self.epsilon, self.given, self.bias = problem, epsilon, given, bias
        self.moment = bounds.moment(problem.constants, problem.variant)
        self.weights = {name: getattr(self.moment, name) for name in BATCHES}
        self.fixed = self._fixed()
        self.lower = {"m_in": self._inner_batch(), "m_h": 1, "m_out": 1}
        self.noise = self._noise(self.fixed)
        self.reach = reach(problem, epsilon)
        self.needed = rounds(problem, epsilon, 1.0) / given.K if given.K else 0.0
        """Smallest beta tau that meets the limit on the rounds."""
        self.limits = self._limits()
        self.largest = min(self.limits.values())
        self._check_given_beta()
        self._check_rounds()

    def plans(self) -> Iterator[Plan]:
        """Generate candidate plans in whole numbers, among them the cheapest."""
        for beta in self.betas(single=True):
            yield self.plan(beta, 1)
        for beta in self.betas(single=False):
            tau = self.given.tau or max(2, floor(self.reach / beta * (1 + ROUNDING)))
            if self.given.beta is None and self.given.tau is None and beta * tau < self.needed:
                tau += 1
            yield self.plan(beta if self.given.beta else min(beta, self.reach / tau), tau)

    def plan(self, beta: float, tau: int) -> Plan:
        """Complete beta and tau with the smallest batches and the number of rounds."""
        K = whole_rounds(self.problem, self.epsilon, beta * tau)
        return Plan(self.problem, self.epsilon, self.bias, K, tau, beta, **self.whole_batches(beta))

    def allows(self, plan: Plan) -> bool:
        """Whether a plan meets the conditions and the limit on the rounds."""
        return (self.given.K is None or plan.K <= self.given.K) and all(c.holds for c in plan.conditions)

    def betas(self, single: bool) -> Iterator[float]:
        """Generate candidate step sizes for one local step, or for several under the drift condition."""
        tau = self.given.tau
        if (tau is not None and (tau == 1) != single) or (not single and self.needed > self.reach * (1 + SLACK)):
            return
        if self.given.beta:
            yield self.given.beta
            return
        high = self.largest if single else min(self.largest, self.reach / (tau or 2))
        low = self.needed / (tau or 1) if single or tau else 0.0
        if low > high * (1 + SLACK):
            return
        low = min(max(low, high * SMALLEST_SHARE), high)
        found = minimize_scalar(
            lambda x: self.cost(exp(x)), bounds=(log(low), log(high)), method="bounded", options={"xatol": 1e-10}
        )
        smallest_batches = noise_limit(self.problem, self.epsilon, self._noise(self.lower | self.fixed))
        few = (rounds(self.problem, self.epsilon, k * (tau or 1)) for k in range(1, FEW_ROUNDS + 1))
        for beta in (high, exp(found.x), smallest_batches, low, *few):
            if low <= beta <= high and self.cost(beta) < inf:
                yield beta

    def cost(self, beta: float) -> float:
        """Trajectories per agent up to a constant factor; infinite if no batches meet condition (iv)."""
        sizes = self.batches(beta)
        return sum(sizes.values()) / beta if sizes else inf

    def batches(self, beta: float) -> dict[str, float]:
        """Compute the batches of smallest total size that meet condition (iv) at beta.

        Each is proportional to the square root of its weight. Empty if no batches are large enough.
        """
        budget = noise_limit(self.problem, self.epsilon, 1.0) / beta - self.noise
        sizes: dict[str, float] = dict(self.fixed)
        free = [name for name in BATCHES if name not in sizes]
        while free:
            if budget <= 0:
                return {}
            roots = sum(sqrt(self.weights[x]) for x in free)
            ideal = {x: sqrt(self.weights[x]) * roots / budget for x in free}
            small = [x for x in free if ideal[x] <= self.lower[x]]
            if not small:
                sizes |= ideal
                break
            sizes |= {x: self.lower[x] for x in small}
            budget -= sum(self.weights[x] / self.lower[x] for x in small)
            free = [x for x in free if x not in small]
        return {name: sizes[name] for name in BATCHES}

    def whole_batches(self, beta: float) -> dict[str, int]:
        """Round the batch sizes so that their total is smallest among roundings that meet condition (iv)."""
        sizes = self.batches(beta)
        up = {x: ceil(sizes[x] * (1 - ROUNDING)) for x in BATCHES} | self.fixed
        down = {x: max(up[x] - 1, self.lower[x]) for x in BATCHES} | self.fixed
        most = noise_limit(self.problem, self.epsilon, 1.0) / beta * (1 + ROUNDING)
        rounded = (dict(zip(BATCHES, x, strict=True)) for x in product(*zip(down.values(), up.values(), strict=True)))
        return min((x for x in rounded if self.moment(**x) <= most), key=lambda x: sum(x.values()), default=up)

    def _noise(self, sizes: dict[str, int]) -> float:
        """Part of the mean squared error that the batches not in `sizes` do not influence."""
        return self.moment.fixed + sum(self.weights[x] / m for x, m in sizes.items() if m)

    def _fixed(self) -> dict[str, int]:
        """Fixed batch sizes, with 0 for batches that the variant does not draw."""
        c, exact = self.problem.constants, self.problem.variant == "exact"
        unused = [x for x, used in (("m_in", c.alpha > 0), ("m_h", c.alpha > 0 and exact)) if not used]
        for name in unused:
            if name in self.given.batches:
                why = "the first-order variant draws" if c.alpha else "without adaptation there is"
                raise UserError(f"{name} cannot be given: {why} no such batch")
        return self.given.batches | dict.fromkeys(unused, 0)

    def _inner_batch(self) -> int:
        needed = inner_batch(self.problem, self.epsilon, self.bias)
        given = self.given.m_in
        if given is not None and given < needed:
            raise UserError(
                f"condition (iii) bias fails: m_in = {given}, but at least {needed:.4g} inner trajectories are needed, "
                f"{needed / given:.3g} times as many"
            )
        return needed

    def _limits(self) -> dict[str, float]:
        p, tau = self.problem, self.given.tau
        limits = {"(i) ceiling": bounds.ceiling(p.constants)}
        if tau and tau > 1:
            limits["(ii) drift"] = self.reach / tau
        if self.noise:
            limit = noise_limit(p, self.epsilon, self.noise)
            # Leave room for the noise of the batches that are not fixed.
            limits["(iv) variance"] = limit * (1 if len(self.fixed) == len(BATCHES) else 1 - 1e-6)
        return limits

    def _check_given_beta(self) -> None:
        beta = self.given.beta or 0.0
        for name, limit in self.limits.items():
            if beta > limit * (1 + SLACK):
                raise UserError(
                    f"condition {name} fails: beta = {beta:.4g} is {beta / limit:.3g} times the largest that it allows "
                    f"here, {limit:.4g}"
                )

    def _check_rounds(self) -> None:
        """Reject a limit on the rounds that no beta and tau meet, naming the condition that prevents it."""
        beta, tau = self.given.beta or self.largest, self.given.tau
        if tau:
            most = beta * tau
        elif self.given.beta:
            most = beta * max(1, floor(self.reach / beta * (1 + ROUNDING)))
        else:
            most = max(beta, self.reach)
        if self.given.K is None or self.needed <= most * (1 + SLACK):
            return
        if self.given.beta and tau:
            name = f"beta = {beta:.4g} and tau = {tau} make"
        elif not tau and (self.given.beta or most > beta):
            name = "condition (ii) drift allows"
        else:
            name = f"condition {min(self.limits, key=lambda x: self.limits[x])} allows"
        least = whole_rounds(self.problem, self.epsilon, most)
        raise UserError(
            f"K = {self.given.K} rounds are too few: {name} beta tau = {most:.4g} at most, and that needs {least:.4g} "
            f"rounds, {least / self.given.K:.3g} times as many"
        )
