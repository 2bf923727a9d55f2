"""Folders of fleets that are moved to another place."""

import json
import shutil
from types import SimpleNamespace

import pytest
import real_fleet

from perfedrl.errors import UserError
from perfedrl.federation.engine import provision, service, supervisor, workflow
from perfedrl.federation.engine.fleet_folder import FleetFolder, Kit, check_path
from perfedrl.federation.engine.local_fleet import started
from perfedrl.federation.server.run_folder import Terms


@pytest.fixture
def fleet(tmp_path):
    provision.init(tmp_path / "here", 3, port=8765)
    return FleetFolder(tmp_path / "here")


def move(fleet, place):
    shutil.move(fleet.folder, place)
    return FleetFolder(place)


def storage(fleet):
    return json.loads((fleet.server / "local" / "storage__resources.json").read_text())["storage"]


def test_a_moved_server_stores_its_jobs_in_its_new_place(fleet, tmp_path):
    fleet.write_storage()
    assert storage(fleet) == str(tmp_path / "here" / "server" / "storage")
    fleet = move(fleet, tmp_path / "there")
    fleet.write_storage()
    assert storage(fleet) == str(tmp_path / "there" / "server" / "storage")


def test_a_run_under_way_is_found_in_the_moved_folder(fleet, tmp_path, monkeypatch):
    """The job names the run only, and the finished run is saved beside it."""
    prepared = supervisor.prepare(fleet, real_fleet.config(), Terms(3))
    moved = move(fleet, tmp_path / "there")
    asked = []
    monkeypatch.setattr(workflow, "Coordinator", lambda *args, **_: SimpleNamespace(run=lambda _: asked.append(args)))
    monkeypatch.chdir(moved.server)
    job = workflow.Rounds(prepared.path.name, 1)
    job.engine = SimpleNamespace(get_clients=list)
    job.run()
    assert asked == [(moved.control(prepared.path.name), 1)]
    spec = type(prepared)(asked[0][0]).spec()
    assert (asked[0][0] / spec.runs).resolve() == moved.runs


@pytest.mark.parametrize("name", ["my fleet", "it's", "a#b", "a\\b"])
def test_a_path_that_nvflare_cannot_handle_is_an_error(fleet, tmp_path, monkeypatch, name):
    for process in ("server_process", "daemon_process"):
        monkeypatch.setattr(service, process, lambda *_: pytest.fail("started"))
    check_path(fleet.folder)
    moved, why = move(fleet, tmp_path / name), r"which has .* in its path; rename it"
    with pytest.raises(UserError, match=why):
        service.serve(moved, print)
    with pytest.raises(UserError, match=why):
        service.join(Kit(moved.kit("agent-0")), None, "arc", print)
    with pytest.raises(UserError, match=why):
        provision.init(tmp_path / name / "new", 1)


@pytest.mark.network
def test_a_moved_fleet_keeps_its_runs_and_continues_the_one_under_way(tmp_path):
    first, second, rounds = real_fleet.config("first", 2), real_fleet.slow(20), 20

    def stop_in_the_middle(view):
        if view.progress.get("round", 0) >= 3:
            raise KeyboardInterrupt

    with real_fleet.running_fleet(tmp_path / "here") as fleet:
        real_fleet.train(fleet, first)
        with pytest.raises(KeyboardInterrupt):
            real_fleet.train(fleet, second, watch=stop_in_the_middle)
        done = fleet.control(supervisor.networked(second).folder)
    before = supervisor.RunFolder(done).rounds_done()
    assert 3 <= before < rounds
    fleet = move(fleet, tmp_path / "there")
    with started(fleet, tmp_path / "here" / "agent.toml"):
        assert supervisor.finished(fleet, first) == fleet.runs / supervisor.networked(first).folder
        run, events = real_fleet.train(fleet, second)
    assert real_fleet.rounds_in(events) == list(range(rounds))
    real_fleet.same_bits(run, second, tmp_path / "simulated")
    assert not (tmp_path / "here" / "fleet").exists()
    assert sorted(path.name for path in fleet.runs.iterdir()) == sorted(
        supervisor.networked(config).folder for config in (first, second)
    )
