"""Whole runs of a server and two agents under drawn faults end with the undisturbed result; a seed repeats each.

The files of all three machines fail, processes are killed, and the clock is wrong. A job that fails is followed by
another one, as the operator would start it.
"""

import pytest
from fault_injection import KINDS, FaultPlan, Killed, drawn, wrong_clock
from little_fleet import AGENT, CONFIG, NAMES, OPERATOR, UncertifiedFleet, simulated_surroundings, start_job
from tiers import some_slow

from perfedrl.errors import UserError
from perfedrl.experiments.store import load_run
from perfedrl.federation.agent.request_handler import Agent
from perfedrl.federation.frames import decode, encode
from perfedrl.federation.server.answers import Answers

CALLS, RATE, MOST_JOBS = 2000, 0.04, 200


def trained(folder, plans):
    """Train with a fault plan for each machine; return the result and the answers that agents gave."""
    fleet, given, jobs = UncertifiedFleet(folder / "server"), {}, 0
    for name in ("server", *NAMES):
        (folder / name).mkdir(parents=True)

    def asked(name, frame):
        plan = plans[name]
        try:
            with plan.below(folder / name):
                reply = Agent(AGENT, NAMES.index(name), folder / name / "agent").answer(decode(frame))
        except (Killed, UserError):
            plan.dead = False  # it is started again
            return None
        return encode(reply)

    def ask(kind, frame, without, enough, deadline):
        answers = Answers(tuple(name for name in NAMES if name not in without))
        for name in answers.asked:
            reply = asked(name, frame)
            if reply is None:
                answers.failures[name] = "the agent is gone"
                continue
            answers.frames[name] = reply
            if decode(reply).kind == "upload":
                about = name, decode(frame).fields["run"], decode(frame).fields["round"]
                given.setdefault(about, set()).add(decode(reply).tensors["theta"].tobytes())
        enough(answers)
        return answers

    while jobs < MOST_JOBS:
        jobs += 1
        try:
            with plans["server"].below(folder / "server"):
                start_job(fleet, OPERATOR, ask)
            return load_run(fleet.runs / CONFIG.folder, CONFIG), given
        except (Killed, UserError, OSError):
            plans["server"].dead = False
    raise AssertionError(f"not finished after {jobs} jobs")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    with simulated_surroundings():
        return trained(tmp_path_factory.mktemp("undisturbed"), {name: FaultPlan() for name in ("server", *NAMES)})


@pytest.mark.parametrize("seed", some_slow(range(100), fast=range(4)))
def test_a_run_under_drawn_faults_ends_with_the_undisturbed_result(tmp_path, undisturbed, seed):
    plans = {name: drawn(3 * seed + i, CALLS, RATE, KINDS) for i, name in enumerate(("server", *NAMES))}
    print(f"seed {seed}: {plans}")  # which pytest shows if the test fails
    with simulated_surroundings(), wrong_clock((-1e8, 0.0, 1e8)):
        run, given = trained(tmp_path, plans)
    assert run.message.tobytes() == undisturbed[0].message.tobytes()
    assert run.history.after.tobytes() == undisturbed[0].history.after.tobytes()
    assert all(len(answers) == 1 for answers in given.values()), "two answers to the same question"
    assert any(plan.struck for plan in plans.values()), "nothing failed"


def test_a_plan_is_repeated_by_its_seed_and_by_its_text():
    plan = drawn(3, 100, 0.1)
    assert plan.faults == drawn(3, 100, 0.1).faults != drawn(4, 100, 0.1).faults
    assert eval(repr(plan)).faults == plan.faults
