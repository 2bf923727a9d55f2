"""The state machine of a run as pure function calls: questions, answers, and the commands that follow."""

import jax
import numpy as np
import pytest
from in_process_fleet import NAMES, honest_answer
from real_fleet import config

import perfedrl as pf
from perfedrl.cli.federation import sentence
from perfedrl.experiments.files import named_leaves
from perfedrl.federation.frames import Frame, decode, encode
from perfedrl.federation.server.answers import Answers, largest_return, outlier, unbelievable
from perfedrl.federation.server.commands import Announce, Fail, Finish, HandOver, Log, Question
from perfedrl.federation.server.network_config import networked
from perfedrl.federation.server.run_folder import RunSpec, ServerCheckpoint, Terms
from perfedrl.federation.server.run_state_machine import RunStateMachine

TWO_ROUNDS = config("machine", 2)
FIRST, SECOND, THIRD = NAMES


def machine(wanted=TWO_ROUNDS, generation=2, released=(), since=0, newcomers=(), **terms):
    terms = Terms(**{"min_agents": 2, "deadline": 10.0, "patience": 30.0, "strikes": 2, "personalize": 0, **terms})
    spec = RunSpec("r", wanted.to_toml(), NAMES, terms, "runs", released, since, newcomers)
    return RunStateMachine(wanted, spec, generation)


def answers(question, *, failing=(), silent=(), newcomers=(), **other):
    """The answers of all asked agents; `other` replaces those of agents, with "-" written as "_"."""
    asked = tuple(name for name in (*NAMES, *newcomers) if name not in question.without)
    spoiled = {name.replace("_", "-"): data for name, data in other.items()}
    honest = {name: honest_answer(question.frame) for name in asked if name not in (*failing, *silent)}
    failures = {name: "no agent listens" for name in failing if name in asked}
    return Answers(asked, honest | {name: data for name, data in spoiled.items() if name in asked}, failures)


def question_in(commands):
    return next((command for command in commands if isinstance(command, Question)), None)


def events(commands):
    """The logged events with the agents that they name."""
    return [(c.event, c.fields.get("agent")) for c in commands if isinstance(c, Log)]


def kinds(commands):
    return [type(command).__name__ for command in commands]


def until(rules, phase, round_=0, saved=None, *, trouble=None):
    """The state and the question of a phase in a round, after honest answers."""
    state, commands = rules.begin(saved)
    while True:
        question = question_in(commands)
        if question is None or (question.kind, question.round) == (phase, round_):
            return state, question
        given = (trouble or {}).get((question.kind, question.round), answers)(question)
        state, commands = rules.answered(state, given, 0.0)


@pytest.mark.parametrize("personalize", [0, 5])
def test_the_phases_of_a_run(personalize):
    rules = machine(personalize=personalize)
    (state, commands), seen = rules.begin(), []
    while (question := question_in(commands)) is not None:
        seen.append((question.kind, question.round))
        state, commands = rules.answered(state, answers(question), 0.0)
    last = [("personalize", 2)] if personalize else []
    assert seen == [("prepare", 0), ("evaluate", 0), ("update", 0), ("update", 1), ("evaluate", 2), *last]
    assert isinstance(commands[-1], Finish)
    assert (state.phase, state.round, state.history.rounds.tolist()) == ("finished", 2, [0, 2])


NEWCOMERS = ("agent-3", "agent-4")


def trained_with_newcomers(**terms):
    """The rules of a run with newcomers, and its checkpoint after the last round."""
    rules = machine(newcomers=NEWCOMERS, personalize=5, **terms)
    (state, commands), seen = rules.begin(), []
    while (question := question_in(commands)) is not None:
        seen.append(question.kind)
        assert set(NEWCOMERS) <= question.without
        state, commands = rules.answered(state, answers(question), 0.0)
    assert "personalize" not in seen
    assert isinstance(commands[-1], HandOver)
    assert state.phase == "trained"
    return rules, ServerCheckpoint("r", 0, state.round, state.server, state.history, state.gate.snapshot(), 0.0)


