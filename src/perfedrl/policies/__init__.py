"""Policies: stochastic and differentiable, with pytrees of parameters. A new kind is a file and a registry entry."""

from perfedrl.policies.actor_critic import ActorCritic, actor_critic
from perfedrl.policies.base import Policy, TablePolicy
from perfedrl.policies.contextual import Contextual, context_mlp
from perfedrl.policies.linear_gaussian import LinearGaussian, linear_gaussian
from perfedrl.policies.mlp import GaussianMLP, MLPSoftmax, gaussian_mlp, mlp
from perfedrl.policies.normalized import Normalized, normalized
from perfedrl.policies.sighted import SightedPolicy, sighted
from perfedrl.policies.tabular import LogLinearSoftmax, TableSoftmax, log_linear, table
from perfedrl.registry import registry

POLICIES = registry(
    "policy",
    Policy,
    table=table,
    log_linear=log_linear,
    mlp=mlp,
    gaussian_mlp=gaussian_mlp,
    linear_gaussian=linear_gaussian,
    actor_critic=actor_critic,
    context_mlp=context_mlp,
)

__all__ = [
    "POLICIES",
    "ActorCritic",
    "Contextual",
    "GaussianMLP",
    "LinearGaussian",
    "LogLinearSoftmax",
    "MLPSoftmax",
    "Normalized",
    "Policy",
    "SightedPolicy",
    "TablePolicy",
    "TableSoftmax",
    "actor_critic",
    "context_mlp",
    "gaussian_mlp",
    "linear_gaussian",
    "log_linear",
    "mlp",
    "normalized",
    "sighted",
    "table",
]
