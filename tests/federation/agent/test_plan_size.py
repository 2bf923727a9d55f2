"""The size of a server's plan: an agent rejects one that is too large for it before it builds or compiles anything."""

from pathlib import Path

import numpy as np
import pytest
import tomli_w
from tiers import some_slow

from perfedrl.envs import random_mdps as random_mdps_function
from perfedrl.errors import UserError
from perfedrl.experiments.config import make_config, read_config
from perfedrl.federation.agent import local_computation, worker
from perfedrl.federation.agent.config import Limits, make_agent_config, read_plan
from perfedrl.federation.agent.request_handler import Agent
from perfedrl.federation.agent.worker import Worker
from perfedrl.federation.environment_report import agents_bring_environments
from perfedrl.federation.frames import Frame
from perfedrl.federation.server.network_config import networked

MDPS = {"env": "random-mdps", "agents": 2, "states": 3, "actions": 2, "horizon": 3}
ALGORITHM = {"name": "fedavg-pg", "alpha": 0.5, "beta": 0.3, "m": 4}
CONFIGS = Path(__file__).parents[3] / "configs"
SHIPPED = sorted(path.name for path in CONFIGS.glob("*.toml"))
EARLIER = ["gridworld.toml", "lqr.toml", "arc.toml", "classification.toml"]


class Built(Exception):  # noqa: N818
    """Something was built that must not be."""


def built(*_, **__):
    raise Built


def plan(policy=None, **fleet):
    table = {"name": "x", "seeds": [0], "rounds": 2, "fleet": {**MDPS, **fleet}, "policy": policy or {"name": "table"}}
    return tomli_w.dumps({**table, "algorithm": ALGORITHM})


def agent(**limits):
    return make_agent_config({"fleet": dict(MDPS), "limits": limits})


@pytest.fixture
def nothing_is_built(monkeypatch):
    monkeypatch.setattr(np.random, "default_rng", built)  # which every fleet of random agents begins with
    monkeypatch.setattr(worker, "LocalTraining", built)


def test_the_builders_are_watched(nothing_is_built):
    with pytest.raises(Built):
        random_mdps_function(states=3)


TOO_LARGE = {
    "states": ({"states": 4000}, {}, "the plan: it has 4000 states; this agent's limit is states = 1000"),
    "agents": ({"agents": 20_000}, {}, "the plan: its fleet has agents = 20000; this agent's limit is agents = 10000"),
    "held-out agents": (
        {"held_out": 30},
        {"agents": 20},
        "its fleet has held_out = 30; this agent's limit is agents = 20",
    ),
    "memory": (
        {"states": 1000, "agents": 1000},
        {},
        "the plan: this needs about 22.4 GiB of memory, and this agent's limit memory is 4 GiB; the largest array has "
        r"shape 1000 x 2 x 1000; lower states \(1000\) or actions \(2\)",
    ),
}


@pytest.mark.parametrize("case", TOO_LARGE)
def test_a_fleet_that_is_too_large_is_not_built(case, nothing_is_built):
    fleet, limits, why = TOO_LARGE[case]
    chosen = Limits(**limits)
    with pytest.raises(UserError, match=why) as error:
        read_plan(plan(**fleet), agent_without_building(chosen))
    assert "\n" not in str(error.value)


def agent_without_building(limits):
    """An agent with another environment than the plan's, so that nothing random is built for itself."""
    return make_agent_config({"fleet": {"env": "gridworld", "width": 2}, "limits": limits.model_dump()})


def test_the_agent_answers_in_one_sentence(tmp_path, nothing_is_built):
    asked = Frame("prepare", {"run": "r", "generation": "1", "plan": plan(states=4000)}, {})
    answer = Agent(agent_without_building(Limits()), 0, tmp_path / "agent").answer(asked)
    said = "the plan: it has 4000 states; this agent's limit is states = 1000"
    assert (answer.kind, answer.fields["message"]) == ("error", said)


def test_a_policy_that_is_too_large_is_not_drawn(monkeypatch):
    monkeypatch.setattr(worker, "LocalTraining", built)
    wide = {"name": "mlp", "hidden": [40_000, 40_000]}
    fleet = {"env": "arc", "goals": 2, "held_out": 0, "horizon": 3}
    table = {"name": "x", "seeds": [0], "rounds": 2, "fleet": fleet, "policy": wide, "algorithm": ALGORITHM}
    text = tomli_w.dumps({**table, "evaluation": {"name": "monte-carlo"}})
    with pytest.raises(
        UserError, match=r"its policy has 1600\d+ parameters; this agent's limit is parameters = 10000000"
    ):
        Worker(make_agent_config({"fleet": fleet}), 0).training(text)


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"operations": 20}, r"its program has \d+ operations to be compiled; this agent's limit is operations = 20"),
        ({"memory": 1e-7}, r"this needs about .* of memory, and this agent's limit memory is 107 bytes"),
    ],
)
def test_a_program_that_is_too_large_is_not_compiled(limits, why):
    own = agent(**limits) if "operations" in limits else agent()
    training = Worker(own, 0).training(plan())
    training.limits = Limits(**limits)
    for step in (training.prepare, lambda: training.update(training.message, training.state, 0)):
        with pytest.raises(UserError, match=why):
            step()
    assert training._computation.train._compiled is None
    assert training._computation.measure._compiled is None


def test_limits_hold_for_the_agents_own_work_only(nothing_is_built):
    with pytest.raises(UserError, match="4000 states"):
        read_plan(plan(states=4000), agent_without_building(Limits()))
    with pytest.raises(Built):  # the limits are gone after the plan is read
        make_config({**MDPS_CONFIG, "fleet": {**MDPS, "states": 1100}}).experiment  # noqa: B018


MDPS_CONFIG = {"name": "x", "seeds": [0], "rounds": 2, "policy": {"name": "table"}, "algorithm": ALGORITHM}


class Checked(Exception):  # noqa: N818
    """A program is within the limits."""


@pytest.mark.parametrize("name", some_slow(SHIPPED, fast=EARLIER[:1]))
def test_the_default_limits_admit_all_shipped_configs(name, monkeypatch):
    real = local_computation.check_memory

    def check_memory(need):
        real(need)
        raise Checked

    monkeypatch.setattr(local_computation, "check_memory", check_memory)
    config = read_config(CONFIGS / name)
    try:
        config = networked(config)
    except UserError as error:
        pytest.skip(f"not for a network: {error}")
    if agents_bring_environments(config):
        pytest.skip("its agents bring their environments, and nothing of the plan's fleet is built")
    defaults = Limits(trajectories_per_round=10**9).model_dump()
    training = Worker(make_agent_config({"fleet": dict(config.fleet), "limits": defaults}), 0).training(
        config.to_toml()
    )
    for function in (training._computation.train, training._computation.measure):
        with pytest.raises(Checked):
            training._timed(function, training.message, training.state, 0)
