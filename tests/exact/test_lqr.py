"""Linear-quadratic agents: closed forms against autodiff, finite differences and Riccati; estimates against them."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixtures import lqr_outcomes
from jax.scipy.special import ndtr
from simulations import simulation_of

import perfedrl as pf
from perfedrl.compilation import jit
from perfedrl.envs import LinearQuadratic, lqr
from perfedrl.estimators import policy_gradient, reward_to_go
from perfedrl.estimators.zeroth_order import ZerothOrder, smoothed_gradient
from perfedrl.exact import lqr as lq
from perfedrl.exact.tabular import Exact, ExactObjective
from perfedrl.policies import LinearGaussian, linear_gaussian
from perfedrl.rollout import episode
from perfedrl.studies.lqr import study
from perfedrl.studies.lqr.training import costs, descend

CONFIG = Path(__file__).parents[2] / "configs" / "lqr.toml"
START = 1.62 * np.eye(3)
RNG = np.random.default_rng(0)
NEAR = np.asarray([[1.1, 0.4, 0.3], [0.0, 0.7, 0.2], [0.1, 0.1, 1.3]])
DIRECTION = RNG.normal(size=(3, 3))


@pytest.fixture(scope="module")
def task():
    return lqr(agents=2, held_out=0, epsilon=0.3).task(1)


VARIANTS = {
    "plain": {},
    "average cost": {"process_noise": 0.5},
    "discounted, noisy": {"discount": 0.9, "process_noise": 0.5},
}


@pytest.fixture(params=VARIANTS)
def any_task(request):
    return lqr(agents=2, held_out=0, epsilon=0.3, **VARIANTS[request.param]).task(1)


# --- the family -----------------------------------------------------------------------------------------------------


def test_systems_are_those_of_the_literature():
    systems = lqr(epsilon=0.5, vary={"perturbation": {"train": [0.0, 1.0]}}, agents=2, held_out=0).train
    np.testing.assert_allclose(systems.A[0], [[1.2, 0.5, 0.4], [0.01, 0.75, 0.3], [0.1, 0.02, 1.5]])
    np.testing.assert_allclose(systems.A[1] - systems.A[0], 0.5 * np.diag([3.5, 1, 0.1]))
    np.testing.assert_allclose(systems.B[0], np.eye(3))
    np.testing.assert_allclose(systems.B[1] - systems.B[0], 0.5 * np.diag([1.5, 0.1, 1]))
    np.testing.assert_allclose(systems.Q, 2 * systems.B[[0, 0]])
    np.testing.assert_allclose(systems.R, 0.5 * systems.B[[0, 0]])


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.5])
def test_the_usual_start_stabilizes_every_system_there_can_be(epsilon):
    spread = {"perturbation": {"train": np.linspace(0, 1, 101).tolist()}}
    radii = [lq.radius(s, START) for s in lq.systems(lqr(101, 0, epsilon=epsilon, vary=spread))]
    assert max(radii) < 0.9


def test_the_usual_start_does_not_stabilize_every_system_with_equal_inputs():
    ends = lqr(2, 0, epsilon=0.5, input_epsilon=0.0, vary={"perturbation": {"train": [0.0, 1.0]}})
    assert lq.radius(ends.task(0), START) < 1 < lq.radius(ends.task(1), START)
    with pytest.raises(pf.UserError, match=r"does not stabilize agent 1, whose closed loop has spectral radius 1\.3"):
        pf.simulation.evaluation.exact(ends, pf.estimators.Sampled(LinearGaussian(START)))


def test_an_episode_by_hand():
    task = LinearQuadratic([[2.0]], [[1.0]], [[3.0]], [[0.5]], horizon=1)
    played = episode(LinearGaussian([[1.5]], std=0.0), {"gain": jnp.asarray([[1.5]])}, task, ndtr(jnp.asarray([2.0])))
    # x = 2, u = -3, then x = 2 * 2 - 3 = 1 and u = -1.5
    np.testing.assert_allclose(played.reward, [-(3 * 4 + 0.5 * 9), -(3 + 0.5 * 2.25)], rtol=1e-5)
    assert task.outcomes(played)["score"] == pytest.approx(-20.625, rel=1e-5)


# --- closed forms ---------------------------------------------------------------------------------------------------


def test_the_cost_is_the_sum_of_the_stage_costs(task):
    """By the definition: x_t = L^t x_0 with E x_0 x_0^T = I, so C = sum_t tr((L^t)^T (Q + K^T R K) L^t)."""
    L, stage, total, power = task.A - task.B @ NEAR, task.Q + NEAR.T @ task.R @ NEAR, 0.0, np.eye(3)
    for _ in range(400):
        total, power = total + np.trace(power.T @ stage @ power), L @ power
    assert lq.cost(task, NEAR) == pytest.approx(total, rel=1e-12)


def test_the_riccati_gain_is_stationary_and_a_minimum(any_task):
    best = lq.optimal_gain(any_task)
    np.testing.assert_allclose(lq.gradient(any_task, best), 0, atol=1e-9)
    basis = np.eye(9).reshape(9, 3, 3)
    hessian = np.stack([lq.hessian(any_task, best, V).ravel() for V in basis])
    np.testing.assert_allclose(hessian, hessian.T, atol=1e-9)
    assert np.linalg.eigvalsh(hessian)[0] > 0.1
    # Costs have a single stationary point (Fazel et al.): at others they are higher.
    for other in (NEAR, START, best + 0.3 * DIRECTION / np.linalg.norm(DIRECTION)):
        assert lq.cost(any_task, other) > lq.cost(any_task, best)


def test_closed_forms_are_the_derivatives_by_autodiff(any_task, x64):
    value, slope, along, after = by_autodiff(any_task, NEAR, DIRECTION)
    np.testing.assert_allclose(value, lq.cost(any_task, NEAR), rtol=1e-11)
    np.testing.assert_allclose(slope, lq.gradient(any_task, NEAR), rtol=1e-8)
    np.testing.assert_allclose(along, lq.hessian(any_task, NEAR, DIRECTION), rtol=1e-8)
    np.testing.assert_allclose(after, lq.meta_gradient(any_task, NEAR, 0.01), rtol=1e-8)


@jax.jit
def by_autodiff(task, K, V):
    """C, its gradient, its Hessian along V, and the meta-gradient; through the doubling iteration, not the formulas."""

    def value(K):
        return lq.C(task, K)

    slope = jax.grad(value)
    (g, along), after = jax.jvp(slope, (K,), (V,)), jax.grad(lambda K: value(K - 0.01 * slope(K)))(K)
    return value(K), g, along, after


def test_closed_forms_are_the_derivatives_by_differences(task):
    h, V = 1e-5, DIRECTION

    def central(f):
        return (f(NEAR + h * V) - f(NEAR - h * V)) / (2 * h)

    assert central(lambda K: lq.cost(task, K)) == pytest.approx(np.sum(lq.gradient(task, NEAR) * V), rel=1e-6)
    np.testing.assert_allclose(central(lambda K: lq.gradient(task, K)), lq.hessian(task, NEAR, V), rtol=1e-6)
    by_meta = central(lambda K: lq.meta_cost(task, K, 0.01))
    assert by_meta == pytest.approx(np.sum(lq.meta_gradient(task, NEAR, 0.01) * V), rel=1e-6)


def test_the_objective_that_algorithms_see_is_the_closed_form(task, x64):
    objective, params = Exact(LinearGaussian(NEAR, learn_std=True))(task), {"gain": NEAR, "log_std": np.zeros(3)}
    v = {"gain": DIRECTION, "log_std": np.ones(3)}
    g, product, value = jax.jit(lambda p: (objective.gradient(p), objective.curvature(p, v), objective.value(p)))(
        params
    )
    np.testing.assert_allclose(g["gain"], -lq.gradient(task, NEAR), rtol=1e-10)
    np.testing.assert_allclose(product["gain"], -lq.hessian(task, NEAR, DIRECTION), rtol=1e-10)
    assert float(value) == pytest.approx(-lq.cost(task, NEAR), rel=1e-12)
    assert not g["log_std"].any()
    assert not product["log_std"].any()
    assert isinstance(Exact(None)(pf.gridworld(width=2).task(0)), ExactObjective)


def test_costs_of_unstable_gains_are_infinite_and_never_a_number(task, x64):
    loop = LinearQuadratic(task.A, np.eye(3), task.Q, task.R)
    for scale in (1.0, 1.0001, 1.5, 30.0):
        gain = task.A - scale * np.eye(3)
        assert lq.cost(loop, gain) == np.inf
        assert np.isnan(jax.jit(lambda K: lq.C(loop, K))(gain))
    inside = task.A - 0.999 * np.eye(3)
    np.testing.assert_allclose(jax.jit(lambda K: lq.C(loop, K))(inside), lq.cost(loop, inside), rtol=1e-9)
    with pytest.raises(pf.UserError, match="radius 1"):
        lq.gradient(loop, task.A - np.eye(3))


def test_average_and_meta_optimal_gains_are_stationary_and_agree_without_heterogeneity():
    systems = lq.systems(lqr(4, 0, epsilon=0.5))
    average = lq.average_optimal_gain(systems, START)
    np.testing.assert_allclose(np.mean([lq.gradient(s, average) for s in systems], axis=0), 0, atol=1e-5)
    meta = lq.meta_optimal_gain(systems, average, 0.005)
    np.testing.assert_allclose(np.mean([lq.meta_gradient(s, meta, 0.005) for s in systems], axis=0), 0, atol=1e-5)

    def after(K):
        return np.mean([lq.meta_cost(s, K, 0.005) for s in systems])

    assert after(meta) < after(average) < np.mean([lq.cost(s, average) for s in systems])
    same = lq.systems(lqr(2, 0, epsilon=0.0))
    np.testing.assert_allclose(lq.average_optimal_gain(same, START), lq.optimal_gain(same[0]), atol=1e-6)


# --- training -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    return lqr(3, 1, epsilon=0.5)


@pytest.mark.slow
def test_a_descent_takes_the_steps_of_the_simulation(small):
    """The same algorithm code compiled for several replicas, and one step of FedAvg-PG by hand."""
    policy, algorithm = LinearGaussian(NEAR, std=0.0), pf.PerFedAvgPG(0.005, 1e-3, 2)
    path = descend(small, policy, algorithm, 2)
    simulation = simulation_of(small, policy, [algorithm], [0], Exact(policy))
    (standing,) = simulation.run(simulation.begin(), [2])
    np.testing.assert_allclose(standing.fleet_state.server.message["gain"][0], path.last, rtol=1e-12)
    values = [-lq.meta_cost(s, path.last, 0.005) for s in lq.systems(small)]
    np.testing.assert_allclose(standing.history.after[0, -1], values, rtol=1e-10)
    once = descend(small, policy, pf.FedAvgPG(0.005, 1e-3, 1), 1).last
    np.testing.assert_allclose(
        once, NEAR - 1e-3 * np.mean([lq.gradient(s, NEAR) for s in lq.systems(small)], axis=0), rtol=1e-10
    )
    np.testing.assert_allclose(
        costs(small.train, once[None], 0.005)[0], [lq.meta_cost(s, once, 0.005) for s in lq.systems(small)], rtol=1e-10
    )


def test_a_step_that_destabilizes_is_refused_by_agent_round_and_radius(small):
    policy = LinearGaussian(START, std=0.0)
    with pytest.raises(pf.UserError) as error:
        descend(small, policy, pf.FedAvgPG(0.005, 0.02, 2), 2)
    step = [START - 0.02 * lq.gradient(s, START) for s in lq.systems(small)]
    radii = [lq.radius(s, K) for s, K in zip(lq.systems(small), step, strict=True)]
    agent = int(np.argmax(np.asarray(radii) >= 1))
    assert f"the gain of agent {agent} does not stabilize its system in round 0 at local step 1" in str(error.value)
    assert f"spectral radius {radii[agent]:.4g}; lower the step size" in str(error.value)
    with pytest.raises(pf.UserError, match=r"the adapted gain of agent \d .* in round 0 at local step 0"):
        descend(small, policy, pf.PerFedAvgPG(0.1, 1e-3, 2), 2)


def test_without_exact_costs_a_simulation_says_that_training_diverged(small):
    policy = LinearGaussian(START, std=0.0)
    simulation = simulation_of(small, policy, [pf.FedAvgPG(0.0, 0.02, 2)], [0], Exact(policy))
    with pytest.raises(pf.UserError, match="diverged between rounds 0 and 2"):
        list(simulation.run(simulation.begin(), [2]))


# --- estimates ------------------------------------------------------------------------------------------------------


def scalar_return(task: LinearQuadratic, K, std: float):
    """Expected return of a scalar system from its second moments, independently of the estimator."""
    a, b, q, r = (float(x[0, 0]) for x in (task.A, task.B, task.Q, task.R))
    moment, total = 1.0, 0.0
    for t in range(task.horizon + 1):
        total -= task.discount**t * (q * moment + r * (K**2 * moment + std**2))
        moment = (a - b * K) ** 2 * moment + b**2 * std**2
    return total


def test_the_policy_gradient_is_unbiased__by_quadrature(x64):
    """All of a scalar system's randomness by Gauss-Hermite nodes, which are exact for polynomials."""
    task, std, K = LinearQuadratic([[1.2]], [[0.8]], [[2.0]], [[0.5]], horizon=1, discount=0.9), 0.3, 0.7
    policy = LinearGaussian([[K]], std)
    nodes, weights = np.polynomial.hermite_e.hermegauss(6)
    grid = np.stack([x.ravel() for x in np.meshgrid(nodes, nodes, nodes)], axis=1)
    share = np.prod(np.stack([x.ravel() for x in np.meshgrid(weights, weights, weights)]), axis=0)
    share = share / share.sum()
    params = {"gain": jnp.asarray([[K]])}
    batch = jax.jit(jax.vmap(lambda u: episode(policy, params, task, u)))(ndtr(jnp.asarray(grid)))
    returns = reward_to_go(batch, task.discount)
    assert float(share @ returns[:, 0]) == pytest.approx(scalar_return(task, K, std), rel=1e-9)
    estimate = jax.jit(lambda p: policy_gradient(policy.log_prob, p, batch, returns * (share * len(share))[:, None]))
    truth = jax.grad(lambda K: scalar_return(task, K, std))(K)
    assert float(estimate(params)["gain"][0, 0]) == pytest.approx(float(truth), rel=1e-8)


