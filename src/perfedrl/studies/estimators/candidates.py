"""The estimators to compare: each curvature form with each baseline, and policy gradients."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from perfedrl.errors import UserError
from perfedrl.estimators import BASELINES, CURVATURES, PAPER, UNBIASED, Baseline, Curvature, Sampled
from perfedrl.estimators.curvature import CentralDifferences, FromBatch
from perfedrl.estimators.curvature.marginal import marginalized
from perfedrl.experiments.config import Config
from perfedrl.registry import Registry

CURVATURE, GRADIENT = "curvature", "gradient"
SCORE, NOTHING = PAPER["curvature"], PAPER["baseline"]
POLICY_GRADIENT, OWN_BASELINE = "policy gradient", "its own"


class Estimator(NamedTuple):
    """An estimator of a product with the Hessian of J, or of the gradient of J, from some trajectories.

    `form` and `baseline` are names; a gradient depends on the baseline only.
    """

    quantity: str
    form: str
    baseline: str
    order: str
    """The order of the bias as declared by the form; "none" where unbiased."""
    trajectories: int
    curvature: Curvature
    subtracted: Baseline

    @property
    def name(self) -> str:
        return f"{self.form}, {self.baseline}"

    @property
    def is_paper(self) -> bool:
        """Whether it is the paper's estimator of its quantity."""
        return (self.form, self.baseline) in ((SCORE, NOTHING), (POLICY_GRADIENT, NOTHING))

    @property
    def unbiased(self) -> bool:
        """Whether the form is declared unbiased."""
        return self.order == UNBIASED


def candidates(config: Config, m: int, forms: Sequence[str] = (), baselines: Sequence[str] = ()) -> list[Estimator]:
    """The estimators with the named forms and baselines, by default all; the paper's are always included."""
    policy, task, own = config.experiment.policy, config.experiment.fleet.task(0), config.experiment.agent.forms
    key, theta = jax.random.key(0), jax.eval_shape(policy.init, jax.random.key(0))

    def try_form(curvature: Any) -> None:
        jax.eval_shape(lambda t: Sampled(policy, curvature)(task).curvature(t, t, key, m), theta)

    def try_baseline(baseline: Any) -> None:
        jax.eval_shape(lambda t: Sampled(policy, baseline=baseline)(task).gradient(t, key, m), theta)

    curvatures = fitting(CURVATURES, forms, (config.curvature["name"], own.curvature), try_form)
    taken = fitting(BASELINES, baselines, (config.baseline["name"], own.baseline), try_baseline)
    pairs = [*((form, name) for form in curvatures for name in taken), (SCORE, NOTHING)]
    curvatures, taken = {SCORE: CURVATURES[SCORE](), **curvatures}, {NOTHING: BASELINES[NOTHING](), **taken}
    products = {}
    for form, name in pairs:
        curvature, baseline = curvatures[form], taken[name]
        # The marginalized form subtracts its own fit and ignores the baseline.
        if isinstance(curvature, FromBatch) and curvature.form is marginalized:
            name, baseline = OWN_BASELINE, taken[NOTHING]
        spent = m // 2 * 2 if isinstance(curvature, CentralDifferences) else m
        products[form, name] = Estimator(CURVATURE, form, name, curvature.bias, spent, curvature, baseline)
    gradients = [
        Estimator(GRADIENT, POLICY_GRADIENT, name, UNBIASED, m, curvatures[SCORE], baseline)
        for name, baseline in taken.items()
    ]
    return [*products.values(), *gradients]


def fitting(
    known: Registry, names: Sequence[str], own: tuple[str, Any], attempt: Callable[[Any], None]
) -> dict[str, Any]:
    """The named parts; without names all that work here, and the config's own where its settings differ.

    `attempt` is called with a part and raises a `UserError` where it does not work with the policy or the batch.
    """
    if names:
        made = {name: own[1] if name == own[0] else known[name]() for name in dict.fromkeys(names)}
        for part in made.values():
            attempt(part)
        return made
    made = {name: factory() for name, factory in known.items()}
    if own[1] not in made.values():
        made[f"{own[0]}, as set"] = own[1]
    return {name: part for name, part in made.items() if works(attempt, part)}


def works(attempt: Callable[[Any], None], part: Any) -> bool:
    """Whether an attempt with a part raises no `UserError`."""
    try:
        attempt(part)
    except UserError:
        return False
    return True