def test_newcomers_personalize_in_a_job_after_the_last_round():
    rules, saved = trained_with_newcomers()
    state, question = until(rules, "personalize", 2, saved)
    assert question.without == frozenset()
    state, commands = rules.answered(state, answers(question, newcomers=NEWCOMERS), 0.0)
    assert [agent for event, agent in events(commands) if event == "personalized"] == [*NAMES, *NEWCOMERS]
    assert isinstance(commands[-1], Finish)


def test_answers_of_newcomers_do_not_stand_in_for_those_of_agents_that_train():
    rules, saved = trained_with_newcomers(min_agents=3)
    state, question = until(rules, "personalize", 2, saved)
    given = answers(question, newcomers=NEWCOMERS, failing=[FIRST])
    assert len(given.frames) == 4
    assert not question.enough(given)
    state, commands = rules.answered(state, given, 10.0)
    assert kinds(commands)[-2:] == ["Pause", "Question"]
    assert question_in(commands).needed == 1
    state, commands = rules.answered(state, answers(question_in(commands), failing=[FIRST]), 31.0)
    assert "expected answers to 'personalize' from 3 agents, got 2" in commands[-1].reason


def test_failed_episodes_that_agents_report_are_logged():
    rules = machine()
    state, question = until(rules, "update")
    honest = decode(honest_answer(question.frame))
    failed = encode(Frame("upload", {**honest.fields, "failed_episodes": "7"}, honest.tensors))
    _, commands = rules.answered(state, answers(question, agent_1=failed), 0.0)
    logged = [c.fields for c in commands if isinstance(c, Log) and c.event == "failed episodes"]
    assert logged == [{"agent": SECOND, "round": 0, "count": 7}]


def test_a_long_upload_is_shortened_and_logged_with_its_factor():
    rules = machine()
    state, question = until(rules, "update")
    long = honest_answer(question.frame, far=20.0)
    state, commands = rules.answered(state, answers(question, agent_1=long), 0.0)
    (about,) = [c.fields for c in commands if isinstance(c, Log) and c.event == "clipped"]
    assert (about["agent"], about["round"]) == (SECOND, 0)
    assert about["factor"] == pytest.approx(20.0, rel=1e-3), "200 times as long as usual, where 10 times is the limit"
    assert events(commands)[-1] == ("round", None)
    moved = jax.tree.map(np.subtract, state.server.message, rules.start.message)
    np.testing.assert_allclose(moved, np.full_like(moved, (0.1 + 1.0 + 0.1) / 3), rtol=1e-3)


@pytest.mark.parametrize("far", [-0.1, -1.0, -20.0, -1e9])
def test_by_default_one_agent_of_three_cannot_turn_a_round_around(far):
    """Uploads in the opposite direction: as long as the others', at the limit, 20 times beyond it, and absurd."""
    rules = machine(networked(TWO_ROUNDS))
    state, question = until(rules, "update")
    state, _ = rules.answered(state, answers(question, agent_1=honest_answer(question.frame, far=far)), 0.0)
    moved = jax.tree.map(np.subtract, state.server.message, rules.start.message)
    np.testing.assert_allclose(moved, np.full_like(moved, 0.1), rtol=1e-3)


@pytest.mark.parametrize(("far", "named"), [(-0.1, [(19, THIRD)]), (0.1, [])], ids=["opposite", "alike"])
def test_an_agent_that_opposes_all_others_for_many_rounds_is_named_once(far, named):
    rules = machine(networked(config("machine", 45)))
    (state, commands), found = rules.begin(), []
    while (question := question_in(commands)) is not None:
        lie = {"agent_2": honest_answer(question.frame, far=far)} if question.kind == "update" else {}
        state, commands = rules.answered(state, answers(question, **lie), 0.0)
        found += [c.fields for c in commands if isinstance(c, Log) and c.event in ("opposing", "refused", "clipped")]
    assert [(about["round"], about["agent"]) for about in found] == named
    if named:
        assert sentence({"event": "opposing", **found[0]}) == (
            "round 19: for 20 rounds the uploads of agent-2 have pointed against all others'; it may be hostile, or "
            "its task the opposite of theirs"
        )