def test_smoothing_over_an_orthogonal_frame_is_exact_for_quadratics_and_second_order_for_costs(task):
    """The mean of U U^T over the frame is I / d, as over the sphere: symmetric directions stand for all."""
    frame = np.linalg.qr(RNG.normal(size=(9, 9)))[0]
    M, b, theta = RNG.normal(size=(9, 9)), RNG.normal(size=9), NEAR.ravel()

    def quadratic(x, _):
        return x @ M @ x + b @ x + 3.0

    def one_by_one(f):
        return lambda U, keys: np.stack([f(u, k) for u, k in zip(U, keys, strict=True)])

    def smooth(f, U, r, points):
        return smoothed_gradient(f, theta, U, np.zeros(len(U)), r, points, one_by_one)

    np.testing.assert_allclose(smooth(quadratic, frame, 0.3, 2), (M + M.T) @ theta + b, rtol=1e-5)
    both = np.concatenate([frame, -frame])
    np.testing.assert_allclose(smooth(quadratic, both, 0.3, 1), (M + M.T) @ theta + b, rtol=1e-4)
    true = lq.gradient(task, NEAR).ravel()

    def cost(x, _):
        return lq.cost(task, x.reshape(3, 3))

    errors = [np.linalg.norm(np.float64(smooth(cost, frame, r, 2)) - true) for r in (0.2, 0.1)]
    assert 3.5 < errors[0] / errors[1] < 5


