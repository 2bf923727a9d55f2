"""What one kit can do to a fleet: its failing processes, its messages and its streams concern nobody else."""

import ast
import importlib
import inspect
import json
import time
from types import SimpleNamespace

import pytest
import real_fleet
from nvflare.apis.fl_constant import ReturnCode, RunProcessKey
from nvflare.fuel.common.exit_codes import ProcessExitCode
from nvflare.fuel.f3.endpoint import Endpoint, EndpointState
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.private.defs import CellMessageHeaderKeys, JobFailureMsgKey
from nvflare.private.fed.server.server_runner import ServerRunner

from perfedrl.errors import UserError
from perfedrl.federation.engine import nvflare_settings, provision, server_guard, supervisor
from perfedrl.federation.engine.driver import TlsDriver, UnixDriver
from perfedrl.federation.engine.fleet_folder import FleetFolder
from perfedrl.federation.engine.message_limits import (
    BURST,
    LARGEST,
    LARGEST_MESSAGE,
    RATE,
    Budget,
    MessageLimits,
    excess,
    write_largest_message,
)
from perfedrl.federation.engine.server_guard import CONNECTION_LOST, PROCESS_ENDED, SILENCE, ServerGuard
from perfedrl.federation.engine.stream_cleanup import ABANDONED, MOST_OPEN, Cleaner
from perfedrl.federation.engine.workflow import Rounds
from perfedrl.federation.server.run_folder import RunFolder, Terms
from perfedrl.federation.server.run_state_machine import RunStateMachine
from perfedrl.federation.server.upload_checks import ROOM


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kits") / "fleet"
    provision.init(folder, 3, port=8765)
    return FleetFolder(folder)


# --- processes that fail


def watching(fleet, name, least=2, **more):
    """A supervisor of a run whose first job is under way."""
    run_folder = supervisor.prepare(fleet, real_fleet.config(name), Terms(least), **more)
    watching = supervisor.Supervisor(fleet, run_folder, 0.0)
    watching._generation = 1
    return watching


def connected(*names):
    return SimpleNamespace(connected=lambda: set(names))


EVERYBODY = connected("agent-0", "agent-1", "agent-2")


def ends(watching, agent="agent-1", reason=PROCESS_ENDED, generation=1):
    """An agent's process of the job ends, and the supervisor reads the log."""
    watching.run_folder.log("gone", agent=agent, generation=generation, reason=reason)
    watching._show("training")


def test_an_agent_whose_process_ends_twice_is_named_and_excluded_until_it_is_released(fleet):
    ours = watching(fleet, "excluded")
    ends(ours)
    assert ours._gather(EVERYBODY) == ["agent-0", "agent-1", "agent-2"]
    ends(ours)
    assert ours._gather(EVERYBODY) == ["agent-0", "agent-2"]
    assert [x["agent"] for x in ours.run_folder.events() if x["event"] == "excluded"] == ["agent-1"]
    assert watching(fleet, "excluded")._gather(EVERYBODY) == ["agent-0", "agent-2"], "also in the next `train`"
    released = watching(fleet, "excluded", release=["agent-1"])
    assert released._gather(EVERYBODY) == ["agent-0", "agent-1", "agent-2"]


def test_without_enough_agents_the_error_names_the_excluded_ones(fleet):
    ours = watching(fleet, "too-few", least=3)
    ends(ours)
    ends(ours)
    with pytest.raises(UserError, match=r"needs 3 agents, but fewer are left without agent-1.*--release agent-1"):
        ours._gather(EVERYBODY)
    assert ours.run_folder.progress()["phase"] == "stopped"


def test_lost_connections_old_jobs_and_forgiven_ends_exclude_nobody(fleet):
    ours = watching(fleet, "forgiven")
    for _ in range(3):
        ends(ours, reason=CONNECTION_LOST)
        ends(ours, generation=7)
    for _ in range(5):
        ends(ours)
        for k in range(supervisor.FORGIVEN):
            ours.run_folder.log("round", round=k, agents=["agent-0", "agent-1"])
        ours._show("training")
    assert ours.run_folder.excluded() == []


