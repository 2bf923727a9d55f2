"""An agent's own privacy: its floor, its budget, and a ledger that no plan, round, run or crash gets around."""

import json
import math
import sys

import numpy as np
import pytest
import tomli_w
from fixtures import write
from in_process_fleet import NAMES, InProcessAgents, new_run, train
from real_fleet import MDPS, config

from perfedrl import privacy
from perfedrl.errors import UserError
from perfedrl.federation.agent import answer_store
from perfedrl.federation.agent.answer_store import AnswerStore
from perfedrl.federation.agent.config import PrivacyDemands, load_agent_config, make_agent_config, read_plan
from perfedrl.federation.agent.privacy_ledger import PrivacyLedger
from perfedrl.federation.agent.request_handler import Agent
from perfedrl.federation.agent.worker import LocalTraining
from perfedrl.federation.frames import Frame

GRID = {"env": "gridworld", "width": 3, "goals": [[0, 0], [2, 2], [0, 2]]}
STEPS = {"name": "fedavg-pg", "alpha": 0.5, "beta": 0.3, "m": 2}
DELTA = 1e-5
DEMANDS = {"least_noise": 4.0, "largest_clip": 0.5, "epsilon": 3.0}


def plan(noise=4.0, clip=0.1, **more) -> dict:
    table = {"name": "x", "seeds": [7], "rounds": 5, "fleet": GRID, "policy": {"name": "table"}, "algorithm": STEPS}
    return {**table, **({} if noise is None else {"privacy": {"clip": clip, "noise": noise}}), **more}


def loss(*noises):
    """The epsilon of one upload with each of these noises."""
    return privacy.loss_of_cost(math.fsum(privacy.concentrated_cost(noise) for noise in noises), DELTA)


class Asker:
    """An agent that is asked for uploads; its local steps are replaced by nothing, so that nothing compiles."""

    def __init__(self, folder, told=None, **settings):
        self.told = [] if told is None else told
        self.agent = Agent(make_agent_config({"fleet": GRID, **settings}), 0, folder, self.told.append)

    def __call__(self, round_=0, table=None, run="r", generation=1, shift=0.0, kind="update", **fields) -> Frame:
        fields |= {"run": run, "generation": str(generation), "round": str(round_)}
        fields["plan"] = tomli_w.dumps(plan() if table is None else table)
        theta = np.full((9, 4), shift, np.float32)
        return self.agent.answer(Frame(kind, fields, {"theta": theta}))


@pytest.fixture(autouse=True)
def nothing_is_played(monkeypatch):
    def local_step(training, function, message, state, moment):
        return message + np.float32(0.01) * (1 + moment), state

    monkeypatch.setattr(LocalTraining, "_timed", local_step)


@pytest.fixture
def ask(tmp_path):
    return Asker(tmp_path / "own")


def entries(asker):
    return [(x.run, x.noise, x.uploads) for x in asker.agent.ledger.entries()]


# --- drills: what a server could do before --------------------------------------------------------------------------


def test_a_round_that_was_uploaded_with_noise_is_not_uploaded_without(ask):
    noised = ask()
    raw = ask(table=plan(None))
    assert noised.kind == "upload"
    assert raw.kind == "error"
    assert "uploads nothing to it without" in raw.fields["message"]
    assert "without" in ask(3, plan(0.0)).fields["message"], "clipping alone is no noise, in later rounds too"


def test_little_noise_in_early_rounds_is_not_forgotten_at_the_end(ask):
    for k in range(5):
        assert ask(k, plan(0.01)).kind == "upload"
    last = ask(5, plan(10.0))
    assert float(last.fields["epsilon"]) == loss(*[0.01] * 5, 10.0) > 50_000
    assert f"epsilon {loss(*[0.01] * 5, 10.0):.4g} at delta 1e-05 over the agent's lifetime" in ask.told[-1]


def test_a_new_run_does_not_start_at_zero(ask):
    first, second = ask(run="one"), ask(run="two")
    assert float(second.fields["epsilon"]) == loss(4.0, 4.0) > float(first.fields["epsilon"]) == loss(4.0)
    assert [x.fields["privacy_releases"] for x in (first, second)] == ["1", "2"]


