"""Every process of a federation builds the experiment of a config exactly once."""

import pytest
from in_process_fleet import NAMES, ask_honest_agents, new_run
from real_fleet import MDPS, config

from perfedrl.cli import federation as commands
from perfedrl.experiments import config as configs
from perfedrl.experiments.files import named_leaves
from perfedrl.federation.agent.config import make_agent_config
from perfedrl.federation.agent.request_handler import Agent
from perfedrl.federation.engine import supervisor
from perfedrl.federation.engine.fleet_folder import ABOUT, FleetInfo
from perfedrl.federation.frames import Frame
from perfedrl.federation.server.coordinator import Coordinator
from perfedrl.federation.server.network_config import networked
from perfedrl.federation.server.run_folder import Terms

WANTED = config("built", 2)


@pytest.fixture
def builds(monkeypatch):
    """The digests of the configs whose experiments are built, in order."""
    digests, build = [], configs.build

    def counted(config, fleet=None):
        digests.append(config.digest)
        return build(config, fleet)

    monkeypatch.setattr(configs, "build", counted)
    return digests


def job(run_folder):
    """A server's job."""
    Coordinator(run_folder.path, run_folder.next_generation()).run(ask_honest_agents)


def test_a_server_job_builds_once(tmp_path, builds):
    run_folder = new_run(tmp_path, WANTED, personalize=5)
    job(run_folder)
    assert builds == [WANTED.digest]
    job(run_folder)  # finds the finished run
    assert builds == [WANTED.digest] * 2


def test_an_agents_daemon_builds_a_plan_once(tmp_path, builds):
    agent = Agent(make_agent_config({"fleet": dict(MDPS)}), 1, tmp_path / "own")
    message = named_leaves(start())
    builds.clear()
    requests = [("prepare", 0), ("evaluate", 0), ("update", 0), ("update", 0), ("update", 1), ("personalize", 2)]
    for kind, round_ in requests:
        fields = {"run": "r", "generation": "1", "round": str(round_), "m": "4", "plan": WANTED.to_toml()}
        reply = agent.answer(Frame(kind, fields, message))
        assert reply.kind != "error", reply.fields
    assert builds == [WANTED.digest]


def start():
    """The message before the first round."""
    return WANTED.experiment.initial_states(0)[0].message


@pytest.mark.parametrize("seeds", [[0], [0, 3]], ids=["networked", "two seeds"])
def test_the_train_command_builds_the_networked_config_once(tmp_path, builds, monkeypatch, capsys, seeds):
    fleet = tmp_path / "fleet"
    fleet.mkdir()
    FleetInfo("fleet", "localhost", 8002, "", agents=NAMES).save(fleet / ABOUT)
    wanted = config("built", 2, seeds=seeds)
    (tmp_path / "c.toml").write_text(wanted.to_toml())

    def run(self):
        """Train in this process instead of in the server's, whose builds do not count here."""
        before = len(builds)
        job(self.run_folder)
        del builds[before:]

    monkeypatch.setattr(supervisor.Supervisor, "run", run)
    expected = [networked(wanted).digest]
    for _ in range(2):  # trains, then shows the finished run
        builds.clear()
        commands.train_and_show(fleet, tmp_path / "c.toml", None, Terms, 1.0, False, [])
        assert builds == expected
    said = capsys.readouterr().err
    assert said.count("uploads are combined by their geometric median") == 1, "where it trains, not where it shows"
