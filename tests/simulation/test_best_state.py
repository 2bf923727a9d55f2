"""The best evaluation: of held-out agents where there are any, for each seed, and the state at it."""

import shutil

import jax
import numpy as np
import pytest
from interruption import StopAt
from tiny_config import changed

import perfedrl as pf
from perfedrl.experiments.config import make_config
from perfedrl.experiments.store import BEST, load_run
from perfedrl.experiments.training import Interrupted, train
from perfedrl.simulation.best_state import best_evaluation, better, score
from perfedrl.simulation.history import History
from perfedrl.simulation.observers import Observer
from perfedrl.simulation.run_state import FleetState

CONFIG = make_config(
    changed(
        rounds=6,
        keep="best",
        fleet={"held_out": [(0, 1)]},
        algorithm={"beta": 3.0},
        evaluation={"name": "exact", "trajectories": 2, "few_shot": [0]},
    )
)


def history(after, held_out=None):
    after = np.asarray(after, float)
    held_out = np.zeros((*after.shape[:2], 0)) if held_out is None else np.asarray(held_out, float)
    count = np.arange(after.shape[1])
    return History(np.arange(len(after)), count, count, count, after, after, held_out, held_out)


def test_the_score_is_the_return_of_held_out_agents_where_there_are_any():
    after = [[[1.0, 3.0], [5.0, np.nan]], [[np.nan, np.nan], [0.0, 0.0]]]
    np.testing.assert_array_equal(score(history(after)), [[2.0, -np.inf], [-np.inf, 0.0]])
    np.testing.assert_array_equal(score(history(after, [[[4.0], [3.0]], [[1.0], [1.0]]])), [[4.0, 3.0], [1.0, 1.0]])
    np.testing.assert_array_equal(best_evaluation(history(after, [[[4.0], [3.0]], [[1.0], [1.0]]])), [0, 0])


def test_an_evaluation_without_all_agents_is_not_the_best():
    """A mean over other agents cannot be compared: without agent 0 the return is larger for that reason alone."""
    after = [[[10.0, 100.0], [np.nan, 100.0], [9.0, 100.0]]]
    assert best_evaluation(history(after)).tolist() == [0]
    never = np.full((1, 3, 1), np.nan)
    assert best_evaluation(history(after, never)).tolist() == [0], "held-out agents that never work do not count"
    assert best_evaluation(history(np.full((1, 3, 2), np.nan))).tolist() == [2], "nothing was measured: the last"
    changing = [[[10.0, np.nan], [np.nan, 100.0]]]
    assert best_evaluation(history(changing)).tolist() == [1], "no evaluation has both agents"


def test_each_seed_keeps_its_own_best_state():
    old, new = (FleetState(np.full((2, 3), x), np.full((2, 1, 2), x)) for x in (1.0, 2.0))
    kept = better(old, new, history([[[0.0], [1.0]], [[1.0], [0.0]]]))
    np.testing.assert_array_equal(kept.server[:, 0], [2.0, 1.0])
    np.testing.assert_array_equal(kept.clients[:, 0, 0], [2.0, 1.0])


class Messages(Observer):
    """Notes the message at every evaluation."""

    def __init__(self):
        self.seen = []

    def on_evaluation(self, state):
        self.seen.append(state.fleet_state.server.message)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    messages = Messages()
    return train(CONFIG, tmp_path_factory.mktemp("runs"), observers=[messages]), messages.seen


def test_a_run_that_keeps_the_best_has_the_parameters_of_the_best_evaluation_and_the_last(kept):
    run, seen = kept
    best = best_evaluation(run.history)
    assert (best < CONFIG.rounds).any(), "with such long steps the last evaluation is not the best of both seeds"
    np.testing.assert_array_equal(run.message, np.stack([seen[k][i] for i, k in enumerate(best)]))
    np.testing.assert_array_equal(run.at_end.message, seen[-1])
    when = f"round {best[0]}" if best[0] == best[1] else f"rounds {min(best)} to {max(best)}, by seed"
    assert run.kept == f"parameters of the best evaluation by the return of held-out agents after adaptation: {when}"
    assert run.at_end.kept == "parameters of the last round, 6"
    again = load_run(run.folder)
    jax.tree.map(np.testing.assert_array_equal, (again.message, again.last_message), (run.message, run.last_message))
    assert again.kept == run.kept
    plain = train(make_config({**CONFIG.table, "keep": "last"}), run.folder.parent / "plain")
    np.testing.assert_array_equal(plain.message, run.at_end.message, "training is the same")
    assert plain.kept == ""


def test_commands_use_the_best_parameters_unless_told_otherwise(kept):
    """Returns before adaptation are exact, and so those of equal parameters are equal."""
    run, _ = kept
    best = [run.history.held_out_before[i, k, 0] for i, k in enumerate(best_evaluation(run.history))]
    last = run.history.held_out_before[:, -1, 0]
    assert np.mean(best) != pytest.approx(np.mean(last))
    for used, expected in ((run, best), (run.at_end, last)):
        held_out = pf.evaluate(used)[-1]
        assert held_out.before.mean == pytest.approx(np.mean(expected))
    np.testing.assert_allclose(run.deployed.at("return", 0), best, err_msg="few_shot is of the best parameters")


def test_the_best_parameters_survive_an_interrupt(kept, tmp_path):
    run, _ = kept
    with pytest.raises(Interrupted):
        train(CONFIG, tmp_path, observers=[StopAt(int(best_evaluation(run.history).max()) + 1)])
    resumed = train(CONFIG, tmp_path)
    np.testing.assert_array_equal(resumed.message, run.message)
    np.testing.assert_array_equal(resumed.at_end.message, run.at_end.message)


def test_a_run_without_its_best_parameters_is_incomplete(kept, tmp_path):
    folder = shutil.copytree(kept[0].folder, tmp_path / kept[0].folder.name)
    (folder / BEST).unlink()
    with pytest.raises(pf.UserError, match=f"not a complete run: {BEST} missing"):
        load_run(folder)