@pytest.mark.slow
def test_zeroth_order_estimates_are_near_the_exact_ones(task, x64):
    """5 standard errors from 16 replicates: a component fails with probability 1.6e-4, one of all 18 with 0.3 %.

    What truncation after 41 decisions and the radius leave of bias is far below that.
    """
    long = LinearQuadratic(task.A, task.B, task.Q, task.R, horizon=40)
    policy, key = LinearGaussian(NEAR, std=0.0), jax.random.key(3)
    objective = ZerothOrder(policy, radius=0.02)(long)
    params, v = {"gain": jnp.asarray(NEAR)}, {"gain": jnp.asarray(DIRECTION)}

    def both(k):
        return (objective.gradient(params, k, 128), objective.curvature(params, v, k, 128))

    g, h = (x["gain"] for x in jit(jax.vmap(both))(jax.random.split(key, 16)))
    for estimates, true in ((g, -lq.gradient(task, NEAR)), (h, -lq.hessian(task, NEAR, DIRECTION))):
        far = np.abs(estimates.mean(0) - true)
        assert (far < 5 * np.std(estimates, axis=0, ddof=1) / 4).all()
        assert np.linalg.norm(far) < 0.5 * np.linalg.norm(true)


def test_the_committed_config_measures_exact_costs():
    parts = pf.load_config(CONFIG).experiment
    assert parts.evaluation.float64
    assert isinstance(parts.evaluation.objective(parts.fleet.task(0)), lq.ExactLQRObjective)


