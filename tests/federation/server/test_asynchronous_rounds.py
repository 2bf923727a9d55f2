"""Rounds that wait for nobody: agents of different speed, their staleness, and the same run again in the simulator."""

import math
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import pytest
from in_process_fleet import NAMES, new_run, train
from real_fleet import MDPS, config

from perfedrl.errors import UserError
from perfedrl.experiments.store import load_run
from perfedrl.experiments.training import train as simulate
from perfedrl.federation.agent.config import make_agent_config
from perfedrl.federation.agent.request_handler import Agent
from perfedrl.federation.frames import Frame, decode, encode
from perfedrl.federation.server.answers import Answers
from perfedrl.federation.server.asynchronous_rounds import uploads_by_round
from perfedrl.federation.server.commands import Question
from perfedrl.federation.server.network_config import networked
from perfedrl.federation.server.replay import replay

AFEDPG = {"name": "afedpg", "alpha": 0.5, "beta": 0.1, "m": 4, "delays": "none"}
CONFIG = config("ticks", 12, AFEDPG)


class Crash(Exception):  # noqa: N818
    """A crash of the server."""


class AgentsOfDifferentSpeed:
    """Agents that take so many seconds for an update, on a simulated clock, and hear no question meanwhile.

    As over the network: an answer to a closed question is late, and its agent then hears the open one. `spoil` changes
    the answers of updates; the server crashes in its update of the round `crash`.
    """

    def __init__(self, agents, seconds, spoil=lambda name, data: data, crash=None):
        self.agents, self.seconds, self.spoil, self.crash = agents, dict(zip(NAMES, seconds, strict=True)), spoil, crash
        self.now, self.at_work, self.late, self.rounds = 0.0, {}, {}, {}

    def begin(self, name, question):
        answer = self.agents[name].answer(question)
        new = answer.kind == "upload" and answer.fields["trajectories"] != "0"
        data = encode(answer)
        data = self.spoil(name, data) if question.kind == "update" else data
        self.at_work[name] = self.now + (self.seconds[name] if new else 0.0), question, data

    def __call__(self, kind, frame, without, enough, deadline):
        question, names = decode(frame), [name for name in self.agents if name not in without]
        if kind == "update" and int(question.fields["round"]) == self.crash:
            raise Crash
        late, self.late = self.late, {}
        answers = Answers(tuple(names), late=tuple(late), late_uploads=late)
        while not enough(answers) and answers.silent:
            for name in answers.silent - set(self.at_work):
                self.begin(name, question)
            self.now = min(end for end, _, _ in self.at_work.values())
            for name in [name for name, (end, _, _) in self.at_work.items() if end == self.now]:
                _, asked, data = self.at_work.pop(name)
                if asked is question:
                    answers.frames[name] = data
                elif asked.kind == "update":
                    self.late[name] = data
        self.rounds[kind, int(question.fields["round"])] = self.now
        return answers


@pytest.fixture(scope="module")
def agents(tmp_path_factory):
    """Three agents in this process."""
    made, folder = make_agent_config({"fleet": dict(MDPS)}), tmp_path_factory.mktemp("agents")
    return {name: Agent(made, i, folder / name) for i, name in enumerate(NAMES)}


def trained(tmp_path, wanted, asked, **terms):
    """The finished run, its arrivals and its log."""
    folder = new_run(tmp_path, wanted, **terms)
    train(folder, asked)
    run = load_run(tmp_path / "runs" / wanted.folder)
    return run, run.provenance["federation"]["arrivals"], folder.events()


def same_bits(message, other):
    for x, y in zip(jax.tree.leaves(message), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.reshape(x, np.shape(y)), y)


def test_agents_of_one_speed_have_the_simulators_bits(agents, tmp_path):
    run, arrivals, _ = trained(tmp_path, CONFIG, AgentsOfDifferentSpeed(agents, (1.0, 1.0, 1.0)))
    assert arrivals == [[k, i, k] for k in range(12) for i in range(3)]
    simulated = simulate(CONFIG, tmp_path / "simulated")
    same_bits(run.message, jax.tree.map(lambda x: x[0], simulated.message))
    np.testing.assert_array_equal(run.history.trajectories, simulated.history.trajectories)
    same_bits(run.message, replay(CONFIG, arrivals))


def test_no_round_waits_for_a_slow_agent_and_a_replay_has_the_same_bits(agents, tmp_path):
    fleet = AgentsOfDifferentSpeed(agents, (1.0, 2.6, 7.3))
    run, arrivals, events = trained(tmp_path, CONFIG, fleet)
    assert fleet.rounds["update", 11] <= 12.0, "the fastest agent alone takes a second for each round"
    age = {i: max(k - since for k, agent, since in arrivals if agent == i) for i in range(3)}
    assert age[0] < age[1] < age[2], age
    assert age[2] >= 7
    logged = [
        (e["round"], name, since)
        for e in events
        if e["event"] == "round"
        for name, since in zip(e["agents"], e["since"], strict=True)
    ]
    assert logged == [(k, NAMES[i], since) for k, i, since in arrivals]
    assert not [e for e in events if e["event"] in ("silent", "refused", "stale")]
    assert len(arrivals) == len({(i, since) for _, i, since in arrivals}), "an upload counted twice"
    same_bits(run.message, replay(CONFIG, arrivals))
    assert run.history.trajectories[-1] == round(len(arrivals) * AFEDPG["m"] / 3)
    elsewhere = replay(CONFIG, [[k, i, k] for k in range(12) for i in range(3)])
    assert not np.array_equal(elsewhere.theta, replay(CONFIG, arrivals).theta), "the order matters"