def test_an_agent_that_a_job_did_not_reach_is_taken_in_when_it_is_heard_again(fleet):
    ours = watching(fleet, "unreached")
    ours._submitted = {"agent-0", "agent-1", "agent-2"}
    ours.run_folder.log("members", generation=1, agents=["agent-0", "agent-2"])
    ours._show("training")
    assert set(ours._gone_since) == {"agent-1"}
    ours.run_folder.log("round", round=0, agents=["agent-0", "agent-1"])
    ours._show("training")
    assert ours._gone_since == {}


class FakeServer:
    """The part of NVFlare's server that the guard uses."""

    def __init__(self):
        self.told, self.resolved = [], []
        self.client_manager = SimpleNamespace(clients={"token": SimpleNamespace(name="agent-1")})
        runner = SimpleNamespace(
            is_client_outcome_pending=lambda job, name: (job, name) == ("job", "agent-1"),
            resolve_client_outcome=lambda *outcome: self.resolved.append(outcome),
        )
        self.engine = SimpleNamespace(
            job_runner=runner, run_processes={"job": {}}, notify_dead_job=lambda *told: self.told.append(told)
        )


@pytest.fixture
def guard(monkeypatch):
    """A guard whose appointments are kept by the test."""
    guard = ServerGuard()
    guard._server, guard.later = FakeServer(), []
    monkeypatch.setattr(server_guard, "_later", lambda seconds, call, *rest: guard.later.append((call, rest)))
    return guard


def keep_appointments(guard):
    later, guard.later[:] = list(guard.later), []
    for call, arguments in later:
        call(*arguments)


def report(code, token="token", job="job"):
    headers = {CellMessageHeaderKeys.TOKEN: token}
    payload = {JobFailureMsgKey.JOB_ID: job, JobFailureMsgKey.CODE: code}
    return SimpleNamespace(get_header=headers.get, payload=payload)


def test_a_failed_process_ends_no_job_but_the_job_is_told_until_it_listens(guard):
    for code in (ProcessExitCode.EXCEPTION, ProcessExitCode.CONFIG_ERROR, ProcessExitCode.UNSAFE_COMPONENT):
        guard.job_ended(report(code))
    assert guard._server.told == [("job", f"agent-1 {PROCESS_ENDED}", PROCESS_ENDED)] * 3
    assert guard._server.resolved == [("job", "agent-1")] * 3
    keep_appointments(guard)
    assert len(guard._server.told) == 6
    guard.state_change(endpoint("agent-1.job", EndpointState.READY))
    keep_appointments(guard)
    assert len(guard._server.told) == 6, "a process that is back is not gone"
    guard.job_ended(report(0))
    guard.job_ended(report(ProcessExitCode.EXCEPTION, token="another"))
    guard.job_ended(report(ProcessExitCode.EXCEPTION, job="another"))
    assert len(guard._server.told) == 6
    assert "fail_run" not in dir(guard._server.engine.job_runner), "NVFlare's way to end the job was not called"


def endpoint(name, state):
    endpoint = Endpoint(name)
    endpoint.state = state
    return endpoint


def test_a_lost_connection_is_told_unless_it_comes_back(guard):
    for name in ("agent-1", "server.job", "operator"):
        guard.state_change(endpoint(name, EndpointState.DISCONNECTED))
    assert guard.later == []
    guard.state_change(endpoint("agent-1.job", EndpointState.DISCONNECTED))
    guard.state_change(endpoint("agent-1.job", EndpointState.READY))
    keep_appointments(guard)
    assert guard._server.told == []
    guard.state_change(endpoint("agent-1.job", EndpointState.DISCONNECTED))
    keep_appointments(guard)
    assert guard._server.told == [("job", f"agent-1 {CONNECTION_LOST}", CONNECTION_LOST)]


def test_a_client_that_registered_anew_or_is_silent_is_told_once(guard):
    client, participants = SimpleNamespace(name="agent-1", last_connect_time=time.time()), {}
    guard._server.client_manager.clients["token"] = client
    guard._server.engine.run_processes["job"] = {RunProcessKey.PARTICIPANTS: participants}
    participants["token"] = client
    guard.watch()
    assert guard._server.told == []
    client.last_connect_time -= 2 * server_guard.SILENT
    for _ in range(3):
        guard.watch()
    assert guard._server.told == [("job", f"agent-1 {SILENCE}", SILENCE)]
    client.last_connect_time = time.time() + 1000.0
    guard.watch()
    guard._server.client_manager.clients = {"a new token": client}
    guard.watch()
    assert guard._server.told[1:] == [("job", f"agent-1 {CONNECTION_LOST}", CONNECTION_LOST)]


