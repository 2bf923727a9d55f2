"""The NVFlare engine without its processes: polling intervals, kits, jobs, the bridge, and errors of one sentence."""

import datetime
import json
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import nvflare
import pytest
import real_fleet
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl import wf_comm_server
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from perfedrl.cli import federation as cli_federation
from perfedrl.errors import UserError
from perfedrl.experiments.config import load_config
from perfedrl.experiments.store import FILES
from perfedrl.federation.connections.streams import HEADER, WELCOME
from perfedrl.federation.engine import jobs, processes, provision, service, supervisor, workflow
from perfedrl.federation.engine.admin_session import ServerUnreachable
from perfedrl.federation.engine.bridge import FRAME, REASON, SOCKET, AgentBridge
from perfedrl.federation.engine.fleet_folder import FleetFolder, Kit
from perfedrl.federation.engine.kit_checks import check_kit
from perfedrl.federation.engine.nvflare_settings import replace_attribute
from perfedrl.federation.engine.workflow import Rounds
from perfedrl.federation.restarting_process import RestartingProcess
from perfedrl.federation.server.network_config import networked
from perfedrl.federation.server.run_folder import Terms


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine") / "fleet"
    provision.init(folder, 3, port=8765)
    return FleetFolder(folder)


class Tasks(wf_comm_server.WFCommServer):
    """NVFlare's communicator without a network."""


def test_the_servers_check_period_is_set_where_nvflare_reads_it(monkeypatch):
    """The controller's own setting has no effect in NVFlare 2.9; this test fails if a new version changes that."""
    slept, communicator = [], Tasks()
    controller = Rounds("run", 1)
    controller.set_communicator(communicator)
    task = wf_comm_server.Task("update", Shareable())

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) % 3 == 0:
            task.completion_status = wf_comm_server.TaskCompletionStatus.OK

    monkeypatch.setattr(wf_comm_server.time, "sleep", sleep)
    communicator.wait_for_task(task, Signal())
    assert slept == [0.2] * 3, "the controller's task_check_period works now: the private one need not be set any more"
    replace_attribute(communicator, "_task_check_period", workflow.CHECK_PERIOD)
    task.completion_status, slept[:] = None, []
    communicator.wait_for_task(task, Signal())
    assert slept == [workflow.CHECK_PERIOD] * 3
    with pytest.raises(UserError, match=r"needs NVFlare 2\.9"):
        replace_attribute(object(), "_task_check_period", workflow.CHECK_PERIOD)
    assert nvflare.__version__.startswith("2.9.")


