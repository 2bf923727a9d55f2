"""The coordinator with agents in this process: the simulator's bits, crashes, bad uploads, damaged files."""

import errno
import os
import sys
import threading
import tomllib
from dataclasses import replace

import numpy as np
import poles
import pytest
from in_process_fleet import CONFIG, NAMES, InProcessAgents, ask_honest_agents, new_run, silent, train
from real_fleet import MDPS, config

from perfedrl import privacy
from perfedrl.errors import UserError
from perfedrl.experiments import files, own_code
from perfedrl.experiments.config import make_config, parse_config, read_config
from perfedrl.experiments.store import load_run
from perfedrl.experiments.training import train as simulate
from perfedrl.federation.agent.config import make_agent_config
from perfedrl.federation.agent.request_handler import Agent
from perfedrl.federation.frames import Frame, decode, encode
from perfedrl.federation.server.answers import epsilon_in
from perfedrl.federation.server.coordinator import Coordinator
from perfedrl.federation.server.network_config import networked
from perfedrl.federation.server.run_folder import RunSpec, StaleJob
from perfedrl.simulation.keys import draw_participants
from perfedrl.simulation.observers import Observer


@pytest.fixture(scope="module")
def agents(tmp_path_factory):
    """Three agents in this process."""
    made, folder = make_agent_config({"fleet": dict(MDPS)}), tmp_path_factory.mktemp("agents")
    return {name: Agent(made, i, folder / name) for i, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    return simulate(CONFIG, tmp_path_factory.mktemp("simulated"))


def rounds_of(folder):
    return [event["round"] for event in folder.events() if event["event"] == "round"]


def test_a_run_has_the_simulators_bits(agents, simulated, tmp_path):
    folder = new_run(tmp_path, personalize=20)
    train(folder, InProcessAgents(agents))
    run = load_run(tmp_path / "runs" / CONFIG.folder)
    np.testing.assert_array_equal(run.message, simulated.message)
    np.testing.assert_allclose(run.history.after, simulated.history.after, rtol=1e-12)
    assert folder.progress()["phase"] == "finished"
    assert not folder.checkpoint_path.exists()
    own = [event for event in folder.events() if event["event"] == "personalized"]
    assert [event["agent"] for event in own] == list(NAMES)
    personal = f"personal-{folder.spec().run}.safetensors"
    assert all((agent.store.folder / personal).exists() for agent in agents.values())


class Record(Observer):
    """Records what an observer is told."""

    def __init__(self):
        self.told = []

    def on_start(self, state):
        self.told.append(("start", state.name, state.round, state.rounds))

    def on_evaluation(self, state):
        self.told.append(("evaluation", state.round, state.rounds, state.history.rounds.tolist()))


def test_observers_are_told_of_every_evaluation(tmp_path):
    folder, record = new_run(tmp_path), Record()
    train(folder, ask_honest_agents, [record])
    evaluations = [("evaluation", 0, 4, [0]), ("evaluation", 4, 4, [0, 4])]
    assert record.told == [("start", CONFIG.name, 0, 4), *evaluations]
    assert folder.progress()["objective"] == 1.5, "the presenter is an observer"


class Crash(Exception):  # noqa: N818
    """A crash of the server."""


def crash(_):
    raise Crash


@pytest.mark.parametrize("at", [("prepare", 0), ("evaluate", 0), ("update", 0), ("update", 2), ("evaluate", 4)])
def test_a_run_continues_after_a_crash_and_has_the_simulators_bits(agents, simulated, tmp_path, at):
    folder = new_run(tmp_path)
    with pytest.raises(Crash):
        train(folder, InProcessAgents(agents, {at: crash}))
    train(folder, InProcessAgents(agents))
    assert rounds_of(folder) == list(range(4))
    run = load_run(tmp_path / "runs" / CONFIG.folder)
    np.testing.assert_array_equal(run.message, simulated.message)
    np.testing.assert_array_equal(run.history.rounds, [0, 4])


def failing(*names):
    def trouble(answers):
        for name in names:
            answers.frames.pop(name, None)
            answers.failures[name] = "no agent listens"

    return trouble


def test_rounds_close_with_the_agents_that_answer(agents, tmp_path):
    folder = new_run(tmp_path, min_agents=2)
    engine = InProcessAgents(agents, {("update", 1): failing("agent-1"), ("update", 2): silent("agent-0")})
    train(folder, engine)
    present = {event["round"]: event["agents"] for event in folder.events() if event["event"] == "round"}
    everybody = list(NAMES)
    assert present == {0: everybody, 1: ["agent-0", "agent-2"], 2: ["agent-1", "agent-2"], 3: everybody}
    told = [(e["event"], e["agent"], e["round"]) for e in folder.events() if "agent" in e]
    assert told == [
        ("failure", "agent-1", 1),
        ("silent", "agent-0", 2),
        ("back", "agent-1", 2),
        ("back", "agent-0", 3),
    ]


def test_too_few_answers_are_requested_again_and_then_an_error(agents, tmp_path, monkeypatch):
    monkeypatch.setattr("perfedrl.federation.server.coordinator.PAUSE", 0.01)
    tries = []

    def twice(answers):
        tries.append(1)
        if len(tries) < 3:
            failing("agent-2")(answers)

    folder, engine = new_run(tmp_path), InProcessAgents(agents, {("update", 1): twice})
    train(folder, engine)
    assert len(tries) == 3
    asked = [names for kind, round_, names in engine.asked if (kind, round_) == ("update", 1)]
    assert asked == [NAMES, ("agent-2",), ("agent-2",)], "an agent that has answered is not asked again"
    assert rounds_of(folder) == [0, 1, 2, 3]
    other = new_run(tmp_path / "hopeless", patience=0.05)
    why = "round 1: expected answers to 'update' from 3 agents, got 2; agent-2: no agent listens"
    with pytest.raises(UserError, match=why):
        train(other, InProcessAgents(agents, {("update", 1): failing("agent-2")}))


def spoil(answers):
    frame = decode(answers.frames["agent-2"])
    bad = {name: np.full_like(x, np.nan) for name, x in frame.tensors.items()}
    answers.frames["agent-2"] = encode(Frame("upload", frame.fields, bad))


def test_a_rejected_upload_does_not_count_and_three_lead_to_quarantine(agents, tmp_path):
    folder = new_run(tmp_path, min_agents=2)
    engine = InProcessAgents(agents, {("update", k): spoil for k in range(3)})
    train(folder, engine)
    refused = [(e["agent"], e["round"], e["reason"]) for e in folder.events() if e["event"] == "refused"]
    assert [x[:2] for x in refused] == [("agent-2", 0), ("agent-2", 1), ("agent-2", 2)]
    assert "not finite" in refused[0][2]
    assert [e["round"] for e in folder.events() if e["event"] == "quarantined"] == [2]
    assert ("update", 3, ("agent-0", "agent-1")) in engine.asked


def test_a_rejected_upload_ends_the_run_if_all_agents_are_needed(agents, tmp_path):
    folder, engine = new_run(tmp_path, patience=60.0), InProcessAgents(agents, {("update", 1): spoil})
    with pytest.raises(
        UserError, match=r"from 3 agents, got 2; .*not finite; to continue with fewer, use --min-agents 2"
    ):
        train(folder, engine)
    assert sum(kind == "update" and round_ == 1 for kind, round_, _ in engine.asked) == 1, (
        "one bad upload is one strike"
    )
    spec = folder.spec()
    folder.write_spec(replace(spec, terms=replace(spec.terms, min_agents=2)))
    train(folder, InProcessAgents(agents, {("update", 1): spoil}))
    assert rounds_of(folder) == [0, 1, 2, 3]


def test_a_released_agent_leaves_quarantine(agents, tmp_path):
    folder = new_run(tmp_path, min_agents=2)
    trouble = {("update", k): spoil for k in range(3)}
    with pytest.raises(Crash):
        train(folder, InProcessAgents(agents, trouble | {("update", 3): crash}))
    shut_out, let_in = InProcessAgents(agents, {("update", 3): crash}), InProcessAgents(agents)
    with pytest.raises(Crash):
        train(folder, shut_out)
    assert ("update", 3, ("agent-0", "agent-1")) in shut_out.asked
    folder.write_spec(replace(folder.spec(), released=("agent-2",), since=folder.generation() + 1))
    train(folder, let_in)
    assert ("update", 3, NAMES) in let_in.asked


def test_an_agent_that_rejects_the_plan_is_named_at_once(agents, tmp_path):
    def refuse(answers):
        answers.frames["agent-1"] = encode(Frame("error", {"message": "not \x1b[31mtrusted"}))

    with pytest.raises(UserError, match=r"'prepare' from 3 agents, got 2; agent-1: not \[31mtrusted; to continue"):
        train(new_run(tmp_path, patience=60.0), InProcessAgents(agents, {("prepare", 0): refuse}))


@pytest.mark.parametrize("said", ["lots", "nan", "-1", "-inf"])
def test_invalid_reports_beside_an_upload_are_ignored(agents, tmp_path, said):
    def lie(answers):
        frame = decode(answers.frames["agent-0"])
        answers.frames["agent-0"] = encode(Frame("upload", {**frame.fields, "epsilon": said}, frame.tensors))
        assert epsilon_in(answers.frames["agent-0"]) is None

    def chat(answers):
        frame = decode(answers.frames["agent-1"])
        more = {**frame.tensors, "after.lies": np.float64(1.0), "after": np.float64(2.0)}
        answers.frames["agent-1"] = encode(Frame("outcomes", frame.fields, more))

    folder = new_run(tmp_path)
    train(folder, InProcessAgents(agents, {("update", 1): lie, ("evaluate", 0): chat}))
    assert rounds_of(folder) == [0, 1, 2, 3]
    assert not load_run(tmp_path / "runs" / CONFIG.folder).history.outcomes


def test_a_return_that_no_episode_can_have_does_not_reach_the_history(agents, tmp_path):
    def boast(answers):
        frame = decode(answers.frames["agent-1"])
        more = {**frame.tensors, "after.return": np.asarray(1e300)}
        answers.frames["agent-1"] = encode(Frame("outcomes", frame.fields, more))

    folder = new_run(tmp_path)
    train(folder, InProcessAgents(agents, {("evaluate", 4): boast}))
    after = load_run(tmp_path / "runs" / CONFIG.folder).history.after[0]
    assert np.isfinite(after).tolist() == [[True, True, True], [True, False, True]]
    assert [e["agent"] for e in folder.events() if e["event"] == "false outcomes"] == ["agent-1"]
    assert folder.progress()["median"] == np.median(after[1][[0, 2]])


def test_a_saved_run_is_reported_by_the_next_job(agents, tmp_path):
    folder, kept = new_run(tmp_path), []

    def keep(_):
        kept.append(folder.checkpoint_path.read_bytes())

    train(folder, InProcessAgents(agents, {("evaluate", 4): keep}))
    for left in (lambda: None, lambda: folder.checkpoint_path.write_bytes(kept[0])):
        left()
        folder.write_progress({})
        engine = InProcessAgents(agents)
        train(folder, engine)
        assert not engine.asked
        assert folder.progress()["phase"] == "finished"
        assert not folder.checkpoint_path.exists()


def test_a_full_disk_is_reported_and_the_last_checkpoint_is_intact(agents, simulated, tmp_path, monkeypatch):
    folder, real, written = new_run(tmp_path), files.os.fsync, []

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
        train(folder, InProcessAgents(agents))
    assert rounds_of(folder) == [0]
    assert not [path for path in folder.path.iterdir() if path.name.startswith(".checkpoint")]
    train(folder, InProcessAgents(agents))
    run = load_run(tmp_path / "runs" / CONFIG.folder)
    np.testing.assert_array_equal(run.message, simulated.message)


def path_of(handle):
    return os.readlink(f"/proc/self/fd/{handle}").encode()


def test_a_replaced_job_can_neither_write_nor_get_an_answer(agents, tmp_path):
    folder = new_run(tmp_path)

    def replaced(_):
        folder.next_generation()

    engine = InProcessAgents(agents, {("update", 1): replaced})
    old = Coordinator(folder.path, folder.next_generation())._open(engine)
    with pytest.raises(StaleJob, match="was replaced"):
        old.train(engine)
    assert rounds_of(folder) == [0]
    train(folder, InProcessAgents(agents))
    question = old.machine.frame(old.state, "update")
    answer = agents["agent-0"].answer(decode(question))
    assert answer.kind == "error"
    assert "stale job" in answer.fields["message"]
    with pytest.raises(StaleJob):
        Coordinator(folder.path, 1)


@pytest.mark.slow
def test_agents_may_decline_to_report_outcomes(tmp_path):
    quiet = make_agent_config({"fleet": dict(MDPS), "tell_outcomes": False})
    agents = {name: Agent(quiet, i, tmp_path / name) for i, name in enumerate(NAMES)}
    wanted = config("quiet", 2)
    folder = new_run(tmp_path, wanted, personalize=5)
    train(folder, InProcessAgents(agents))
    assert np.isnan(load_run(tmp_path / "runs" / wanted.folder).history.after).all()
    assert folder.progress()["objective"] is None


def test_robust_aggregation_and_weights_have_the_simulators_bits(agents, tmp_path):
    wanted = config("robust", 2, aggregation={"name": "trimmed-mean", "share": 0.3, "weights": [1, 2, 3]})
    train(new_run(tmp_path, wanted), InProcessAgents(agents))
    simulated = simulate(wanted, tmp_path / "simulated")
    np.testing.assert_array_equal(load_run(tmp_path / "runs" / wanted.folder).message, simulated.message)


def test_a_run_with_the_networks_own_default_has_the_bits_of_its_saved_config(agents, tmp_path):
    wanted = networked(config("default", 3))
    train(new_run(tmp_path, wanted), InProcessAgents(agents))
    run = load_run(tmp_path / "runs" / wanted.folder)
    assert run.config.aggregation["name"] == "geometric-median"
    simulated = simulate(read_config(run.folder / "config.toml"), tmp_path / "simulated")
    np.testing.assert_array_equal(run.message, simulated.message)
    assert not np.array_equal(run.message, simulate(config("default", 3), tmp_path / "simulated").message)


def test_a_run_that_starts_from_another_has_the_simulators_bits_and_agents_read_no_file(agents, tmp_path):
    source = simulate(config("source", 1), tmp_path / "source")
    wanted = networked(config("warm", 2, start=os.path.relpath(source.folder)))
    folder, engine = new_run(tmp_path, wanted), InProcessAgents(agents)
    train(folder, engine)
    assert tomllib.loads(folder.spec().config)["start"]["path"] == str(source.folder.resolve())
    run, simulated = load_run(tmp_path / "runs" / wanted.folder), simulate(wanted, tmp_path / "simulated")
    np.testing.assert_array_equal(run.message, simulated.message)
    np.testing.assert_allclose(run.history.before[0, 0], source.history.before[0, -1], rtol=1e-6)


def test_a_run_that_keeps_its_best_parameters_has_the_simulators_bits(agents, tmp_path):
    """Steps so long that the first evaluation is the best, which was before a crash; agents personalize from there."""
    steps = {"name": "fedavg-pg", "alpha": 50.0, "beta": 3.0, "local_steps": 1, "m": 1}
    wanted = config("best", 4, steps, keep="best", evaluate_every=1)
    folder = new_run(tmp_path, wanted, personalize=5)
    with pytest.raises(Crash):
        train(folder, InProcessAgents(agents, {("update", 3): crash}))
    train(folder, InProcessAgents(agents))
    run, simulated = load_run(tmp_path / "runs" / wanted.folder), simulate(wanted, tmp_path / "simulated")
    np.testing.assert_array_equal(run.params, simulated.params)
    np.testing.assert_array_equal(run.at_end.params, simulated.at_end.params)
    assert not np.array_equal(run.params, run.at_end.params)
    own = [event["before.return"] for event in folder.events() if event["event"] == "personalized"]
    np.testing.assert_allclose(own, run.history.before[0, 0], rtol=1e-6)


def test_agents_of_several_clusters_have_the_simulators_bits_and_none_is_refused(agents, tmp_path):
    steps = {"alpha": 0.5, "beta": 5.0, "local_steps": 2, "m": 5, "m_choose": 3}
    wanted = make_config({**tomllib.loads(CONFIG.to_toml()), "algorithm": {"name": "clustered", **steps}})
    folder = new_run(tmp_path, wanted)
    train(folder, InProcessAgents(agents))
    assert not [event for event in folder.events() if event["event"] == "refused"]
    run, simulated = load_run(tmp_path / "runs" / wanted.folder), simulate(wanted, tmp_path / "simulated")
    np.testing.assert_array_equal(run.message.theta, simulated.message.theta)
    np.testing.assert_array_equal(run.message.members, simulated.message.members)
    assert np.ptp(run.message.theta, axis=1).max() > 0.1, "the clusters differ"


@pytest.mark.slow
def test_the_privacy_loss_is_logged_in_every_round(tmp_path):
    made = make_agent_config({"fleet": dict(MDPS)})
    agents = {name: Agent(made, i, tmp_path / name) for i, name in enumerate(NAMES)}
    wanted = config("private", 2, privacy={"clip": 0.1, "noise": 2.0})
    folder = new_run(tmp_path, wanted)
    train(folder, InProcessAgents(agents))
    told = [event["epsilon"] for event in folder.events() if event["event"] == "round"]
    assert told == [privacy.loss_of_cost(k * privacy.concentrated_cost(2.0), 1e-5) for k in (1, 2)]
    assert folder.progress()["epsilon"] == told[-1]
    exposed = load_run(tmp_path / "runs" / wanted.folder).message
    assert not np.array_equal(exposed, simulate(wanted, tmp_path / "simulated").message), (
        "the server could predict the noise"
    )


def test_damaged_files_are_one_sentence(agents, tmp_path):
    folder = new_run(tmp_path)
    with pytest.raises(Crash):
        train(folder, InProcessAgents(agents, {("update", 2): crash}))
    folder.checkpoint_path.write_bytes(b"nonsense")
    (folder.path / "earlier.safetensors").unlink()
    with pytest.raises(UserError, match=r"checkpoint\.safetensors is damaged"):
        train(folder, InProcessAgents(agents))
    (folder.path / "plan.json").write_text("{")
    with pytest.raises(UserError, match=r"plan\.json is damaged"):
        train(folder, InProcessAgents(agents))


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_server_that_lost_its_last_checkpoint_ends_with_the_simulators_bits(agents, simulated, tmp_path, lost):
    folder = new_run(tmp_path, patience=0.1)  # so that a refused round ends the test at once
    with pytest.raises(Crash):
        train(folder, InProcessAgents(agents, {("update", lost): crash}))
    folder.checkpoint_path.write_bytes(b"nonsense")
    train(folder, InProcessAgents(agents))
    np.testing.assert_array_equal(load_run(tmp_path / "runs" / CONFIG.folder).message, simulated.message)
    assert "damaged checkpoint" in [event["event"] for event in folder.events()]


def test_a_job_finds_modules_where_the_training_was_started(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    folder, mine = new_run(tmp_path), tmp_path / "mine"
    mine.mkdir()
    own = CONFIG.to_toml().replace('name = "table"', 'name = "policies_of_mine:table"')
    folder.write_spec(replace(folder.spec(), config=own, folders=(str(mine),)))
    why = rf"the server's job .* 'policies_of_mine:table' .* looked for policies_of_mine\.py in .*{mine}"
    with pytest.raises(UserError, match=why):
        train(folder, ask_honest_agents)
    (mine / "policies_of_mine.py").write_text("from perfedrl.policies import table\n")
    train(folder, ask_honest_agents)
    assert folder.progress()["phase"] == "finished"


def test_a_job_saves_the_run_where_it_is_expected_although_it_finds_more_code(tmp_path, monkeypatch):
    """The server may have modules of the user's own that `train` does not find: they count for no digest there."""
    wanted = parse_config(poles.table(1, id="poles_of_the_server:Pole"))
    folder = new_run(tmp_path, wanted)
    (tmp_path / "poles_of_the_server.py").write_text(poles.MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(own_code, "_read", {})  # as in another process
    assert wanted.code is None
    assert parse_config(tomllib.loads(wanted.to_toml())).folder != wanted.folder
    monkeypatch.setattr(own_code, "_read", {})
    train(folder, ask_honest_agents)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [wanted.folder]


def test_a_checkpoint_of_another_run_or_shape_is_rejected(agents, tmp_path):
    folder = new_run(tmp_path)
    with pytest.raises(Crash):
        train(folder, InProcessAgents(agents, {("update", 2): crash}))
    spec = folder.spec()
    folder.write_spec(replace(spec, run="another"))
    with pytest.raises(UserError, match="of another run"):
        train(folder, InProcessAgents(agents))
    other = config("first", 4, fleet={**MDPS, "states": 7})
    folder.write_spec(RunSpec(spec.run, other.to_toml(), spec.agents, spec.terms, spec.runs))
    with pytest.raises(UserError, match="does not fit the config"):
        train(folder, InProcessAgents(agents))


@pytest.mark.slow
def test_partial_participation_asks_the_drawn_agents_and_has_the_simulators_bits(agents, tmp_path):
    wanted = make_config({**tomllib.loads(CONFIG.to_toml()), "participation": 0.67})
    folder, engine = new_run(tmp_path, wanted), InProcessAgents(agents)
    train(folder, engine)
    drawn = [tuple(NAMES[i] for i in draw_participants(wanted.seeds[0], k, 3, 2).tolist()) for k in range(4)]
    assert len(set(drawn)) > 1
    assert [names for kind, _, names in engine.asked if kind == "update"] == drawn
    assert all(names == NAMES for kind, _, names in engine.asked if kind == "evaluate")
    run, simulated = load_run(tmp_path / "runs" / wanted.folder), simulate(wanted, tmp_path / "simulated")
    np.testing.assert_array_equal(run.message, simulated.message)
    np.testing.assert_array_equal(run.history.trajectories, simulated.history.trajectories)
    np.testing.assert_array_equal(run.history.bytes, simulated.history.bytes)