AFTER = {
    ("prepare", 0): ["Question"],
    ("evaluate", 0): ["Save", "Announce", "Question"],
    ("update", 0): ["Save", "Log", "Announce", "Question"],
    ("update", 1): ["Save", "Log", "Question"],
    ("evaluate", 2): ["Save", "Announce", "Finish"],
}


@pytest.mark.parametrize("phase", AFTER, ids=str)
def test_the_commands_after_each_phase(phase):
    rules = machine()
    state, question = until(rules, *phase)
    assert kinds(rules.answered(state, answers(question), 0.0)[1]) == AFTER[phase]


def test_a_transition_does_not_change_the_old_state():
    rules = machine(strikes=1)
    state, question = until(rules, "update")
    before = state.gate.snapshot(), named_leaves(state.server), state.round
    once = rules.answered(state, answers(question, agent_0=b"?"), 0.0)
    again = rules.answered(state, answers(question, agent_0=b"?"), 0.0)
    after = state.gate.snapshot(), named_leaves(state.server), state.round
    np.testing.assert_equal(after, before)
    assert events(once[1]) == events(again[1])
    np.testing.assert_equal(named_leaves(once[0].server), named_leaves(again[0].server))


# --- one question and its answers: (answers, waited) -> logged events, and what follows ---------------------------

FAILURES = [("failure", FIRST), ("failure", SECOND)]
SILENCES = [("silent", FIRST), ("silent", SECOND)]
OUTCOMES = {
    "all answer": ({}, 0.0, [("round", None)], "next"),
    "one fails": ({"failing": [FIRST]}, 0.0, [("failure", FIRST), ("round", None)], "next"),
    "one is silent": ({"silent": [THIRD]}, 10.0, [("silent", THIRD), ("round", None)], "next"),
    "one is rejected": ({"agent_1": b"?"}, 0.0, [("refused", SECOND), ("round", None)], "next"),
    "two fail": ({"failing": [FIRST, SECOND]}, 0.0, [*FAILURES, ("repeated", None)], "again"),
    "two are silent": ({"silent": [FIRST, SECOND]}, 10.0, [*SILENCES, ("repeated", None)], "again"),
    "two are silent for too long": ({"silent": [FIRST, SECOND]}, 31.0, SILENCES, "fail"),
    "two are rejected": ({"agent_0": b"?", "agent_1": b"?"}, 0.0, [("refused", FIRST), ("refused", SECOND)], "fail"),
}


@pytest.mark.parametrize(("given", "waited", "logged", "then"), OUTCOMES.values(), ids=OUTCOMES)
def test_the_answers_to_an_update(given, waited, logged, then):
    rules = machine()
    state, question = until(rules, "update")
    state, commands = rules.answered(state, answers(question, **given), waited)
    assert events(commands) == logged
    if then == "next":
        assert (question_in(commands).kind, question_in(commands).round, state.round) == ("update", 1, 1)
    elif then == "again":
        assert kinds(commands)[-2:] == ["Pause", "Question"]
        assert (question_in(commands).kind, question_in(commands).round, state.round) == ("update", 0, 0)
        assert question_in(commands).without == {THIRD}, "an agent that has answered is asked again"
        assert question_in(commands).needed == 1
    else:
        assert isinstance(commands[-1], Fail)
        assert "expected answers to 'update' from 2 agents, got 1" in commands[-1].reason
        assert "--min-agents 1" in commands[-1].reason
        assert question_in(commands) is None