def test_late_uploads_are_handed_to_the_next_question(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    controller, told = Rounds("run", 1), []
    monkeypatch.setattr(controller, "info", told.append)
    controller.engine, controller.abort_signal = SimpleNamespace(get_clients=list), Signal()

    def came(name, kind, content, code=ReturnCode.OK):
        result = Shareable()
        result[FRAME] = content
        result.set_return_code(code)
        controller.process_result_of_unknown_task(SimpleNamespace(name=name), kind, "task", result, FLContext())

    came("a", "update", b"upload")
    came("b", "evaluate", b"outcomes")
    came("c", "update", b"upload", ReturnCode.EXECUTION_EXCEPTION)
    came("d", "update", "text")
    answers = controller.ask("update", b"", set(), lambda _: True, 1.0)
    assert (answers.late, answers.late_uploads) == (("a", "b", "c", "d"), {"a": b"upload"})
    assert controller.ask("update", b"", set(), lambda _: True, 1.0).late_uploads == {}
    assert told[0] == "a answered update too late"


def test_a_job_sets_the_agents_polling_interval_and_contains_no_code(tmp_path):
    folder = jobs.write_job(tmp_path / "job", "run", 7, ["agent-0", "agent-2"], 30.0)
    meta, server, client = (
        json.loads((folder / name).read_text())
        for name in ("meta.json", "app/config/config_fed_server.json", "app/config/config_fed_client.json")
    )
    assert meta["deploy_map"] == {"app": ["server", "agent-0", "agent-2"]}
    assert server["server"]["task_request_interval"] == jobs.REQUEST_INTERVAL
    assert server["workflows"][0]["args"] == {"control": "run", "generation": 7}
    assert client["get_task_timeout"] == client["submit_task_result_timeout"] == jobs.REPLY_TIMEOUT
    assert client["executors"][0]["executor"] == {"path": provision.BRIDGE, "args": {"seconds": 30.0}}
    assert {path.suffix for path in folder.rglob("*") if path.is_file()} == {".json"}


@pytest.mark.parametrize("module", ["bridge", "service"])
def test_the_bridge_and_the_service_import_neither_jax_nor_environments(module):
    command = "from perfedrl.cli import application; application('federation')"
    code = f"{command}; import perfedrl.federation.engine.{module}, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert f"perfedrl.federation.engine.{module}" in loaded
    assert not {"jax", "jaxlib", "equinox", "optax", "perfedrl.envs", "perfedrl.algorithms"} & set(loaded)


def test_a_dead_daemon_is_a_failed_task_and_not_an_exception(tmp_path, monkeypatch):
    task = Shareable()
    task[FRAME] = b"x"
    bridge = AgentBridge(60.0)

    def ask(kind="update"):
        return bridge.execute(kind, task, FLContext(), Signal())

    monkeypatch.delenv(SOCKET, raising=False)
    assert "perfedrl federation join" in ask()[REASON]
    monkeypatch.setenv(SOCKET, str(tmp_path / "nobody.sock"))
    reply = ask()
    assert reply.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert "no agent listens" in reply[REASON]
    assert "does not know" in ask("shell")[REASON]
    task[FRAME] = "text"
    assert "does not know" in ask()[REASON]


def test_a_new_fleet_is_private_and_within_its_folder(fleet):
    assert fleet.info.agents == ("agent-0", "agent-1", "agent-2")
    assert stat.S_IMODE(fleet.folder.stat().st_mode) == 0o700
    for key in (*fleet.folder.rglob("*.key"), *(fleet.folder / "authority").rglob("*.json")):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600, key
    for file in (path for path in fleet.folder.rglob("*") if path.is_file()):
        content = file.read_bytes()
        assert b"/tmp/nvflare" not in content or file.suffix == ".default", file
        assert str(fleet.folder).encode() not in content, f"{file} holds the folder's path, which may change"
    client = json.loads((fleet.kit("agent-1") / "local" / "resources.json").read_text())["client"]
    assert client["maint_msg_timeout"] == provision.HEARTBEAT_REPLY, "a restarted server would wait for its agents"
    for name, only in (("server", provision.WORKFLOW), ("kits/agent-1", provision.BRIDGE)):
        local = fleet.folder / name / "local"
        assert json.loads((local / "resources.json").read_text())["class_allow_list"] == [only]
        rights = json.loads((local / "authorization.json").read_text())["permissions"]["project_admin"]
        assert rights["byoc"] == rights["shell_commands"] == "none"
    kit = Kit(fleet.kit("agent-1"))
    assert (kit.info.number, kit.info.agent, kit.info.fleet) == (1, "agent-1", fleet.info.fleet)
    check_kit(kit)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--agents", "0"), "expected 1 to 10000 agents, got 0"),
        (("--agents", "2", "--port", "0"), "port must be"),
        (("--agents", "2", "--host", "two words"), "host name as the agents' machines know it, got 'two words'"),
    ],
)
def test_init_rejects_invalid_settings(run, tmp_path, options, why):
    code, _, said = run("federation", "init", "new", *options)
    assert code == 2
    assert why in said
    assert not list(tmp_path.iterdir())