def test_an_agent_that_is_gone_fails_at_once_and_is_not_asked_until_it_is_back(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    rounds, asked = Rounds(str(tmp_path / "run"), 4), []
    rounds.engine = SimpleNamespace(
        get_clients=lambda: [SimpleNamespace(name="agent-0"), SimpleNamespace(name="agent-1")]
    )
    rounds.fl_ctx, rounds.abort_signal = None, SimpleNamespace(triggered=False)
    monkeypatch.setattr(Rounds, "cancel_task", lambda *_, **__: None)

    def broadcast(_, task, __, targets, **more):
        asked.append(targets)
        rounds.client_gone("agent-1 process ended", None)

    monkeypatch.setattr(Rounds, "broadcast", broadcast)
    answers = rounds.ask("update", b"", set(), lambda answers: bool(answers.failures), 60.0)
    assert answers.failures == {"agent-1": PROCESS_ENDED}
    rounds.ask("update", b"", set(), lambda _: True, 60.0)
    rounds.client_active("agent-1", "getTask", None)
    rounds.ask("update", b"", set(), lambda _: True, 60.0)
    assert asked == [["agent-0", "agent-1"], ["agent-0"], ["agent-0", "agent-1"]]
    gone = [event for event in RunFolder(tmp_path / "run").events() if event["event"] == "gone"]
    assert [(x["agent"], x["generation"], x["reason"]) for x in gone] == [("agent-1", 4, PROCESS_ENDED)] * 2


def test_a_client_without_heartbeats_whose_process_asks_for_work_is_not_gone(tmp_path):
    rounds = Rounds(str(tmp_path), 4)
    rounds.client_active("agent-1", "getTask", None)
    rounds.client_gone(f"agent-1 {SILENCE}", None)
    assert rounds._gone == {}
    rounds.client_gone(f"agent-2 {SILENCE}", None)
    rounds.client_gone(f"agent-1 {CONNECTION_LOST}", None)
    assert rounds._gone == {"agent-2": SILENCE, "agent-1": CONNECTION_LOST}


def test_no_return_code_of_a_task_ends_the_job(monkeypatch):
    assert ReturnCode.TASK_UNKNOWN in ServerRunner.ABORT_RETURN_CODES, "NVFlare ends jobs at these codes"
    runner = ServerRunner.__new__(ServerRunner)
    monkeypatch.setattr(nvflare_settings, "cell", SimpleNamespace(_is_server_job_cell=lambda _: True))
    nvflare_settings.let_no_agent_end_the_job(runner)
    assert runner.ABORT_RETURN_CODES == []
    assert not nvflare_settings.cell._is_server_job_cell(None)


# --- waits


@pytest.mark.parametrize("name", nvflare_settings.LONGEST_SLEEPS)
def test_nvflares_modules_sleep_through_the_module_time(name):
    """What they use of `time` is what the replacement has."""
    module = importlib.import_module(name)
    assert inspect.ismodule(module.time) or isinstance(module.time, nvflare_settings.ShortSleeps)
    tree = ast.parse(inspect.getsource(module))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time"
    }
    assert "sleep" in used
    short = nvflare_settings.ShortSleeps(0.0)
    assert used <= set(dir(short))
    began = time.monotonic()
    short.sleep(1000.0)
    assert time.monotonic() - began < 900


# --- messages and streams


def test_a_budget_of_messages_is_spent_and_refilled():
    now = [0.0]
    budget = Budget(lambda: now[0])
    assert [budget.spend() for _ in range(int(BURST))] == [0.0] * int(BURST)
    assert [round(budget.spend() * RATE) for _ in range(3)] == [1, 2, 3]
    now[0] = 3 / RATE
    assert budget.spend() == pytest.approx(1 / RATE)
    now[0] = 10_000.0
    assert [budget.spend() for _ in range(int(BURST))] == [0.0] * int(BURST)
    assert budget.spend() > 0