def test_the_same_round_with_another_message_or_plan_is_another_upload(ask):
    first, again = ask(), ask()
    np.testing.assert_array_equal(first.tensors["theta"], again.tensors["theta"])
    assert entries(ask) == [("r", 4.0, 1)], "an answer that is sent again costs nothing"
    ask(shift=1.0)
    ask(table=plan(5.0))
    assert entries(ask) == [("r", 4.0, 2), ("r", 5.0, 1)]


def test_an_upload_without_noise_makes_every_later_loss_infinite(ask):
    assert "epsilon" not in ask(run="open", table=plan(None)).fields
    assert ask(1, run="open", table=plan(None)).kind == "upload"
    assert entries(ask) == [("open", 0.0, 1)]
    assert ask(run="closed").fields["epsilon"] == "inf"


# --- the agent's own demands -----------------------------------------------------------------------------------------

BELOW = {
    "no privacy": (plan(None), r"no table \[privacy\].*noise >= 4"),
    "no noise": (plan(0.0), r"noise is 0; this agent's least_noise is 4"),
    "little noise": (plan(3.999), r"noise is 3.999; this agent's least_noise is 4"),
    "a long clip": (plan(4.0, clip=0.6), r"clip is 0.6; this agent's largest_clip is 0.5"),
}


@pytest.mark.parametrize(("table", "why"), BELOW.values(), ids=BELOW)
def test_a_plan_below_the_floor_is_rejected_before_it_is_built(table, why, monkeypatch):
    built = []
    monkeypatch.setattr("perfedrl.experiments.config.build", lambda *_: built.append(1))
    with pytest.raises(UserError, match=why) as error:
        read_plan(tomli_w.dumps(table), make_agent_config({"fleet": GRID, "privacy": DEMANDS}))
    assert (built, "\n" in str(error.value)) == ([], False)


@pytest.mark.parametrize("kind", ["prepare", "update", "evaluate", "personalize"])
def test_no_request_gets_around_the_floor(kind, tmp_path):
    ask = Asker(tmp_path / "own", privacy=DEMANDS)
    assert "[privacy]" in ask(table=plan(None), kind=kind, m="3").fields["message"]
    assert entries(ask) == []


def test_an_upload_beyond_the_budget_is_refused_and_costs_nothing(tmp_path):
    ask = Asker(tmp_path / "own", privacy=DEMANDS)
    assert ask.told == ["uploads with noise only: epsilon 0 of 3 at delta 1e-05 over the agent's lifetime"]
    assert loss(4.0) < 3.0 < loss(4.0, 4.0)
    assert ask().kind == "upload"
    assert ask.told[-1].endswith(f"epsilon {loss(4.0):.4g} of 3 at delta 1e-05 over the agent's lifetime")
    refused = ask(1)
    assert refused.fields["message"] == (
        f"this agent's privacy budget is spent: with this upload epsilon would be {loss(4.0, 4.0):.4g} at delta 1e-05, "
        f"its limit is 3, and its uploads so far, 1 with noise, have spent {loss(4.0):.4g}"
    )
    assert entries(ask) == [("r", 4.0, 1)]
    assert ask().kind == "upload", "what was uploaded may be sent again"
    assert ask(1, plan(40.0)).kind == "upload", "more noise costs less"
    later = Asker(tmp_path / "own", privacy=DEMANDS)
    assert "budget is spent" in later(run="another").fields["message"]


def test_a_budget_is_spent_exactly(tmp_path):
    ask = Asker(tmp_path / "own", privacy={**DEMANDS, "epsilon": loss(4.0, 4.0, 7.0)})
    kinds = [ask(k, plan(noise)).kind for k, noise in enumerate((4.0, 4.0, 6.999, 7.0, 1e6))]
    assert kinds == ["upload", "upload", "error", "upload", "error"]


def test_outcomes_and_own_parameters_stay_with_an_agent_that_demands_privacy(tmp_path):
    ask = Asker(tmp_path / "own", privacy=DEMANDS)
    assert "does not report outcomes" in ask(kind="evaluate").fields["message"]
    assert "its own parameters stay here" in ask(kind="personalize", m="3", parameters="yes").fields["message"]
    said = {yes: make_agent_config({"fleet": GRID, "privacy": DEMANDS, "tell_outcomes": yes}) for yes in (True, False)}
    assert {yes: made.tells_outcomes for yes, made in said.items()} == {True: True, False: False}
    assert make_agent_config({"fleet": GRID}).tells_outcomes


