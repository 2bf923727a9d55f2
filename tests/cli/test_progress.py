"""Progress: plain lines where there is no terminal, bars on one, and an estimate of the time left in both."""

import io
from types import SimpleNamespace

import pytest
from fixtures import write
from rich.console import Console
from tiny_config import changed

import perfedrl as pf
from perfedrl.cli import console, federation
from perfedrl.pace import Pace, duration
from perfedrl.simulation.observers import Part
from perfedrl.simulation.progress import ProgressBars, ProgressLines, show_progress
from perfedrl.simulation.run_state import RunState


class Clock:
    """A clock that is set by hand."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def state(round_, rounds=100):
    return RunState(round_, None, None, "arc", rounds, "arc and 2 more")


def test_the_time_left_follows_from_the_pace_since_the_start():
    clock = Clock()
    pace = Pace(40, clock)  # resumed at round 40
    assert pace.left(40, 60) == "", "nothing is known before anything is done"
    clock.now += 10
    assert pace.left(50, 50) == "about 50 s left", "ten rounds took ten seconds"


@pytest.mark.parametrize(("seconds", "words"), [(0.4, "0 s"), (89, "89 s"), (150, "2 min"), (6000, "1 h 40 min")])
def test_durations_in_words(seconds, words):
    assert duration(seconds) == words


def test_without_a_terminal_plain_lines_are_printed_now_and_then():
    clock, file = Clock(), io.StringIO()
    lines = ProgressLines(Console(file=file), clock)
    lines.on_start(state(0))
    lines.on_start(state(0))  # of another run of the same group
    for round_, seconds in ((10, 4), (20, 4), (30, 4), (100, 4)):
        clock.now += seconds
        lines.on_round(state(round_))
        lines.on_round(state(round_))
    assert file.getvalue().splitlines() == [
        "arc and 2 more: round 0 of 100",
        "arc and 2 more: round 30 of 100, about 28 s left",
        "arc and 2 more: round 100 of 100, took 16 s",
    ]


def test_runs_of_one_label_that_follow_one_another_are_both_shown():
    clock, file = Clock(), io.StringIO()
    lines = ProgressLines(Console(file=file), clock)
    for _ in range(2):
        lines.on_start(state(0))
        clock.now += 3
        lines.on_round(state(100))
    assert file.getvalue().splitlines() == 2 * [
        "arc and 2 more: round 0 of 100",
        "arc and 2 more: round 100 of 100, took 3 s",
    ]


def test_a_comparison_says_which_method_of_how_many_and_the_time_left():
    """Ten of 23 results were there; the first method of this session took a minute, and twelve remain."""
    clock, file = Clock(), io.StringIO()
    lines = ProgressLines(Console(file=file), clock)
    lines.on_part(Part("gridworld", "mixing", 11, 23, 12, "methods"))
    clock.now += 60
    lines.on_part(Part("gridworld", "pfedme", 12, 23, 11, "methods"))
    assert file.getvalue().splitlines() == [
        "gridworld: 11 of 23 methods, mixing",
        "gridworld: 12 of 23 methods, pfedme, about 12 min left",
    ]


def test_on_a_terminal_bars_show_the_method_its_rounds_and_the_time_left():
    clock, file = Clock(), io.StringIO()
    with show_progress(Console(file=file, force_terminal=True, width=120)) as bars:
        assert isinstance(bars, ProgressBars)
        bars._clock = clock
        bars.on_part(Part("gridworld", "mixing", 11, 23, 12, "methods"))
        bars.on_start(state(0))
        clock.now += 30
        bars.on_round(state(50))
        assert [task.fields["left"] for task in bars._progress.tasks] == ["", "about 30 s left"]
        bars.on_part(Part("gridworld", "pfedme", 12, 23, 11, "methods"))
        tasks = bars._progress.tasks
        assert [(task.description, task.completed, task.total) for task in tasks] == [("gridworld: pfedme", 11, 23)]
        assert tasks[0].fields["left"] == "about 6 min left"
    assert "gridworld: pfedme" in file.getvalue()


def test_a_piped_command_prints_plain_lines(run, tmp_path):
    """To standard error, without control characters; standard output has the table alone."""
    code, out, err = run("train", write(tmp_path / "tiny.toml", changed()))
    assert code == 0
    assert "\x1b" not in out + err
    assert "━" not in err
    assert err.splitlines()[0] == "tiny: round 0 of 3"
    assert "round 3 of 3, took" in err


def test_steps_of_a_measurement_are_plain_lines_without_a_terminal(capsys):
    with console.status_line("measuring") as step:
        step("bias")
    assert capsys.readouterr().err.splitlines() == ["measuring: bias ..."]


def test_a_fleet_prints_plain_lines_without_a_terminal(capsys):
    clock = Clock()
    lines = federation.FleetLines(clock)

    def view(doing, news=(), **progress):
        return SimpleNamespace(doing=doing, progress=progress, connected={"a"}, expected=("a", "b"), news=news)

    lines(view("waiting for agents"))
    lines(view("waiting for agents"))
    lines(view("training", round=1, rounds=9, agents={"a": "in", "b": "in"}))
    lines(view("training", round=2, rounds=9))
    clock.now += 20
    lines(
        view(
            "training",
            news=[{"event": "silent", "agent": "b", "round": 5}],
            round=5,
            rounds=9,
            objective=1.5,
            median=1.25,
        )
    )
    assert capsys.readouterr().err.splitlines() == [
        "waiting for agents, 1 of 2 agents connected",
        "training, round 1 of 9, 2 answered",
        "round 5: b did not answer in time",
        "training, round 5 of 9, return after adaptation 1.500 (median 1.250)",
    ]


@pytest.mark.parametrize("asked", [False, True])
def test_python_functions_show_progress_when_asked(asked, tmp_path, capsys):
    """On standard error, beside the observers of the caller."""
    config, seen = pf.make_config(changed(rounds=2)), []

    class Counter(pf.Observer):
        def on_round(self, state):
            seen.append(state.round)

    pf.train(config, tmp_path / "runs", observers=[Counter()], progress=asked)
    trained = capsys.readouterr()
    fleet, policy = pf.gridworld(width=2, horizon=3), pf.TableSoftmax(states=4, actions=4)
    algorithm = pf.FedAvgPG(alpha=1.0, beta=0.1, local_steps=1, m=2)
    pf.simulate(fleet, policy, algorithm, rounds=2, seeds=2, observers=[Counter()], progress=asked)
    simulated = capsys.readouterr()
    assert trained.out == simulated.out == ""
    assert ("tiny: round 2 of 2" in trained.err) == ("FedAvgPG: round 2 of 2" in simulated.err) == asked
    assert seen == [0, 1, 2] * 2