def test_the_answers_of_a_repeated_question_are_added():
    rules = machine(min_agents=3)
    state, question = until(rules, "update")
    state, commands = rules.answered(state, answers(question, failing=[FIRST]), 0.0)
    assert sorted(state.accepted) == [SECOND, THIRD]
    state, commands = rules.answered(state, answers(question_in(commands)), 5.0)
    assert events(commands) == [("back", FIRST), ("round", None)]
    about = next(c.fields for c in commands if isinstance(c, Log) and c.event == "round")
    assert (about["round"], about["agents"], about["generation"]) == (0, list(NAMES), 2)


def test_a_lost_agent_is_asked_but_not_waited_for_until_it_answers():
    rules = machine()
    state, question = until(rules, "update")
    two = Answers(NAMES, {FIRST: b"", SECOND: b""})
    assert not question.enough(two)
    state, commands = rules.answered(state, answers(question, silent=[THIRD]), 10.0)
    question = question_in(commands)
    assert THIRD not in question.without
    assert question.enough(two)
    late = answers(question, silent=[THIRD])
    late.late = (THIRD,)
    state, commands = rules.answered(state, late, 0.0)
    assert not state.lost
    assert events(commands)[:1] != [("silent", THIRD)], "it is logged when it becomes lost only"


def test_failed_agents_have_until_the_deadline_for_the_last_evaluation():
    rules = machine()
    state, question = until(rules, "evaluate", 2)
    state, commands = rules.answered(state, answers(question, failing=[FIRST]), 1.0)
    assert kinds(commands) == ["Log", "Pause", "Question"]
    assert question_in(commands).without == {SECOND, THIRD}
    again = answers(question_in(commands), failing=[FIRST])
    assert kinds(rules.answered(state, again, 11.0)[1]) == ["Save", "Announce", "Finish"]
    first, question = until(rules, "evaluate", 0)
    assert Announce() in rules.answered(first, answers(question, failing=[FIRST]), 1.0)[1], "the first one goes on"


def test_returns_that_no_episode_can_have_do_not_count():
    task = pf.gridworld(width=2, horizon=3, discount=0.5).task(0)
    assert largest_return(task) == task.reward_bound * (1 + 0.5 + 0.25 + 0.125)
    assert largest_return(pf.pendulum(agents=1, held_out=0).task(0)) == float("inf")
    fine = {"before.return": -1.9, "after.return": 1.875, "after.score": 1e300}
    assert unbelievable(fine, 1.9) is None
    assert unbelievable({**fine, "after.return": 1e300}, 1.9) == (
        "it reports after.return = 1e+300, and no return is larger than 1.9"
    )


@pytest.mark.parametrize(
    ("returns", "name"),
    [
        ([1.0, 2.0, 3.0], None),
        ([1.0, 2.0, 1e300], "c"),
        ([1.0, -1e5, 2.0, 3.0], "b"),
        ([1.0, 1.0, 1.0], None),
        ([1.0, 1.0, 2.0], None),
        ([1.0, 1.0, 9.0], "c"),
        ([0.0, 0.0, 0.0], None),
        ([1.0, 1e9], None),
        ([1.0, float("nan"), 1e9], None),
    ],
)
def test_an_agent_far_from_all_others_is_named(returns, name):
    assert outlier(dict(zip("abcd", returns, strict=False))) == name


def test_outcomes_that_are_missing_are_not_a_number():
    rules = machine()
    state, question = until(rules, "evaluate")
    state, _ = rules.answered(state, answers(question, agent_1=encode(Frame("error", {"message": "no"}))), 0.0)
    np.testing.assert_array_equal(state.history.after[0, 0], [1.5, np.nan, 1.5])


def test_an_agent_that_rejects_the_plan_is_not_asked_again():
    rules = machine(min_agents=3)
    state, commands = rules.begin()
    refusal = encode(Frame("error", {"message": "not trusted"}))
    _, commands = rules.answered(state, answers(question_in(commands), agent_2=refusal), 0.0)
    assert isinstance(commands[-1], Fail)
    assert f"{THIRD}: not trusted" in commands[-1].reason


