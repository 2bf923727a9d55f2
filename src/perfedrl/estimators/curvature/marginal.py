"""Action marginalization: for finite action sets, expectations over actions become exact sums where possible."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from perfedrl.errors import UserError
from perfedrl.estimators.baselines import features, others_fit
from perfedrl.estimators.curvature.surrogates import box, second_derivative
from perfedrl.estimators.gradient import Credit, log_probs
from perfedrl.types import Array, Params, Scalar, Trajectory


def marginalized(
    policy: Any,
    params: Params,
    batch: Trajectory,
    credit: Credit,
    v: Params,
    discount: Scalar,
    strength: float = 1e-2,
) -> Params:
    """Compute the causal form with a fitted action value as control variate.

    Q(s, a) is linear in features of state, time and action and fitted on other trajectories. With q_h(theta) =
    sum_a pi(a | s_h) Q(s_h, a) the estimate is the causal form of R^h - Q(s_h, a_h), plus the second derivative of
    box(L_{h-1}) (q_h - sg(q_h)). The mean is unchanged, and the noise of the sampled action is removed.
    """
    actions = policy.actions
    if not isinstance(actions, int):
        raise UserError("the curvature form 'marginalized' needs a policy over finitely many actions")
    state = features(policy, batch, discount)
    taken = jax.nn.one_hot(batch.action, actions, dtype=state.dtype)
    m, T, _ = state.shape
    w = others_fit((state[..., None, :] * taken[..., None]).reshape(m, T, -1), credit.returns, strength)
    w = w[np.arange(m) % len(w)].reshape(m, 1, actions, -1)
    Q = jnp.sum(w * state[..., None, :], axis=-1)
    left = credit.returns - jnp.sum(Q * taken, axis=-1)
    every = jnp.arange(actions)

    def objective(theta: Params) -> Float[Array, "m T"]:
        logp = log_probs(policy.log_prob, theta, batch)

        def of_all(obs: Any) -> Float[Array, " A"]:
            return jax.vmap(lambda a: policy.log_prob(theta, obs, a))(every)

        q = jnp.sum(jnp.exp(jax.vmap(jax.vmap(of_all))(batch.obs)) * Q, axis=-1) * batch.mask
        so_far = jnp.cumsum(logp, axis=-1)
        before = box(so_far - logp)
        return left * (box(so_far) - before) + before * (q - jax.lax.stop_gradient(q))

    return second_derivative(objective, params, v, m)
