"""Reports of environments come over a network: they are checked, and agents that are unlike are named."""

import json
import time

import poles
import pytest
from in_process_fleet import NAMES, REPORT, InProcessAgents, honest_answer, new_run, train

from perfedrl.errors import UserError
from perfedrl.experiments.config import parse_config
from perfedrl.federation.environment_report import PLAN_TABLE, parsed_report
from perfedrl.federation.frames import Frame, decode, encode
from perfedrl.federation.server import environment_agreement
from perfedrl.federation.server.answers import Answers
from perfedrl.federation.server.environment_agreement import agreement
from perfedrl.federation.server.presenter import LEAST_INTERVAL
from perfedrl.federation.server.run_folder import RunFolder

CONFIG = parse_config(poles.table(1))
OTHER = REPORT.model_copy(update={"observation_size": 2, "actions": 3})
FIRST, SECOND, THIRD = NAMES


def changed(**changes):
    return json.dumps({**REPORT.table(), **changes})


BAD = {
    "no JSON": "{",
    "no table": "[3]",
    "long": changed(outcomes=["x" * 20_000]),
    "unknown": changed(more=1),
    "negative": changed(observation_size=-4),
    "huge": changed(observation_size=10**9),
    "a fraction": changed(actions=2.5),
    "a boolean": changed(actions=True),
    "no actions": json.dumps({key: x for key, x in REPORT.table().items() if key != "actions"}),
    "both": changed(action_size=2),
    "no components": changed(actions=[]),
    "many components": changed(actions=[2] * 2000),
    "horizon": changed(horizon=10**9),
    "discount": changed(discount=1.0),
    "nan": changed(discount=float("nan")),
    "outcomes": changed(outcomes=["\x1b[31m"]),
    "many outcomes": changed(outcomes=[f"x{i}" for i in range(100)]),
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_an_invalid_report_is_one_sentence(text):
    with pytest.raises(UserError) as error:
        parsed_report(text)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_most_agents_say_what_the_environment_is():
    measured = REPORT.model_copy(update={"outcomes": ("score", "success")})
    assert agreement({FIRST: REPORT, SECOND: None}, 2) == REPORT
    assert agreement({FIRST: OTHER, SECOND: REPORT, THIRD: REPORT}, 2) == REPORT
    assert agreement({FIRST: REPORT, SECOND: measured, THIRD: REPORT}, 3).outcomes == ("score",)
    assert agreement({FIRST: REPORT, SECOND: measured}, 2).outcomes == ("score", "success")
    with pytest.raises(UserError, match="no agent reports"):
        agreement({FIRST: None}, 1)


def test_an_agent_that_is_unlike_the_others_is_named():
    why = (
        "agents of one fleet must be alike: agent-0 has observations of length 4, 2 actions, horizon 9 and discount "
        "0.99; agent-2 has observations of length 2, 3 actions, horizon 9 and discount 0.99"
    )
    with pytest.raises(UserError) as error:
        agreement({FIRST: REPORT, SECOND: REPORT, THIRD: OTHER}, 3)
    assert str(error.value) == why


class Honest:
    """An agent that answers without training, and may report another environment."""

    def __init__(self, report):
        self.report = report

    def answer(self, question):
        answer = decode(honest_answer(encode(question)))
        return Frame(answer.kind, {**answer.fields, PLAN_TABLE: self.report}, answer.tensors)


def fleet(*reports):
    return InProcessAgents({name: Honest(report) for name, report in zip(NAMES, reports, strict=True)})


def test_a_run_goes_on_without_an_agent_that_is_unlike_if_enough_are_left(tmp_path):
    good, other = REPORT.model_dump_json(), OTHER.model_dump_json()
    folder = new_run(tmp_path, CONFIG, min_agents=2)
    train(folder, fleet(good, other, good))
    (event,) = [event for event in folder.events() if event["event"] == "unlike"]
    assert event["agent"] == SECOND
    assert event["reason"].startswith("it has observations of length 2, 3 actions")
    again = new_run(tmp_path / "all", CONFIG)
    with pytest.raises(UserError, match=r"must be alike: agent-0 has .*; agent-1 has observations of length 2"):
        train(again, fleet(good, other, good))


def test_an_agent_with_an_invalid_report_is_named(tmp_path):
    with pytest.raises(UserError, match="from 3 agents, got 2; agent-1: the report of the environment is not valid"):
        train(new_run(tmp_path, CONFIG), fleet(REPORT.model_dump_json(), "{", REPORT.model_dump_json()))


def test_a_run_that_cannot_get_enough_reports_fails_at_once(tmp_path):
    """One report is invalid and one agent is away: all three are needed, so nobody is waited for."""
    folder, asked = new_run(tmp_path, CONFIG, patience=5.0), []

    def ask(kind, frame, without, enough, deadline):
        asked.append(kind)
        answers = Answers((FIRST, SECOND), {FIRST: honest_answer(frame)})
        answers.frames[SECOND] = encode(Honest("{").answer(decode(frame)))
        enough(answers)
        return answers

    with pytest.raises(UserError, match="from 3 agents, got 1; agent-1: the report of the environment is not valid"):
        train(folder, ask)
    assert asked == ["describe"]
    (event,) = [event for event in folder.events() if event["event"] == "unlike"]
    assert (event["agent"], event["reason"]) == (SECOND, "the report of the environment is not valid JSON")


def test_a_rejected_report_is_logged_once_and_a_missing_one_is_asked_for_again(tmp_path, monkeypatch):
    """Two agents are enough: the second one has no valid report, and the third one comes late."""
    monkeypatch.setattr(environment_agreement, "PAUSE", 0.0)
    folder, rounds = new_run(tmp_path, CONFIG, min_agents=2), []
    late = {FIRST: Honest(REPORT.model_dump_json()), SECOND: Honest("{")}
    everybody = InProcessAgents({**late, THIRD: Honest(REPORT.model_dump_json())})

    def ask(kind, *rest):
        rounds.append(kind)
        return InProcessAgents(late)(kind, *rest) if rounds.count("describe") < 3 else everybody(kind, *rest)

    train(folder, ask)
    assert rounds.count("describe") == 3
    assert [event["agent"] for event in folder.events() if event["event"] == "unlike"] == [SECOND]


def test_the_status_is_written_now_and_then_while_agents_describe_their_environments(tmp_path, monkeypatch):
    folder, written, write = new_run(tmp_path, CONFIG), [], RunFolder.write_progress
    monkeypatch.setattr(RunFolder, "write_progress", lambda self, status: written.append(status) or write(self, status))

    def ask(kind, frame, without, enough, deadline):
        answers = Answers(NAMES)
        for _ in range(1000 if kind == "describe" else 1):
            enough(answers)
        answers.frames.update({name: honest_answer(frame) for name in NAMES})
        return answers

    begun = time.monotonic()
    train(folder, ask)
    shown = [status for status in written if status["phase"] == "describe"]
    assert 1 <= len(shown) <= 1 + (time.monotonic() - begun) / LEAST_INTERVAL
    assert shown[0]["agents"] == dict.fromkeys(NAMES, "waiting")


def test_a_resumed_run_keeps_its_report(tmp_path):
    folder, engine = new_run(tmp_path, CONFIG), fleet(*[REPORT.model_dump_json()] * 3)
    train(folder, engine)
    assert engine.asked[0][0] == "describe"
    assert parsed_report(folder.report()) == REPORT
    later = fleet(*[OTHER.model_dump_json()] * 3)
    train(folder, later)
    assert later.asked == [], "a finished run asks nobody"
