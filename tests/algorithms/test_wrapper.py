"""`Wrapper` delegates the whole contract of algorithms, explicitly."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from contract_members import public_members

import perfedrl as pf
from perfedrl.algorithms import Algorithm, Wrapper

MEMBERS = sorted(public_members(Algorithm))
START = jnp.zeros((9, 4))


class Recorded(pf.FedAvgPG):
    """An algorithm whose optional members differ from all defaults."""

    federated, serves_unseen, uploads_may_be_empty = True, False, True
    learns_step_size, personalization_steps, curvature_trajectories, smallest_curvature_batch = True, 3, 5, 7
    uploads_whole_messages, least_agents, step_sizes = False, 4, {"alpha": 0.25}

    def trajectories_after(self, rounds):
        return 11 * rounds

    def adaptation_step_size(self, message):
        return 0.125

    def deployment_step_size(self, message):
        return 0.375

    def adaptation_step(self, agent, theta, alpha, key, m):
        return "stepped", agent, theta, alpha, key, m

    def unchanged_upload(self, message):
        return "unchanged", message

    def with_personal_part(self, message, state):
        return message, state

    def diagnostics(self, state):
        return {"state": state}

    def check_supports(self, fleet, policy):
        raise pf.UserError("supports")

    def check_participation(self, agents, participants, weights):
        raise pf.UserError("participation")


def test_the_wrapper_defines_every_member_of_the_contract_itself():
    assert set(MEMBERS) <= public_members(Wrapper)
    assert not [kind for kind in (Wrapper, *Wrapper.__subclasses__()) if "__getattr__" in vars(kind)]


@pytest.mark.parametrize("name", MEMBERS)
def test_a_member_of_the_contract_is_documented(name):
    if isinstance(vars(Algorithm)[name], bool):
        after = inspect.getsource(Algorithm).split(f"\n    {name}: ")[1]
        assert after.splitlines()[1].strip().startswith('"""')
    else:
        assert inspect.getdoc(getattr(Algorithm, name))


def test_a_wrapper_that_changes_nothing_answers_as_the_inner_algorithm():
    inner = Recorded(0.5, 0.3)
    wrapper = Wrapper(inner)
    for name in ("federated", "serves_unseen", "uploads_may_be_empty", "learns_step_size", "personalization_steps"):
        assert getattr(wrapper, name) == getattr(inner, name)
    for name in ("curvature_trajectories", "smallest_curvature_batch", "uploads_whole_messages", "least_agents"):
        assert getattr(wrapper, name) == getattr(inner, name)
    assert wrapper.step_sizes == {"alpha": 0.25}
    assert wrapper.trajectories_per_round == 150
    assert wrapper.trajectories_after(2) == 22
    assert (wrapper.adaptation_step_size(START), wrapper.deployment_step_size(START)) == (0.125, 0.375)
    assert wrapper.adaptation_step("agent", START, 0.5, "key", 3)[0] == "stepped"
    assert wrapper.unchanged_upload("message") == ("unchanged", "message")
    assert wrapper.with_personal_part("message", "state") == ("message", "state")
    assert wrapper.diagnostics(START)["state"] is START
    with pytest.raises(pf.UserError, match="supports"):
        wrapper.check_supports(pf.gridworld(), pf.TableSoftmax(25, 4))
    with pytest.raises(pf.UserError, match="participation"):
        wrapper.check_participation(4, 4, None)
    assert jax.tree.leaves(wrapper) == jax.tree.leaves(inner)


def test_an_attribute_outside_the_contract_is_not_passed_through():
    with pytest.raises(AttributeError):
        Wrapper(pf.FedAvgPG(0.5, 0.3)).beta  # noqa: B018