BAD = {
    "negative noise": ({"least_noise": -1.0}, "privacy.least_noise: .*greater than 0"),
    "no noise": ({"least_noise": 0.0}, "privacy.least_noise: .*greater than 0"),
    "a negative clip": ({"largest_clip": -1.0}, "privacy.largest_clip: .*greater than 0"),
    "no budget": ({"epsilon": 0.0}, "privacy.epsilon: .*greater than 0"),
    "delta 0": ({"delta": 0.0}, "privacy.delta: .*greater than 0"),
    "delta 1": ({"delta": 1.0}, "privacy.delta: .*less than 1"),
    "no number": ({"least_noise": "much"}, "privacy.least_noise"),
    "infinite": ({"epsilon": float("inf")}, "privacy.epsilon"),
    "unknown": ({"noise": 4.0}, "privacy.noise"),
}


@pytest.mark.parametrize(("table", "why"), BAD.values(), ids=BAD)
def test_a_bad_table_is_one_sentence(table, why, tmp_path):
    path = write(tmp_path / "agent.toml", {"fleet": GRID, "privacy": {**DEMANDS, **table}})
    with pytest.raises(UserError, match=why) as error:
        load_agent_config(path)
    assert "\n" not in str(error.value)


def test_the_demands_need_a_least_noise_and_a_budget():
    for lacking in ("least_noise", "epsilon"):
        with pytest.raises(UserError, match=f"lacks 'privacy.{lacking}'"):
            make_agent_config({"fleet": GRID, "privacy": {k: v for k, v in DEMANDS.items() if k != lacking}})
    made = PrivacyDemands(least_noise=1.0, epsilon=2.0)
    assert (made.delta, made.largest_clip) == (1e-5, None)


def test_a_run_goes_on_without_an_agent_whose_budget_is_spent(tmp_path):
    limit = privacy.loss_of_cost(2 * privacy.concentrated_cost(2.0), DELTA)
    tables = [{"privacy": {"least_noise": 2.0, "epsilon": limit if i == 0 else 1e6}} for i in range(3)]
    agents = {
        name: Agent(make_agent_config({"fleet": dict(MDPS), **tables[i]}), i, tmp_path / name)
        for i, name in enumerate(NAMES)
    }
    algorithm = {"name": "fedavg-pg", "alpha": 0.5, "beta": 0.3, "m": 2}
    folder = new_run(tmp_path, config("private", 4, algorithm, privacy={"clip": 0.1, "noise": 2.0}), min_agents=2)
    train(folder, InProcessAgents(agents))
    rounds = [event["agents"] for event in folder.events() if event["event"] == "round"]
    assert rounds == [list(NAMES)] * 2 + [list(NAMES[1:])] * 2
    told = [event for event in folder.events() if event["event"] == "refused"]
    assert {(event["agent"], event["round"]) for event in told} == {("agent-0", 2), ("agent-0", 3)}
    assert all("privacy budget is spent" in event["reason"] for event in told)
    assert not [event for event in folder.events() if event["event"] == "quarantined"]


# --- the ledger on disk ---------------------------------------------------------------------------------------------


def crash(*_, **__):
    raise KeyboardInterrupt


def test_a_crash_at_any_write_counts_too_much_and_never_too_little(tmp_path, monkeypatch):
    """The agent dies at its n-th write, before it or after it: whatever can be sent later is in the ledger."""
    for n in range(6):
        for before in (True, False):
            folder, calls = tmp_path / f"{n}-{before}", []

            def dying(path, content, mode, n=n, before=before, calls=calls, write=answer_store.write_atomically):
                calls.append(path)
                if len(calls) == n + 1 and before:
                    crash()
                write(path, content, mode)
                if len(calls) == n + 1:
                    crash()

            with monkeypatch.context() as patch:
                patch.setattr(answer_store, "write_atomically", dying)
                died = 0
                try:
                    for k in range(3):
                        Asker(folder)(k)
                except KeyboardInterrupt:
                    died = 1
            ask = Asker(folder)
            stored = ask.agent.store.stored("r")
            sent = 0 if stored is None else stored.releases
            assert sent <= ask.agent.ledger.noised("r") <= sent + died
            assert ask(3).fields["privacy_releases"] == str(ask.agent.ledger.noised("r"))


