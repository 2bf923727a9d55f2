"""Estimates from each trajectory of a batch by itself."""

import jax

from perfedrl.estimators import Credit, policy_gradient, reward_to_go
from perfedrl.estimators.curvature.pairs import score_matrix
from perfedrl.types import Trajectory


def singles(trajectories: Trajectory) -> Trajectory:
    """A batch of m trajectories as m batches of one."""
    return jax.tree.map(lambda x: x[:, None], trajectories)


@jax.jit
def per_trajectory_gradients(policy, theta, trajectories, discount):
    one = lambda b: policy_gradient(policy.log_prob, theta, b, reward_to_go(b, discount))  # noqa: E731
    return jax.vmap(one)(singles(trajectories))


@jax.jit
def per_trajectory_matrices(policy, theta, trajectories, discount):
    one = lambda b: score_matrix(policy, theta, b, Credit(reward_to_go(b, discount)))  # noqa: E731
    return jax.vmap(one)(singles(trajectories))


def per_trajectory_products(form, policy, theta, trajectories, discount, v):
    one = lambda b: form.product(policy, theta, b, Credit(reward_to_go(b, discount)), v, discount)  # noqa: E731
    return jax.vmap(one)(singles(trajectories))


per_trajectory_products = jax.jit(per_trajectory_products, static_argnums=(0, 4))