STALE = {"an earlier generation": 1, "a later generation": 3}


@pytest.mark.parametrize("generation", STALE.values(), ids=STALE)
def test_uploads_of_another_generation_are_rejected(generation):
    rules = machine()
    state, question = until(rules, "update")
    _, commands = rules.answered(state, answers(question, agent_0=honest_answer(question.frame, generation)), 0.0)
    refused = next(c for c in commands if isinstance(c, Log) and c.event == "refused")
    assert refused.fields["agent"] == FIRST
    assert f"another generation: expected '2', got '{generation}'" in refused.fields["reason"]


def test_uploads_of_another_round_are_rejected():
    rules = machine()
    _, first = until(rules, "update", 0)
    state, second = until(rules, "update", 1)
    _, commands = rules.answered(state, answers(second, agent_0=honest_answer(first.frame)), 0.0)
    assert ("refused", FIRST) in events(commands)


def test_a_rejected_agent_is_in_quarantine_after_its_strikes():
    rules = machine(config("machine", 4))

    def bad(question):
        return answers(question, agent_2=b"?")

    state, question = until(rules, "update", 1, trouble={("update", 0): bad})
    state, commands = rules.answered(state, bad(question), 0.0)
    assert events(commands) == [("refused", THIRD), ("quarantined", THIRD), ("round", None)]
    assert question_in(commands).without == {THIRD}


# --- checkpoints --------------------------------------------------------------------------------------------------


def checkpoint(rules, state):
    seed = rules.config.seeds[0]
    return ServerCheckpoint("r", seed, state.round, state.server, state.history, state.gate.snapshot(), 1.0)


@pytest.mark.parametrize("stop", [("evaluate", 0), ("update", 0), ("update", 1), ("evaluate", 2)], ids=str)
def test_a_run_restored_from_any_checkpoint_ends_in_the_same_state(stop):
    whole = until(machine(), "never")[0]
    state, _ = until(machine(), *stop)
    saved = checkpoint(machine(), state)
    rest = machine(generation=2)
    state, commands = rest.begin(saved)
    assert commands[0] == Log("start", {"generation": 2, "round": saved.round})
    assert question_in(commands).kind == "prepare"
    resumed = until(rest, "never", saved=saved)[0]
    np.testing.assert_equal(named_leaves(resumed.server), named_leaves(whole.server))
    np.testing.assert_equal(resumed.history.arrays(), whole.history.arrays())
    assert resumed.gate.snapshot() == whole.gate.snapshot()


@pytest.mark.parametrize(("generation", "without"), [(2, {THIRD}), (3, set())])
def test_a_quarantined_agent_is_released_by_one_generation_only(generation, without):
    rules = machine(strikes=1)
    state, _ = until(rules, "update", 1, trouble={("update", 0): lambda question: answers(question, agent_2=b"?")})
    assert state.gate.quarantined == (THIRD,)
    rest = machine(strikes=1, generation=generation, released=(THIRD,), since=3)
    _, commands = rest.begin(checkpoint(rules, state))
    assert question_in(commands).without == without


def test_a_restored_gate_has_the_new_terms():
    state, _ = until(machine(), "update", 1)
    rest = machine(strikes=7, factor=4.0)
    restored, _ = rest.begin(checkpoint(rest, state))
    assert (restored.gate.strikes, restored.gate.factor) == (7, 4.0)


def test_a_diverged_step_ends_the_run_and_saves_nothing():
    rules = machine()
    state, question = until(rules, "update")
    rules._weights = lambda names: np.full(len(names), np.nan, np.float32)
    _, commands = rules.answered(state, answers(question), 0.0)
    assert commands == [Fail("training diverged in round 0: lower alpha or beta")]
