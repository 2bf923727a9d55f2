"""The server's side of a run, without an engine: what counts, who is waited for, what survives."""

import errno
import os
import threading
import tomllib
from dataclasses import replace

import numpy as np
import pytest
from local_engine import NAMES, WANTED, Engine, planned
from real_fleet import MDPS, config

from perfedrl import privacy
from perfedrl.errors import UserError
from perfedrl.experiments import files
from perfedrl.experiments.config import make_config
from perfedrl.experiments.store import load_run
from perfedrl.experiments.training import train as simulate
from perfedrl.federation.agent.config import make_agent_config
from perfedrl.federation.agent.requests import Agent
from perfedrl.federation.frames import Frame, decode, encode
from perfedrl.federation.server.agent_reports import epsilon_in
from perfedrl.federation.server.answers import Answers
from perfedrl.federation.server.rounds import Coordinator
from perfedrl.federation.server.run_folder import Plan, Stale
from perfedrl.simulation.compiled import taking_part


@pytest.fixture(scope="module")
def agents(tmp_path_factory):
    """Three agents in this process."""
    made, folder = make_agent_config({"fleet": dict(MDPS)}), tmp_path_factory.mktemp("agents")
    return {name: Agent(made, i, folder / name) for i, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    return simulate(WANTED, tmp_path_factory.mktemp("simulated"))


def drive(control, engine):
    Coordinator(control.folder, control.next_generation()).run(engine)


def rounds_of(control):
    return [event["round"] for event in control.events() if event["event"] == "round"]


def test_a_run_by_questions_has_the_simulators_bits(agents, simulated, tmp_path):
    control = planned(tmp_path, personalize=20)
    drive(control, Engine(agents))
    run = load_run(tmp_path / "runs" / WANTED.folder)
    np.testing.assert_array_equal(run.message, simulated.message)
    np.testing.assert_allclose(run.history.after, simulated.history.after, rtol=1e-12)
    assert control.progress()["phase"] == "finished"
    assert not control.checkpoint.exists()
    own = [event for event in control.events() if event["event"] == "personalized"]
    assert [event["agent"] for event in own] == list(NAMES)
    personal = f"personal-{control.plan().run}.safetensors"
    assert all((agent.memory.folder / personal).exists() for agent in agents.values())


class Crash(Exception):  # noqa: N818
    """The power goes off."""


def crash(_):
    raise Crash


@pytest.mark.parametrize("at", [("prepare", 0), ("evaluate", 0), ("update", 0), ("update", 2), ("evaluate", 4)])
def test_a_run_goes_on_where_it_stood(agents, simulated, tmp_path, at):
    control = planned(tmp_path)
    with pytest.raises(Crash):
        drive(control, Engine(agents, {at: crash}))
    drive(control, Engine(agents))
    assert rounds_of(control) == list(range(4))
    run = load_run(tmp_path / "runs" / WANTED.folder)
    np.testing.assert_array_equal(run.message, simulated.message)
    np.testing.assert_array_equal(run.history.rounds, [0, 4])


def failing(*names):
    def trouble(answers):
        for name in names:
            answers.frames.pop(name, None)
            answers.failures[name] = "no agent listens"

    return trouble


def silent(*names):
    def trouble(answers):
        for name in names:
            del answers.frames[name]

    return trouble


def test_rounds_close_with_those_who_answer(agents, tmp_path):
    control = planned(tmp_path, min_agents=2)
    engine = Engine(agents, {("update", 1): failing("agent-1"), ("update", 2): silent("agent-0")})
    drive(control, engine)
    present = {event["round"]: event["agents"] for event in control.events() if event["event"] == "round"}
    everybody = list(NAMES)
    assert present == {0: everybody, 1: ["agent-0", "agent-2"], 2: ["agent-1", "agent-2"], 3: everybody}
    told = [(e["event"], e["agent"], e["round"]) for e in control.events() if "agent" in e]
    assert told == [
        ("failure", "agent-1", 1),
        ("silent", "agent-0", 2),
        ("back", "agent-1", 2),
        ("back", "agent-0", 3),
    ]


def test_who_was_silent_is_not_waited_for_until_it_answers(agents, tmp_path):
    control = planned(tmp_path, min_agents=2)
    coordinator = Coordinator(control.folder, control.next_generation())
    waited = []

    def ask(kind, frame, without, enough, deadline):
        answers = Answers(asked=NAMES, frames={"agent-0": b"", "agent-1": b""})
        waited.append(enough(answers))
        return answers

    coordinator._ask(ask, "update", set(), 2)
    coordinator._ask(ask, "update", set(), 2)
    coordinator._notice("update", Answers(asked=NAMES, late=("agent-2",)))
    coordinator.lost -= {"agent-0", "agent-1"}
    coordinator._ask(ask, "update", set(), 2)
    assert waited == [False, True, False]


def test_too_few_answers_are_asked_again_and_then_an_error(agents, tmp_path, monkeypatch):
    monkeypatch.setattr("perfedrl.federation.server.rounds.PAUSE", 0.01)
    tries = []

    def twice(answers):
        tries.append(1)
        if len(tries) < 3:
            failing("agent-2")(answers)

    control, engine = planned(tmp_path), Engine(agents, {("update", 1): twice})
    drive(control, engine)
    assert len(tries) == 3
    asked = [names for kind, round_, names in engine.asked if (kind, round_) == ("update", 1)]
    assert asked == [NAMES, ("agent-2",), ("agent-2",)], "who has answered is not asked again"
    assert rounds_of(control) == [0, 1, 2, 3]
    other = planned(tmp_path / "hopeless", patience=0.05)
    with pytest.raises(
        UserError, match="round 1: 2 of the 3 agents that are needed answered 'update'; agent-2: no agent"
    ):
        drive(other, Engine(agents, {("update", 1): failing("agent-2")}))


def spoil(answers):
    frame = decode(answers.frames["agent-2"])
    bad = {name: np.full_like(x, np.nan) for name, x in frame.tensors.items()}
    answers.frames["agent-2"] = encode(Frame("upload", frame.fields, bad))


def test_a_refused_upload_counts_for_nothing_and_three_are_a_quarantine(agents, tmp_path):
    control = planned(tmp_path, min_agents=2)
    engine = Engine(agents, {("update", k): spoil for k in range(3)})
    drive(control, engine)
    refused = [(e["agent"], e["round"], e["reason"]) for e in control.events() if e["event"] == "refused"]
    assert [x[:2] for x in refused] == [("agent-2", 0), ("agent-2", 1), ("agent-2", 2)]
    assert "not finite" in refused[0][2]
    assert [e["round"] for e in control.events() if e["event"] == "quarantined"] == [2]
    assert ("update", 3, ("agent-0", "agent-1")) in engine.asked


def test_where_all_are_needed_a_refused_upload_ends_the_run_and_fewer_go_on(agents, tmp_path):
    control, engine = planned(tmp_path, patience=60.0), Engine(agents, {("update", 1): spoil})
    with pytest.raises(UserError, match=r"2 of the 3 agents that are needed .*not finite; with --min-agents 2 the run"):
        drive(control, engine)
    assert sum(kind == "update" and round_ == 1 for kind, round_, _ in engine.asked) == 1, (
        "one bad upload is one strike"
    )
    plan = control.plan()
    control.write_plan(replace(plan, terms=replace(plan.terms, min_agents=2)))
    drive(control, Engine(agents, {("update", 1): spoil}))
    assert rounds_of(control) == [0, 1, 2, 3]


def test_a_quarantine_ends_when_a_person_says_so(agents, tmp_path):
    control = planned(tmp_path, min_agents=2)
    trouble = {("update", k): spoil for k in range(3)}
    with pytest.raises(Crash):
        drive(control, Engine(agents, trouble | {("update", 3): crash}))
    shut_out, let_in = Engine(agents, {("update", 3): crash}), Engine(agents)
    with pytest.raises(Crash):
        drive(control, shut_out)
    assert ("update", 3, ("agent-0", "agent-1")) in shut_out.asked
    control.write_plan(replace(control.plan(), released=("agent-2",), since=control.generation() + 1))
    drive(control, let_in)
    assert ("update", 3, NAMES) in let_in.asked


def test_an_agent_that_refuses_the_plan_is_named_at_once(agents, tmp_path):
    def refuse(answers):
        answers.frames["agent-1"] = encode(Frame("error", {"message": "not \x1b[31mtrusted"}))

    with pytest.raises(UserError, match=r"2 of the 3 .*'prepare'; agent-1: not \[31mtrusted; with"):
        drive(planned(tmp_path, patience=60.0), Engine(agents, {("prepare", 0): refuse}))


@pytest.mark.parametrize("said", ["lots", "nan", "-1", "inf"])
def test_what_an_agent_says_beside_its_upload_cannot_hurt(agents, tmp_path, said):
    def lie(answers):
        frame = decode(answers.frames["agent-0"])
        answers.frames["agent-0"] = encode(Frame("upload", {**frame.fields, "epsilon": said}, frame.tensors))
        assert epsilon_in(answers.frames["agent-0"]) is None

    def chat(answers):
        frame = decode(answers.frames["agent-1"])
        more = {**frame.tensors, "after.lies": np.float64(1.0), "after": np.float64(2.0)}
        answers.frames["agent-1"] = encode(Frame("outcomes", frame.fields, more))

    control = planned(tmp_path)
    drive(control, Engine(agents, {("update", 1): lie, ("evaluate", 0): chat}))
    assert rounds_of(control) == [0, 1, 2, 3]
    assert not load_run(tmp_path / "runs" / WANTED.folder).history.outcomes


def test_a_run_that_died_before_it_could_say_that_it_is_finished(agents, tmp_path):
    control, kept = planned(tmp_path), []
    keep = lambda _: kept.append(control.checkpoint.read_bytes())  # noqa: E731
    drive(control, Engine(agents, {("evaluate", 4): keep}))
    for left in (lambda: None, lambda: control.checkpoint.write_bytes(kept[0])):
        left()
        control.show({})
        engine = Engine(agents)
        drive(control, engine)
        assert not engine.asked
        assert control.progress()["phase"] == "finished"
        assert not control.checkpoint.exists()


def test_a_full_disk_is_said_and_the_last_checkpoint_is_intact(agents, simulated, tmp_path, monkeypatch):
    control, real, written = planned(tmp_path), files.os.fsync, []

    def fsync(handle):
        if threading.current_thread() is threading.main_thread() and b"checkpoint" in path_of(handle):
            written.append(1)
            if len(written) == 3:
                raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(files.os, "fsync", fsync)
    with pytest.raises(
        UserError, match="round 2 could not be saved: no space left on device; the last checkpoint is int"
    ):
        drive(control, Engine(agents))
    assert rounds_of(control) == [0]
    assert not [path for path in control.folder.iterdir() if path.name.startswith(".checkpoint")]
    drive(control, Engine(agents))
    run = load_run(tmp_path / "runs" / WANTED.folder)
    np.testing.assert_array_equal(run.message, simulated.message)


def path_of(handle):
    return os.readlink(f"/proc/self/fd/{handle}").encode()


def test_a_job_that_was_replaced_can_neither_write_nor_ask(agents, tmp_path):
    control = planned(tmp_path)
    old = Coordinator(control.folder, control.next_generation())

    def replaced(_):
        control.next_generation()

    with pytest.raises(Stale, match="was replaced"):
        old.run(Engine(agents, {("update", 1): replaced}))
    assert rounds_of(control) == [0]
    drive(control, Engine(agents))
    question = old._question("update")
    answer = agents["agent-0"].answer(decode(question))
    assert answer.kind == "error"
    assert "stale job" in answer.fields["message"]
    with pytest.raises(Stale):
        Coordinator(control.folder, 1)


def test_agents_may_decline_to_tell_what_they_got(tmp_path):
    quiet = make_agent_config({"fleet": dict(MDPS), "tell_outcomes": False})
    agents = {name: Agent(quiet, i, tmp_path / name) for i, name in enumerate(NAMES)}
    wanted = config("quiet", 2)
    control = planned(tmp_path, wanted, personalize=5)
    drive(control, Engine(agents))
    assert np.isnan(load_run(tmp_path / "runs" / wanted.folder).history.after).all()
    assert control.progress()["objective"] is None


def test_robust_aggregation_and_weights_are_the_simulators(agents, tmp_path):
    wanted = config("robust", 2, aggregation={"name": "trimmed-mean", "share": 0.3, "weights": [1, 2, 3]})
    drive(planned(tmp_path, wanted), Engine(agents))
    simulated = simulate(wanted, tmp_path / "simulated")
    np.testing.assert_array_equal(load_run(tmp_path / "runs" / wanted.folder).message, simulated.message)


def test_the_privacy_loss_is_told_in_every_round(agents, tmp_path):
    wanted = config("private", 2, privacy={"clip": 0.1, "noise": 2.0})
    control = planned(tmp_path, wanted)
    drive(control, Engine(agents))
    told = [event["epsilon"] for event in control.events() if event["event"] == "round"]
    assert told == [privacy.loss(2.0, k, 1e-5) for k in (1, 2)]
    assert control.progress()["epsilon"] == told[-1]
    exposed = load_run(tmp_path / "runs" / wanted.folder).message
    assert not np.array_equal(exposed, simulate(wanted, tmp_path / "simulated").message), (
        "noise that the server can guess"
    )


def test_damage_is_one_sentence(agents, tmp_path):
    control = planned(tmp_path)
    with pytest.raises(Crash):
        drive(control, Engine(agents, {("update", 2): crash}))
    control.checkpoint.write_bytes(b"nonsense")
    with pytest.raises(UserError, match="not a readable safetensors"):
        drive(control, Engine(agents))
    (control.folder / "plan.json").write_text("{")
    with pytest.raises(UserError, match=r"plan\.json is damaged"):
        drive(control, Engine(agents))


def test_a_checkpoint_of_another_run_or_shape_is_refused(agents, tmp_path):
    control = planned(tmp_path)
    with pytest.raises(Crash):
        drive(control, Engine(agents, {("update", 2): crash}))
    plan = control.plan()
    control.write_plan(Plan("another", *(getattr(plan, name) for name in ("config", "agents", "terms", "runs"))))
    with pytest.raises(UserError, match="of another run"):
        drive(control, Engine(agents))
    other = config("first", 4, fleet={**MDPS, "states": 7})
    control.write_plan(Plan(plan.run, other.to_toml(), plan.agents, plan.terms, plan.runs))
    with pytest.raises(UserError, match="does not fit the config"):
        drive(control, Engine(agents))


def test_a_sampled_run_asks_those_who_are_drawn_and_has_the_simulators_bits(agents, tmp_path):
    wanted = make_config({**tomllib.loads(WANTED.to_toml()), "participation": 0.67})
    control, engine = planned(tmp_path, wanted), Engine(agents)
    drive(control, engine)
    drawn = [tuple(NAMES[i] for i in taking_part(wanted.seeds[0], k, 3, 2).tolist()) for k in range(4)]
    assert len(set(drawn)) > 1
    assert [names for kind, _, names in engine.asked if kind == "update"] == drawn
    assert all(names == NAMES for kind, _, names in engine.asked if kind == "evaluate")
    run, simulated = load_run(tmp_path / "runs" / wanted.folder), simulate(wanted, tmp_path / "simulated")
    np.testing.assert_array_equal(run.message, simulated.message)
    np.testing.assert_array_equal(run.history.trajectories, simulated.history.trajectories)
    np.testing.assert_array_equal(run.history.bytes, simulated.history.bytes)
