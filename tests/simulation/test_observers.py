"""Observers: they are told of the start, the rounds and the evaluations of each run."""

from tiny_config import BASE, changed

import perfedrl as pf
from perfedrl.experiments.config import make_config
from perfedrl.simulation.observers import Observer

FLEET, POLICY = pf.gridworld(width=2, horizon=3), pf.TableSoftmax(4, 4)


class Log(Observer):
    """Records every event."""

    def __init__(self):
        self.starts, self.rounds, self.evaluations = [], [], []

    def on_start(self, state):
        self.starts.append((state.name, state.round, state.history))

    def on_round(self, state):
        self.rounds.append((state.name, state.round))

    def on_evaluation(self, state):
        self.evaluations.append((state.name, state.round, state.history.rounds.tolist(), state.history.seeds.tolist()))


def test_observers_of_a_simulation_are_told_of_every_evaluation():
    log = Log()
    result = pf.simulate(FLEET, POLICY, pf.FedAvgPG(1.0, 0.1, 1, 2), rounds=3, every=2, seeds=2, observers=[log])
    name = "FedAvgPG"
    assert log.starts == [(name, 0, None)]
    assert log.evaluations == [
        (name, 0, [0], [0, 1]),
        (name, 2, [0, 2], [0, 1]),
        (name, 3, [0, 2, 3], [0, 1]),
    ]
    assert result.history.rounds.tolist() == [0, 2, 3]


def test_observers_get_the_events_of_each_run_of_a_group(tmp_path):
    one, other = make_config(BASE), make_config(changed(name="other", seeds=1, algorithm={"beta": 0.2}))
    assert one.trains_with == other.trains_with
    log = Log()
    pf.train([one, other], tmp_path, observers=[log])
    assert [start[:2] for start in log.starts] == [("tiny", 0), ("other", 0)]
    assert [(name, round_, seeds) for name, round_, _, seeds in log.evaluations] == [
        (name, round_, seeds) for round_ in range(4) for name, seeds in (("tiny", [0, 1]), ("other", [0]))
    ]


def test_the_last_evaluation_that_an_observer_gets_equals_the_saved_run(tmp_path):
    class Last(Observer):
        def on_evaluation(self, state):
            self.state = state

    last = Last()
    run = pf.train(make_config(BASE), tmp_path, observers=[last])
    assert last.state.round == last.state.rounds == 3
    assert last.state.group == "tiny"
    assert (last.state.history.after == run.history.after).all()
    assert (last.state.fleet_state.server.message == run.message).all()