def test_a_kit_that_floods_is_slowed_down_and_named_and_the_others_are_not(tmp_path):
    limits, passed = MessageLimits(tmp_path, lambda: 0.0), []
    waits = [limits.receive("agent-2", b"", passed.append) for _ in range(2 * int(BURST))]
    assert waits[: int(BURST)] == [0.0] * int(BURST)
    assert waits[-1] == pytest.approx(BURST / RATE)
    assert limits.receive("agent-0", b"", passed.append) == 0.0
    assert len(passed) == 2 * int(BURST) + 1, "slowed down, not dropped"
    assert set(excess(tmp_path)) == {"agent-2"}


def test_messages_larger_than_the_runs_largest_answer_are_dropped(tmp_path):
    sizes = []

    def receive(size):
        MessageLimits(tmp_path).receive("agent-0", bytes(size), lambda frame: sizes.append(len(frame)))

    receive(LARGEST)
    write_largest_message(tmp_path, 1000)
    most = json.loads((tmp_path / LARGEST_MESSAGE).read_text())["bytes"]
    assert 1000 < most < LARGEST
    receive(most)
    receive(most + 1)
    assert sizes == [LARGEST, most]
    assert set(excess(tmp_path)) == {"agent-0"}


def test_only_connections_to_the_servers_port_have_limits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_largest_message(tmp_path, 1000)
    for driver, passes in ((TlsDriver, False), (UnixDriver, True)):
        passed = []
        connection = SimpleNamespace(process_frame=passed.append, deliver=lambda _, to=passed: to.append(1) or 0.0)
        assert driver().receiver(connection, "agent-1")(bytes(LARGEST)) == 0.0
        assert bool(passed) is passes


def test_the_largest_answer_follows_from_the_plan(fleet):
    sizes, numbers = [], []
    for states in (5, 500):
        wanted = real_fleet.config(f"sizes-{states}", fleet={"env": "random-mdps", "agents": 3, "states": states})
        machine = RunStateMachine(wanted, supervisor.prepare(fleet, wanted, Terms(2)).spec(), 1)
        sizes.append(machine.largest_answer)
        numbers.append(machine.start.message.nbytes)
    assert numbers[0] + ROOM < sizes[0] < numbers[0] + 2 * ROOM
    assert sizes[1] - sizes[0] == numbers[1] - numbers[0] > 5000


class Cell:
    """The part of a cell that a stream uses."""

    def __init__(self):
        self.sent = []

    def fire_and_forget(self, channel, topic, origin, message, optional=False):
        self.sent.append((topic, origin))
        return {}


@pytest.fixture
def streams(monkeypatch):
    """A function that opens an unfinished stream of a sender."""
    known = {}
    monkeypatch.setattr(RxTask, "rx_task_map", known)

    def open_stream(number, origin="agent-2.job"):
        task = known[origin, number] = RxTask(number, origin, Cell())
        return task

    return open_stream


def test_streams_without_a_beginning_are_dropped(streams):
    now = [0.0]
    cleaner, stuck, moving = Cleaner(lambda: now[0]), streams(1), streams(2)
    for second in range(0, int(2 * ABANDONED), 10):
        now[0] = float(second)
        moving.received_offset += 1
        cleaner.tick()
    assert (stuck.failed, moving.failed) == (True, False)
    others = streams(3, "agent-0.job")
    many = [streams(10 + i) for i in range(3 * MOST_OPEN)]
    cleaner.tick()
    assert sum(task.failed for task in many) >= 2 * MOST_OPEN
    assert not others.failed


def test_finished_streams_are_forgotten_by_one_thread():
    now, called = [0.0], []
    cleaner = Cleaner(lambda: now[0])
    kept, cancelled = cleaner.later(5.0, lambda: called.append("kept")), cleaner.later(5.0, lambda: called.append("no"))
    cancelled.cancel()
    cleaner.tick()
    assert called == []
    now[0] = 5.0
    cleaner.tick()
    cleaner.tick()
    kept.keep()
    assert called == ["kept"]
