"""The contract of tasks: members have defaults, and fleets reject objects that are no tasks."""

import dataclasses
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from perfedrl.contracts import members
from perfedrl.envs import DataTask, PlayedTask, Task, fleet
from perfedrl.envs.base import BaseTask, check_task
from perfedrl.envs.fleet import Roster
from perfedrl.errors import UserError
from perfedrl.types import Trajectory


class Drift(Task):
    """The shortest task, with a goal as a required field before another field."""

    goal: np.ndarray
    speed: float
    horizon: int = eqx.field(static=True, default=3)

    discount, reset_noise, step_noise = 0.9, 0, 0

    def reset(self, u):
        return jnp.zeros(2)

    def observe(self, state):
        return state

    def step(self, state, action, u):
        return state + self.speed * action, jnp.zeros(()), False


@dataclasses.dataclass(frozen=True)
class Robot(PlayedTask):
    """The shortest task that is played in Python."""

    horizon: int = 3
    discount: float = 0.9

    def sampler(self, policy):
        return SimpleNamespace(traceable=False)

    def outline(self, m):
        return Trajectory(*[np.zeros((m, 4))] * 4)


OPTIONAL = sorted(set(members(BaseTask)) - {"horizon", "discount", "outcomes", "settings"})


@pytest.mark.parametrize("name", OPTIONAL)
def test_a_member_that_a_task_lacks_is_none(name):
    assert getattr(Robot(), name) is None
    assert name == "goal" or getattr(Drift(np.zeros(2), 1.0), name) is None


def test_tasks_have_no_outcomes_by_default_and_traced_ones_list_their_leaves():
    task = Drift(np.ones(2), 0.5)
    episode = Trajectory(*[np.zeros(4)] * 4)
    assert task.outcomes(episode) == Robot().outcomes(episode) == {}
    assert {name: x.tolist() for name, x in task.settings.items()} == {"goal": [1, 1], "speed": 0.5}
    assert Robot().settings == {}
    Robot().close()


def test_a_field_with_the_name_of_a_member_is_required_unless_it_has_a_default_of_its_own():
    with pytest.raises(TypeError, match="goal"):
        Drift(speed=1.0)
    stacked = fleet([Drift(np.zeros(2), 1.0), Drift(np.ones(2), 2.0)]).train
    assert [x.shape for x in jax.tree.leaves(stacked)] == [(2, 2), (2,)]


def test_a_roster_states_every_member_of_the_contract_itself():
    assert set(members(PlayedTask)) <= set(vars(Roster))
    assert "__getattr__" not in vars(Roster)
    assert (Roster([Robot(7)]).horizon, Roster([Robot(7)]).actions) == (7, None)


REQUIRED = {"horizon": 3, "discount": 0.9, "reset_noise": 0, "step_noise": 0}


@pytest.mark.parametrize("missing", REQUIRED)
def test_a_task_must_define_its_required_members(missing):
    methods = dict.fromkeys(("reset", "observe", "step"), lambda self, *_: None)
    given = {name: value for name, value in REQUIRED.items() if name != missing}
    with pytest.raises(UserError, match=f"Unfinished must define `{missing}`"):
        type(Task)("Unfinished", (Task,), {**methods, **given})()


def test_an_object_that_is_no_task_is_rejected_with_the_classes_to_subclass():
    with pytest.raises(UserError, match=r"agent 0 is a SimpleNamespace.*subclass perfedrl\.envs\.Task"):
        check_task(SimpleNamespace(horizon=3, discount=0.9), "agent 0")
    assert not issubclass(DataTask, Task)