def test_uploads_that_are_too_old_do_not_count_and_nobody_is_blamed(agents, tmp_path):
    fleet = AgentsOfDifferentSpeed(agents, (1.0, 2.6, 4.3))
    run, arrivals, events = trained(tmp_path, CONFIG, fleet, staleness=3, strikes=1)
    assert {(e["agent"]) for e in events if e["event"] == "stale"} == {"agent-2"}
    assert all(e["round"] - e["since"] > 3 for e in events if e["event"] == "stale")
    assert max(k - since for k, _, since in arrivals) <= 3
    assert {i for _, i, _ in arrivals} == {0, 1}
    assert not [e for e in events if e["event"] in ("refused", "quarantined")]
    same_bits(run.message, replay(CONFIG, arrivals))


@pytest.mark.parametrize("lost", [False, True], ids=["crash", "lost checkpoint"])
def test_a_crash_of_the_server_keeps_the_order_of_arrivals(agents, tmp_path, lost):
    folder = new_run(tmp_path, CONFIG)
    with pytest.raises(Crash):
        train(folder, AgentsOfDifferentSpeed(agents, (1.0, 2.6, 7.3), crash=6))
    if lost:
        folder.checkpoint_path.write_bytes(b"nonsense")
    train(folder, AgentsOfDifferentSpeed(agents, (1.0, 2.6, 2.9)))
    run = load_run(tmp_path / "runs" / CONFIG.folder)
    arrivals = run.provenance["federation"]["arrivals"]
    assert {k for k, _, _ in arrivals} == set(range(12))
    same_bits(run.message, replay(CONFIG, arrivals))


def test_what_an_agent_says_of_the_age_of_its_gradient_does_not_count(agents, tmp_path):
    def lie(name, data):
        frame = decode(data)
        said = (
            {"since": np.asarray(1e9, np.float32), "arrived": np.asarray(-3, np.float32)} if name == "agent-1" else {}
        )
        return encode(Frame(frame.kind, frame.fields, {**frame.tensors, **said}))

    run, arrivals, _ = trained(tmp_path, CONFIG, AgentsOfDifferentSpeed(agents, (1.0, 2.6, 7.3), lie))
    assert {i for _, i, _ in arrivals} == {0, 1, 2}
    same_bits(run.message, replay(CONFIG, arrivals))


def test_bad_uploads_are_refused_and_their_agents_begin_anew(agents, tmp_path):
    bad = []

    def spoil(name, data):
        frame = decode(data)
        if name != "agent-1" or len(bad) == 2:
            return data
        bad.append(frame.fields["round"])
        spoiled = {name: np.full_like(x, np.nan) for name, x in frame.tensors.items()}
        return encode(Frame(frame.kind, frame.fields, spoiled))

    run, arrivals, events = trained(tmp_path, CONFIG, AgentsOfDifferentSpeed(agents, (1.0, 2.6, 7.3), spoil))
    assert {e["agent"] for e in events if e["event"] == "refused"} == {"agent-1"}
    assert not [e for e in events if e["event"] == "quarantined"]
    assert 1 in {i for _, i, _ in arrivals}
    same_bits(run.message, replay(CONFIG, arrivals))


def test_agents_that_fail_at_first_count_in_the_same_round(agents, tmp_path, monkeypatch):
    monkeypatch.setattr("perfedrl.federation.server.coordinator.PAUSE", 0.01)
    failed = set()

    def fail(name, data):
        if name in failed:
            return data
        failed.add(name)
        return encode(Frame("error", {"message": "out of order"}))

    wanted = config("ticks", 1, AFEDPG)
    _, arrivals, events = trained(tmp_path, wanted, AgentsOfDifferentSpeed(agents, (1.0, 1.0, 1.0), fail))
    assert arrivals == [[0, i, 0] for i in range(3)]
    assert "repeated" in [e["event"] for e in events]


@cache
def upload(round_):
    return encode(Frame("upload", {"round": str(round_)}, {}))


def test_uploads_are_sorted_by_the_rounds_that_they_name():
    uploads = {"a": upload(4), "b": upload(7), "c": upload(2)}
    assert uploads_by_round(uploads, {}, 7) == {2: {"c": upload(2)}, 4: {"a": upload(4)}, 7: {"b": upload(7)}}
    assert uploads_by_round(uploads, {"a": 4, "c": 1}, 7) == {2: {"c": upload(2)}, 7: {"b": upload(7)}}
    for strange in (b"?", upload(8), upload(-1), upload("9" * 30), upload("x"), upload("")):
        assert uploads_by_round({"a": strange}, {"a": 3}, 7) == {7: {"a": strange}}


def test_a_copy_of_a_late_upload_does_not_close_a_round():
    question = Question("update", 7, b"", frozenset(), frozenset(), 1, received={"a": 4})
    copy, new = (Answers(("a",), late_uploads={"a": upload(k)}) for k in (4, 5))
    assert [question.enough(x) for x in (copy, new, replace(copy, frames={"a": b""}))] == [False, True, True]
    assert not replace(question, received=None).enough(new)


@pytest.mark.parametrize(
    ("settings", "more", "why"),
    [({"delays": "uniform"}, {}, 'set delays = "none"'), ({}, {"participation": 0.67}, "leave participation out")],
)
def test_what_only_a_simulation_can_have_is_rejected(settings, more, why):
    with pytest.raises(UserError, match=why):
        networked(config("ticks", 12, AFEDPG | settings, **more))


def test_only_asynchronous_runs_can_be_replayed():
    with pytest.raises(UserError, match="expected a run of asynchronous agents"):
        replay(config("plain", 2), [])
    assert math.isfinite(replay(config("none", 1, AFEDPG), []).tick)