def test_the_ledger_is_written_before_the_answer(ask, monkeypatch):
    order = []
    save, record = AnswerStore._save, PrivacyLedger.record
    monkeypatch.setattr(AnswerStore, "_save", lambda *args: (order.append("answer"), save(*args)))
    monkeypatch.setattr(PrivacyLedger, "record", lambda *args: (order.append("ledger"), record(*args)))
    assert ask().kind == "upload"
    assert order == ["ledger", "answer"]


def test_a_damaged_or_lost_ledger_stops_the_agent(ask, tmp_path):
    ask()
    path = ask.agent.ledger.path
    assert path.stat().st_mode & 0o777 == 0o600
    data = path.read_bytes()
    less = json.loads(data)
    less["content"]["entries"][0]["noise"] = 400.0
    for damaged in (b"", b"{}", b"[]", data[:-2], json.dumps(less).encode(), b"[" * 100_000, b"\xff"):
        path.write_bytes(damaged)
        for run in ("r", "another"):
            reply = ask(run=run)
            assert reply.kind == "error"
            assert "is damaged, so that it is not known what this agent has uploaded" in reply.fields["message"]
        with pytest.raises(UserError, match="is damaged"):
            Asker(tmp_path / "own")
    path.unlink()
    assert "restore the ledger" in ask(run="another").fields["message"]
    with pytest.raises(UserError, match="the agent has uploaded to r: restore the ledger"):
        Asker(tmp_path / "own")
    path.write_bytes(data)
    assert Asker(tmp_path / "own")().kind == "upload"


def test_an_older_ledger_is_noticed_where_the_answers_show_it(ask):
    ask()
    older = ask.agent.ledger.path.read_bytes()
    ask(1)
    ask.agent.ledger.path.write_bytes(older)
    assert "has 1 uploads to r, but 2 were made" in ask(2).fields["message"]


def test_a_ledger_belongs_to_one_agent(ask):
    ask()
    with pytest.raises(UserError, match="belongs to agent number 0; this is agent number 1"):
        PrivacyLedger(AnswerStore(ask.agent.store.folder, 1)).entries()


def test_an_agent_with_earlier_uploads_cannot_begin_to_demand_privacy_at_zero(ask, tmp_path):
    ask(table=plan(None))
    later = Asker(tmp_path / "own", privacy=DEMANDS)
    assert "epsilon inf of 3" in later.told[0]
    assert "budget is spent" in later(run="new").fields["message"]
    later.agent.ledger.path.unlink()
    with pytest.raises(UserError, match="the agent has uploaded to r"):
        Asker(tmp_path / "own", privacy=DEMANDS)


def test_a_damaged_file_of_an_old_run_stops_only_agents_with_a_budget(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "run-old.safetensors").write_bytes(b"of another version")
    with pytest.raises(UserError, match=r"run-old\.safetensors is damaged"):
        Asker(tmp_path / "own", privacy=DEMANDS)
    ask = Asker(tmp_path / "own")
    assert ask(run="new").kind == "upload"
    assert "is damaged" in ask(run="old").fields["message"]


def test_an_upload_that_could_not_be_stored_is_counted_once_whatever_the_number_of_tries(ask, monkeypatch):
    save = AnswerStore._save

    def full(*_):
        raise UserError("the disk is full")

    monkeypatch.setattr(AnswerStore, "_save", full)
    for _ in range(3):
        assert "the disk is full" in ask().fields["message"]
    assert entries(ask) == [("r", 4.0, 1)]
    monkeypatch.setattr(AnswerStore, "_save", save)
    assert ask().kind == "upload"
    assert entries(ask) == [("r", 4.0, 1)]
    ask(1)
    assert entries(ask) == [("r", 4.0, 2)]


def test_a_run_whose_file_is_gone_gets_nothing_without_noise(ask):
    ask()
    ask.agent.store.path("r").unlink()
    assert "with noise, and uploads nothing to it without" in ask(1, table=plan(None)).fields["message"]


def test_an_agent_that_demands_privacy_needs_the_accounting_library(tmp_path, monkeypatch):
    ask = Asker(tmp_path / "open")
    ask()
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    assert "epsilon" not in ask(1).fields, "others are not stopped"
    (tmp_path / "own").mkdir()
    (tmp_path / "open" / "privacy-ledger.json").rename(tmp_path / "own" / "privacy-ledger.json")
    with pytest.raises(UserError, match="pip install"):
        Asker(tmp_path / "own", privacy=DEMANDS)