# --- the experiment -------------------------------------------------------------------------------------------------


def test_claims_are_met_by_what_they_ask_for_alone():
    made_up = lqr_outcomes()
    assert all(claim.met for claim in study.claims(made_up))
    assert len(study.claims(made_up)) == 9
    worse = made_up[0.5]
    worse = worse._replace(gaps={**worse.gaps, ("meta", study.AFTER): 1.2 * worse.gaps["meta", study.BEFORE]})
    worse = worse._replace(radii=np.asarray([0.5, 1.01]), trained=worse.trained[:, ::-1])
    missed = [claim.claim for claim in study.claims(made_up | {0.5: worse}) if not claim.met]
    assert [m.partition(",")[0].partition(" (")[0] for m in missed] == [
        "unseen systems that one step leaves stable",
        "gap of training systems after one step",
        "gap of unseen systems after one step over the average-optimal gain's without a step",
        "gap of unseen systems after one step over the average-optimal gain's with its own step",
    ]


@pytest.mark.slow
def test_one_fleet_is_measured_as_its_gains_cost(monkeypatch):
    """Few rounds: the last gap before adaptation is that of a plain descent, by the formulas."""
    for name, value in {"AGENTS": 2, "UNSEEN": 2, "WARM": 40, "ROUNDS": 50, "FROM": 40}.items():
        monkeypatch.setattr(study, name, value)
    found = study.one_fleet(0.5, 0)
    fleet = lqr(2, 2, 0, 0.5)
    last = descend(fleet, LinearGaussian(START), pf.FedAvgPG(0.005, study.BETA, 5), 50).last
    unseen = lq.systems(fleet, held_out=True)
    above = [lq.meta_cost(s, last, 0.005) / lq.cost(s, lq.optimal_gain(s)) - 1 for s in unseen]
    assert found["gaps"]["fedavg", study.AFTER][-1] == pytest.approx(np.mean(above), rel=1e-5)
    assert found["gaps"]["meta", study.BEFORE][0] == pytest.approx(found["gaps"]["fedavg", study.BEFORE][0], rel=1e-8)
    assert max(found["start"]) < 1