def test_init_says_why_nvflare_fails(run, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(provision.CertBuilder, "build", full)
    code, _, said = run("federation", "init", "new", "--agents", "1")
    assert code == 2
    assert "NVFlare could not create the kits: Exception [Errno 28] No space left on device" in said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


def test_init_does_not_touch_an_existing_fleet(run, fleet):
    code, _, said = run("federation", "init", fleet.folder, "--agents", "2")
    assert code == 2
    assert "not empty" in said


@pytest.mark.parametrize("command", ["server", "status", "stop", "train", "revoke", "join"])
def test_commands_reject_a_folder_without_a_fleet(run, tmp_path, command):
    (tmp_path / "agent.toml").write_text("")
    more = {"train": ["c.toml"], "revoke": ["agent-0"], "join": ["--agent-config", "agent.toml"]}
    code, _, said = run("federation", command, tmp_path, *more.get(command, []))
    assert code == 2
    assert "perfedrl federation init" in said


def test_without_nvflare_the_error_says_how_to_install_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvflare", None)
    code, _, said = run("federation", "demo")
    assert code == 2
    assert 'pip install "perfedrl[federation]"' in said


def test_a_port_in_use_is_an_error(run, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        provision.init(tmp_path / "fleet", 1, port=port)
        code, _, said = run("federation", "server", tmp_path / "fleet")
    assert code == 2
    assert f"port {port} is in use" in said


def certificate(path, begin, end):
    """A certificate for `localhost` that is valid between two days from now, and its key."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    names = x509.SubjectAlternativeName([x509.DNSName("localhost")])
    built = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    built = built.serial_number(1).add_extension(names, critical=False)
    built = built.not_valid_before(now + datetime.timedelta(days=begin))
    cert = built.not_valid_after(now + datetime.timedelta(days=end)).sign(key, hashes.SHA256())
    path.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    path.with_suffix(".key").write_bytes(secret)
    return path


def test_expired_and_future_certificates_are_rejected(tmp_path):
    processes.check_clock(certificate(tmp_path / "fine.crt", -1, 1))
    with pytest.raises(UserError, match=r"old\.crt expired on .*: `perfedrl federation renew`"):
        processes.check_clock(certificate(tmp_path / "old.crt", -2, -1))
    with pytest.raises(UserError, match=r"this machine's clock says .*: set the clock"):
        processes.check_clock(certificate(tmp_path / "new.crt", 1, 2))


class Server(threading.Thread):
    """A TLS server with some certificate, for one handshake and one greeting."""

    def __init__(self, cert, key):
        super().__init__(daemon=True)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(str(cert), str(key))
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        self.start()

    def run(self):
        connection, _ = self.listening.accept()
        try:
            with self.context.wrap_socket(connection, server_side=True) as secure:
                secure.recv(1000)
                secure.sendall(HEADER.pack(WELCOME, 0, 0))
        except OSError:
            connection.close()
        self.listening.close()


@pytest.mark.parametrize(
    ("host", "cert", "trusted", "why"),
    [
        ("localhost", "own", "own", None),
        ("127.0.0.1", "own", "own", "not for the address '127.0.0.1'"),
        ("localhost", "old", "old", "certificate has expired"),
        ("localhost", "new", "new", "not valid yet"),
        ("localhost", "other", "own", "belongs to another fleet"),
    ],
)
def test_only_the_kits_own_server_is_accepted(fleet, tmp_path, host, cert, trusted, why):
    own = fleet.server / "startup"
    made = {
        "own": (own / "server.crt", own / "server.key"),
        "old": (certificate(tmp_path / "old.crt", -2, -1), tmp_path / "old.key"),
        "new": (certificate(tmp_path / "new.crt", 1, 2), tmp_path / "new.key"),
        "other": (certificate(tmp_path / "other.crt", -1, 1), tmp_path / "other.key"),
    }
    server, kit = Server(*made[cert]), Kit(fleet.kit("agent-0"))
    kit.info = replace(kit.info, host=host, port=server.port)
    if trusted != "own":  # as if the fleet's authority had signed it
        kit.__class__ = type("Trusting", (Kit,), {"authority": made[trusted][0]})
    if why is None:
        assert processes.check_server(kit)
    else:
        with pytest.raises(UserError, match=why):
            processes.check_server(kit)
    server.join(60)
    kit.info = replace(kit.info, port=server.port)
    assert why or not processes.check_server(kit), "nobody listens any more"


def test_an_unknown_host_is_an_error(fleet):
    kit = Kit(fleet.kit("agent-0"))
    kit.info = replace(kit.info, host="no-such-host.invalid")
    with pytest.raises(UserError, match="cannot be resolved on this machine"):
        processes.check_server(kit)


def test_a_config_that_needs_too_many_agents_is_rejected(run, fleet, tmp_path):
    wanted = real_fleet.config(fleet={"env": "random-mdps", "agents": 4})
    (tmp_path / "c.toml").write_text(wanted.to_toml())
    code, _, said = run("federation", "train", fleet.folder, "c.toml")
    assert code == 2
    assert "the config needs 4 agents, but the fleet in" in said
    assert "has 3" in said
    (tmp_path / "c.toml").write_text(real_fleet.config().to_toml())
    code, _, said = run("federation", "train", fleet.folder, "c.toml", "--min-agents", "5")
    assert code == 2
    assert "every round needs 5 agents, but the config has 3" in said


@pytest.mark.parametrize(("agents", "least"), [(1, 1), (2, 2), (3, 2), (4, 3), (10, 6)])
def test_by_default_a_round_needs_more_than_half_of_the_agents(run, fleet, monkeypatch, agents, least):
    asked = []
    monkeypatch.setattr(cli_federation, "train_and_show", lambda *args: asked.append(args[3](agents).min_agents))
    assert run("federation", "train", fleet.folder, "c.toml")[0] == 0
    assert run("federation", "train", fleet.folder, "c.toml", "--min-agents", agents)[0] == 0
    assert asked == [least, agents]


@pytest.mark.parametrize("term", ["min_agents", "deadline", "patience", "factor", "strikes"])
def test_invalid_terms_are_rejected(term):
    with pytest.raises(UserError, match=term):
        Terms(**{"min_agents": 2, term: 0})
    with pytest.raises(UserError, match="factor"):
        Terms(2, factor=0.5)
    with pytest.raises(UserError, match="personalize"):
        Terms(2, personalize=-1)


def test_the_networked_config_has_one_seed_and_no_held_out_settings(tmp_path):
    wanted = networked(load_config("configs/arc.toml"), 3)
    assert wanted.seeds == (3,)
    assert wanted.experiment.evaluation.few_shot == ()
    with pytest.raises(UserError, match="has no seed 99"):
        networked(load_config("configs/arc.toml"), 99)
    alone = real_fleet.config(algorithm={"name": "local-pg", "beta": 0.1})
    with pytest.raises(UserError, match="need no network"):
        networked(alone)


def test_an_unfinished_run_is_continued_or_restarted(fleet):
    first = supervisor.prepare(fleet, real_fleet.config("again"), Terms(2))
    run = first.spec().run
    first.checkpoint_path.write_bytes(b"half done")
    assert supervisor.prepare(fleet, real_fleet.config("again"), Terms(3)).spec().run == run
    assert supervisor.prepare(fleet, real_fleet.config("again"), Terms(3), restart=True).spec().run != run
    assert supervisor.finished(fleet, real_fleet.config("again")) is None


def test_a_run_that_was_begun_with_the_mean_as_the_default_keeps_it(fleet):
    """Runs of earlier versions have no [aggregation] in their text, unfinished and finished ones."""
    plain, begun = real_fleet.config("older"), real_fleet.config("older", aggregation="mean")
    assert supervisor.config_to_train(fleet, plain).aggregation["name"] == "geometric-median"
    folder = supervisor.prepare(fleet, begun, Terms(2))
    folder.checkpoint_path.write_bytes(b"half done")
    assert supervisor.config_to_train(fleet, plain).aggregation["name"] == "geometric-median", "the mean was chosen"
    folder.write_spec(replace(folder.spec(), config=plain.to_toml()))
    for _ in range(2):  # also when it is continued for the second time
        older = supervisor.config_to_train(fleet, plain)
        assert older.aggregation == {"name": "mean"}
        assert supervisor.prepare(fleet, older, Terms(2)).spec().config == plain.to_toml()
    assert supervisor.config_to_train(fleet, plain, restart=True).aggregation["name"] == "geometric-median"
    folder.checkpoint_path.unlink()
    (fleet.runs / plain.folder).mkdir(parents=True)
    for name in FILES:
        (fleet.runs / plain.folder / name).write_text(plain.to_toml() if name == "config.toml" else "")
    assert supervisor.config_to_train(fleet, plain).aggregation == {"name": "mean"}, "it is shown, not trained again"
    supervisor.prepare(fleet, networked(plain), Terms(2))
    assert supervisor.config_to_train(fleet, plain).aggregation["name"] == "geometric-median", "begun anew since"


class Stub:
    """A connection to a server with all agents connected; `aborted` and `closed` say what was asked of it."""

    def __init__(self, *args, **kwargs):
        self.submitted, self.aborted, self.closed = [], [], False

    def connected(self):
        return set(self.last_heartbeats())

    def last_heartbeats(self):
        return dict.fromkeys(("agent-0", "agent-1", "agent-2"), time.time())

    def jobs(self):
        return dict.fromkeys(self.submitted, False)

    def submit(self, folder):
        self.submitted.append("job")
        return "job"

    def abort(self, job):
        self.aborted.append(job)

    def close(self):
        self.closed = True


class Gone(Stub):
    """A server that dies when a job is aborted."""

    def abort(self, job):
        raise ServerUnreachable("it is gone")


class InterruptedInSubmit(Stub):
    """A server that has got a job when Ctrl-C is pressed."""

    def submit(self, folder):
        super().submit(folder)
        raise KeyboardInterrupt


def stopped_by_ctrl_c(fleet, monkeypatch, operator, name, at="training"):
    """A run whose training is stopped by Ctrl-C, at the latest when it shows that it is doing something."""
    monkeypatch.setattr(supervisor, "Operator", lambda *_, **__: operator)

    def look(view):
        if view.doing.startswith(at):
            raise KeyboardInterrupt

    run_folder = supervisor.prepare(fleet, real_fleet.config(name), Terms(3))
    with pytest.raises(KeyboardInterrupt):
        supervisor.Supervisor(fleet, run_folder, 1.0, look).run()
    assert run_folder.progress()["phase"] == "stopped"
    return run_folder


@pytest.mark.parametrize("operator", [Stub(), Gone(), InterruptedInSubmit()], ids=lambda x: type(x).__name__)
def test_ctrl_c_stops_training_and_its_job(fleet, monkeypatch, operator):
    """Also if the server is gone, and if the job is submitted but its id is not known yet."""
    run_folder = stopped_by_ctrl_c(fleet, monkeypatch, operator, f"stop-{type(operator).__name__}")
    assert run_folder.generation() == 2, "the abandoned job is not stale"
    assert operator.aborted == ([] if isinstance(operator, Gone) else ["job"])
    assert operator.closed


def test_ctrl_c_while_the_server_is_waited_for_is_shown_as_a_stop(fleet, monkeypatch):
    stopped_by_ctrl_c(fleet, monkeypatch, Stub(), "unconnected", at="connecting to the server")


@pytest.mark.parametrize("restart", [(), ("--restart",)], ids=["again", "restart"])
def test_two_trainings_of_a_fleet_cannot_run_at_once(run, fleet, tmp_path, restart):
    """The second one neither deletes nor changes what the first one has."""
    wanted = real_fleet.config("twice")
    (tmp_path / "c.toml").write_text(wanted.to_toml())
    with supervisor.only_training(fleet):
        run_folder = supervisor.prepare(fleet, wanted, Terms(3))
        if restart:
            run_folder.checkpoint_path.write_bytes(b"half done")
        before = {path.name: path.read_bytes() for path in run_folder.path.iterdir()}
        code, _, said = run("federation", "train", fleet.folder, "c.toml", *restart)
    assert code == 2
    assert "a training of this fleet is running already (process" in said
    assert {path.name: path.read_bytes() for path in run_folder.path.iterdir()} == before


def test_newcomers_are_in_jobs_after_the_last_round_only(fleet, monkeypatch):
    wanted = real_fleet.config("new", fleet={**real_fleet.MDPS, "agents": 2})
    run_folder = supervisor.prepare(fleet, wanted, Terms(2))
    assert run_folder.spec().newcomers == ("agent-2",)
    assert supervisor.prepare(fleet, wanted, Terms(2, personalize=0)).spec().newcomers == ()
    run_folder = supervisor.prepare(fleet, wanted, Terms(2))
    watching, trained = supervisor.Supervisor(fleet, run_folder, 60.0), {"agent-0", "agent-1"}
    monkeypatch.setattr(supervisor.time, "sleep", lambda _: None)
    answers = [{"agent-2"}, {*trained, "agent-2", "agent-9"}]
    operator = SimpleNamespace(connected=lambda: answers.pop(0))
    assert watching._gather(operator) == ["agent-0", "agent-1"]
    monkeypatch.setattr(run_folder, "rounds_done", lambda: wanted.rounds)
    answers[:] = [trained, {*trained, "agent-2"}]
    assert watching._gather(operator) == ["agent-0", "agent-1", "agent-2"]
    answers[:] = [trained]
    assert watching._gather(operator) == ["agent-0", "agent-1"], "newcomers are waited for once"


class Training(Stub):
    """A server whose job goes on; all agents that it was not deployed to are idle."""

    asked = 0

    def status(self, job):
        self.asked += 1
        return "RUNNING"

    def idle(self, job):
        return {"agent-2"}


def follow(fleet, run_folder, operator, watch, now, monkeypatch):
    """Submit a job and watch it by a clock that the test moves; return whether the run is finished."""
    monkeypatch.setattr(supervisor.time, "sleep", lambda _: None)
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now[0])
    watching = supervisor.Supervisor(fleet, run_folder, 60.0, watch)
    agents = watching._gather(operator)
    return watching._watch_job(operator, watching._submit(operator, agents), set(agents))


def test_a_newcomer_that_connects_while_others_train_does_not_end_their_job(fleet, monkeypatch):
    wanted = real_fleet.config("undisturbed", fleet={**real_fleet.MDPS, "agents": 2})
    run_folder, operator, now = supervisor.prepare(fleet, wanted, Terms(2)), Training(), [0.0]

    def watch(view):
        now[0] += 5.0
        if operator.asked == 10:
            progress = {"generation": run_folder.generation(), "phase": "trained", "round": wanted.rounds}
            run_folder.write_progress(progress)

    assert follow(fleet, run_folder, operator, watch, now, monkeypatch) is False, "the next job takes the newcomer in"
    assert operator.asked >= 10
    assert operator.aborted == []
    assert not any(event["event"] in ("membership", "job lost") for event in run_folder.events())


class Silent(Training):
    """A server whose job goes on, with an agent that has a process for it but does not answer."""

    def idle(self, job):
        return set()


@pytest.mark.parametrize(("word", "ends"), [("lost", True), ("waiting", False)])
def test_a_connected_agent_that_stays_silent_is_taken_into_a_new_job(fleet, monkeypatch, word, ends):
    wanted = real_fleet.config(f"hanging-{word}")
    run_folder, operator, now = supervisor.prepare(fleet, wanted, Terms(3)), Silent(), [0.0]

    def watch(view):
        now[0] += 5.0
        progress = {"generation": run_folder.generation(), "phase": "update", "round": 1, "agents": {"agent-1": word}}
        progress |= {"phase": "finished"} if operator.asked == 20 else {}
        run_folder.write_progress(progress)

    assert follow(fleet, run_folder, operator, watch, now, monkeypatch) is not ends
    assert [event["agents"] for event in run_folder.events() if event["event"] == "membership"] == [["agent-1"]] * ends
    assert operator.aborted == [], "the next job is submitted before this one is aborted"


def test_a_terminal_shows_what_the_agents_daemon_says(tmp_path):
    log = tmp_path / "agent.log"
    log.write_text("agent 1: of an earlier start\n")
    daemon = RestartingProcess([], log, {}, tmp_path)
    with open(log, "a") as file:
        file.write("a warning\nagent 1: round 1 of 2: played 4 episodes\nagent 1: rou")
    assert service.lines_of(daemon, 1) == ["agent 1: round 1 of 2: played 4 episodes"]
    with open(log, "a") as file:
        file.write("nd 2 of 2\n")
    assert service.lines_of(daemon, 1) == ["agent 1: round 2 of 2"]
    assert service.lines_of(daemon, 1) == []
    log.unlink()
    assert service.lines_of(daemon, 1) == [], "a log that was moved away does not stop the agent"
    log.write_text("agent 1: new\n")
    assert service.lines_of(daemon, 1) == ["agent 1: new"]


def test_an_agent_whose_module_is_missing_names_module_and_folder(tmp_path):
    """The message of a daemon that cannot start, as `join` shows it."""
    log = tmp_path / "agent.log"
    log.touch()
    daemon = RestartingProcess([], log, {}, tmp_path)
    log.write_text("error: agent.toml: the environment 'a:b' cannot be imported; looked for a.py in /robots\n")
    daemon.deaths = 1
    with pytest.raises(UserError, match=r"of agent-1 does not start: agent\.toml: .* looked for a\.py in /robots"):
        service.wait_for(daemon, tmp_path / "agent.sock", "agent-1")


def test_the_interval_of_readmission_doubles(fleet, monkeypatch):
    run_folder = supervisor.prepare(fleet, real_fleet.config("restless"), Terms(3))
    watching, now, times = supervisor.Supervisor(fleet, run_folder, 1.0), [0.0], []
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now[0])
    for second in range(0, 1000, 10):
        now[0] = float(second)
        times += [second] if watching._to_readmit({"agent-1"}) else []
    assert times == [0, 70, 200, 450, 940]
    assert watching._to_readmit({"agent-1"}, stalled=True) == ["agent-1"], "nobody trains meanwhile"


def test_unknown_agents_and_missing_agent_configs_are_errors(run, fleet):
    code, _, said = run("federation", "revoke", fleet.folder, "agent-7")
    assert code == 2
    assert "no agent 'agent-7'" in said
    code, _, said = run("federation", "join", fleet.kit("agent-0"), "--agent-config", "none.toml")
    assert code == 2
    assert "there is no agent config none.toml" in said
    code, _, said = run("federation", "join", fleet.kit("agent-0"))
    assert code == 2
    assert "--agent-config FILE, or --env NAME" in said
