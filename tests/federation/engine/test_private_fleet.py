"""Agents with a privacy budget in a real fleet over TLS: losses add up over runs, and a spent budget ends uploads."""

import pytest
import real_fleet

from perfedrl import privacy
from perfedrl.errors import UserError

pytestmark = pytest.mark.network

NOISE = 4.0


def loss(uploads):
    return privacy.loss_of_cost(uploads * privacy.concentrated_cost(NOISE), 1e-5)


def test_agents_tell_a_loss_that_adds_up_over_runs_until_their_budget_is_spent(tmp_path):
    own = f"[privacy]\nleast_noise = {NOISE}\nepsilon = {loss(3)!r}\n"
    steps = {"name": "fedavg-pg", "alpha": 0.5, "beta": 0.3, "m": 2}

    def private(name, rounds):
        return real_fleet.config(name, rounds, steps, privacy={"clip": 0.1, "noise": NOISE})

    with real_fleet.running_fleet(tmp_path, agent=real_fleet.AGENT + own) as fleet:
        told = []
        for wanted in (private("one", 2), private("two", 1)):
            _, events = real_fleet.train(fleet, wanted)
            told += [event["epsilon"] for event in events if event["event"] == "round"]
        assert told == [loss(1), loss(2), loss(3)]
        with pytest.raises(UserError, match="privacy budget is spent"):
            real_fleet.train(fleet, private("three", 1), patience=1.0)
        with pytest.raises(UserError, match=r"no table \[privacy\]"):
            real_fleet.train(fleet, real_fleet.config("open", 1, steps))
    said = (fleet.folder / "agent-0.out").read_text()
    assert "agent 0: uploads with noise only: epsilon 0 of" in said
    assert f"epsilon {loss(3):.4g} of {loss(3):g} at delta 1e-05 over the agent's lifetime" in said