# --- what is refused ------------------------------------------------------------------------------------------------

ONE = [[1.0]]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: LinearQuadratic(ONE, ONE, ONE, [[0.0]]), "R must be symmetric with eigenvalues > 0"),
        (lambda: LinearQuadratic(ONE, ONE, [[-1.0]], ONE), "Q must be symmetric"),
        (lambda: LinearQuadratic(np.eye(2), ONE, ONE, ONE), "A has shape"),
        (lambda: LinearQuadratic(ONE, ONE, ONE, ONE, discount=1.1), "discount"),
        (lambda: LinearQuadratic(ONE, ONE, ONE, ONE, process_noise=-1.0), "process_noise"),
        (lambda: LinearQuadratic([[np.nan]], ONE, ONE, ONE), "finite"),
        (lambda: lqr(epsilon=-0.1), "epsilon"),
        (lambda: lqr(vary="mass"), "mass"),
        (lambda: linear_gaussian(lqr(), gain=[[1.0, 0.0]]), r"shape \(3, 3\)"),
        (lambda: linear_gaussian(pf.gridworld()), "vectors"),
        (lambda: linear_gaussian(lqr(), std=0.0).log_prob({"gain": START}, np.ones(3), np.ones(3)), "zeroth-order"),
        (lambda: linear_gaussian(lqr(), std=0.0, learn_std=True), "learn_std"),
        (lambda: ZerothOrder(None, radius=0.0), "radius"),
        (lambda: ZerothOrder(None, points=3), "points"),
        (lambda: ZerothOrder(None)(lqr().task(0)).gradient({"gain": START}, jax.random.key(0), 1), "at least 2"),
        (lambda: descend(pf.gridworld(), None, None, 1), "linear-quadratic"),
        (lambda: lq.average_optimal_gain(lq.systems(lqr()), np.zeros((3, 3))), "stabilize every system"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call, words, untyped):
    with pytest.raises(pf.UserError, match=words) as error:
        call()
    assert "\n" not in str(error.value)
