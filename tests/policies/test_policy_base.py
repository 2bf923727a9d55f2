"""The contract of policies: members have defaults, and wrappers delegate every one of them explicitly."""

import jax.numpy as jnp
import numpy as np
import pytest

from perfedrl.contracts import members
from perfedrl.errors import UserError
from perfedrl.estimators import Sampled
from perfedrl.policies import (
    ActorCritic,
    Contextual,
    GaussianMLP,
    LinearGaussian,
    MLPSoftmax,
    Normalized,
    Policy,
    SightedPolicy,
    TableSoftmax,
)


class Fair(Policy):
    """The shortest policy: a fair coin."""

    noise = 1

    def init(self, key):
        return jnp.zeros(1)

    def sample(self, params, obs, u):
        return (u[0] < 0.5).astype(int)

    def log_prob(self, params, obs, action):
        return jnp.log(0.5) + 0 * params[0]


REQUIRED = {"noise", "init", "sample", "log_prob"}
OPTIONAL = sorted(set(members(Policy)) - REQUIRED)


@pytest.mark.parametrize("name", OPTIONAL)
def test_a_member_that_a_policy_lacks_is_none(name):
    assert getattr(Fair(), name) is None


@pytest.mark.parametrize("wrapper", [ActorCritic, Contextual, Normalized, SightedPolicy])
def test_a_wrapper_states_every_member_of_the_contract_itself(wrapper):
    assert "__getattr__" not in vars(wrapper)
    assert set(members(Policy)) <= set(vars(wrapper)) | set(wrapper.__annotations__)


def test_wrappers_lack_the_members_that_the_wrapped_policy_lacks():
    for policy in (ActorCritic(Fair(), (3, 1)), Normalized(Fair(), 2)):
        assert policy.entropy is policy.in_numpy is policy.actions is policy.action_size is None
    assert Normalized(Fair(), 2).values is Normalized(Fair(), 2).value_fit is None


def test_wrappers_have_the_members_of_the_wrapped_policy():
    assert ActorCritic(MLPSoftmax((2, 3)), (3, 1)).actions == 3
    assert ActorCritic(GaussianMLP((2, 3)), (3, 1)).action_size == 3
    both = Normalized(ActorCritic(MLPSoftmax((2, 3)), (3, 1)), 2)
    assert None not in (both.entropy, both.values, both.value_fit, both.in_numpy, both.scaled, both.moment_fit)
    assert (both.actions, both.states) == (3, None)
    assert Normalized(TableSoftmax(4, 2), rewards=True).states == 4


def test_policies_compare_and_hash_by_their_settings():
    assert TableSoftmax(4, 2) == TableSoftmax(4, 2) != TableSoftmax(4, 3)
    assert hash(MLPSoftmax((2, 3))) == hash(MLPSoftmax((2, 3)))
    np.testing.assert_array_equal(LinearGaussian(np.eye(2)).gain, np.eye(2))


def test_an_object_that_is_no_policy_is_rejected_with_the_class_to_subclass():
    with pytest.raises(UserError, match=r"a str is not a policy: subclass perfedrl\.policies\.Policy"):
        Sampled("table")


def test_a_policy_must_define_its_noise():
    class Silent(Fair):
        noise = Policy.__dict__["noise"]

    with pytest.raises(UserError, match="Silent must define `noise`"):
        Silent()
