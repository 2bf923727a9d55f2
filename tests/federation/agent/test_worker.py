"""An agent of a networked fleet: the simulator's bits, restarts, trust and limits."""

import re
import sys
import tomllib

import jax
import numpy as np
import pytest
import tomli_w
from fixtures import write
from tiers import some_slow

import perfedrl as pf
from perfedrl import compilation
from perfedrl.errors import UserError
from perfedrl.experiments.config import make_config
from perfedrl.experiments.files import named_leaves
from perfedrl.federation.agent.config import load_agent_config, make_agent_config, read_plan
from perfedrl.federation.agent.request_handler import Agent, told_of_returns
from perfedrl.federation.agent.worker import AgentOutcomes, LocalTraining, Worker, unnamed
from perfedrl.federation.frames import Frame

GRID = {"env": "gridworld", "width": 3, "goals": [[0, 0], [2, 2], [0, 2]]}
ARC = {"env": "arc", "goals": 3, "held_out": 0, "horizon": 8}
STEPS = {"local_steps": 2, "m_in": 4, "m_out": 6}
ALGORITHMS = {
    "exact": {"name": "per-fedavg-pg", "alpha": 0.5, "beta": 0.3, "m_h": 6, **STEPS},
    "first-order": {"name": "per-fedavg-pg", "alpha": 0.5, "beta": 0.3, "variant": "first-order", **STEPS},
    "fedavg-pg": {"name": "fedavg-pg", "alpha": 0.5, "beta": 0.3, "local_steps": 2},
    "shrink": {"name": "per-fedavg-pg", "alpha": 0.5, "beta": 0.3, "m_h": 6, "control": "shrink", **STEPS},
    "clustered": {"name": "clustered", "alpha": 0.5, "beta": 0.3, "local_steps": 2, "m": 6, "m_choose": 4},
    "kept batches": {
        **{"name": "promp", "alpha": 1.0, "beta": 0.3, "m_in": 3, "m_out": 3},
        **{"epochs": 1, "optimizer": "sgd", "rounds_per_batch": 2},
    },
}
MEASURE = {"name": "monte-carlo", "trajectories": 6, "episodes": 10}


def plan(fleet=GRID, algorithm="first-order", **more) -> dict:
    policy = {"name": "table"} if fleet is GRID else {"name": "mlp", "hidden": [5]}
    evaluation = {} if fleet is GRID else {"evaluation": MEASURE}
    base = {"name": "x", "seeds": [7], "rounds": 5, "fleet": fleet, "policy": policy, **evaluation}
    return {**base, "algorithm": ALGORITHMS[algorithm], **more}


def toml(table) -> str:
    return tomli_w.dumps(table)


@pytest.fixture(autouse=True, scope="module")
def cache():
    """The agents of a test share what is compiled."""
    compilation.enable_cache()


@pytest.fixture(autouse=True)
def robots_are_found(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def worker(number=0, fleet=GRID, **more) -> Worker:
    return Worker(make_agent_config({"fleet": fleet, **more}), number)


def server_step(algorithm, server, uploads):
    """The server's step as the simulator compiles it."""

    def one_seed(tree):
        return jax.tree.map(lambda x: np.asarray(x)[None], tree)

    def step(algorithm, server, uploads):
        return algorithm.server(server, jax.lax.optimization_barrier(uploads), jax.numpy.ones(3))

    stacked = jax.tree.map(lambda *xs: np.stack(xs), *uploads)
    algorithms = jax.tree.map(lambda x: np.asarray([x], float), algorithm)
    after = compilation.jit(jax.vmap(step))(algorithms, one_seed(server), one_seed(stacked))
    return jax.tree.map(lambda x: np.asarray(x)[0], after)


def same(one, two):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert np.asarray(x).dtype == np.asarray(y).dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


CASES = [("grid", name) for name in ("exact", "first-order", "fedavg-pg", "shrink", "kept batches", "clustered")] + [
    ("arc", name) for name in ("exact", "first-order", "fedavg-pg", "clustered")
]


@pytest.mark.parametrize(("world", "algorithm"), some_slow(CASES, [("grid", "shrink")]))
def test_agents_and_a_server_give_the_bits_of_the_simulator(world, algorithm):
    table = plan({"grid": GRID, "arc": ARC}[world], algorithm)
    config = make_config(table)
    simulation = pf.Simulation(config.experiment, [7])
    state = simulation.start()
    trainings = [LocalTraining(config, make_agent_config({"fleet": table["fleet"]}), i) for i in range(3)]
    states, server = [training.state for training in trainings], jax.tree.map(lambda x: x[0], state.server)
    same(server.message, trainings[0].message)
    for k in range(5):
        answers = [training.update(server.message, s, k) for training, s in zip(trainings, states, strict=True)]
        uploads, states = [upload for upload, _ in answers], [s for _, s in answers]
        server = server_step(config.experiment.algorithm, server, uploads)
        state = simulation.advance(state, k, 1)
        same(server, jax.tree.map(lambda x: x[0], state.server))
        same(jax.tree.map(lambda *xs: np.stack(xs), *states), jax.tree.map(lambda x: x[0], state.clients))
    if algorithm != "first-order":
        return  # measuring is the same for all of them
    history = simulation.measure(state, 5)
    measured = trainings[1].evaluate(server.message, states[1], 5)
    assert measured.before["return"] == history.before[0, 0, 1]
    assert measured.after["return"] == history.after[0, 0, 1]
    assert set(measured.after) == {"return"} | ({"success", "distance"} if world == "arc" else set())


def test_agents_that_keep_batches_play_in_some_rounds_and_episodes_of_one_length(monkeypatch):
    table = plan(algorithm="kept batches")
    training = LocalTraining(make_config(table), make_agent_config({"fleet": table["fleet"]}), 0)
    assert [training.trajectories_in(k) for k in range(5)] == [6, 0, 6, 0, 6]
    longer = jax.tree.map(lambda x: np.concatenate([x, x], axis=-1) if x.ndim else x, training.state)
    monkeypatch.setattr(training, "_timed", lambda *_: (training.message, longer))
    with pytest.raises(pf.UserError, match="another length than the horizon"):
        training.update(training.message, training.state, 0)


def test_code_that_is_not_the_servers_is_rejected(tmp_path, monkeypatch):
    source = tmp_path / "own_for_agents.py"
    source.write_text("from perfedrl import FedAvgPG\n\nclass Own(FedAvgPG):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    name = "own_for_agents:Own"
    text = make_config({**plan(), "algorithm": {"name": name, "alpha": 1.0, "beta": 0.2}}).to_toml()
    agent = make_agent_config({"fleet": GRID, "trust": [name]})
    assert read_plan(text, agent).algorithm["name"] == name
    other = text.replace(make_config(tomllib.loads(text)).code[name], "0" * 64)
    with pytest.raises(UserError, match="own_for_agents:Own is other code here than on the server"):
        read_plan(other, agent)


def test_an_agent_trains_on_its_own_task():
    own = worker(5, {"env": "robots:single_task"}).training(toml(plan()))
    other = worker(5, GRID, agent=1).training(toml(plan()))
    (one, _), (two, _) = (w.update(w.message, w.state, 0) for w in (own, other))
    assert np.abs(one - two).max() > 0  # the second goal of the one is not that of the other
    assert one.shape == (9, 4)
    with pytest.raises(UserError, match="does not fit"):
        worker(0, {"env": "gridworld", "width": 3}).training(toml(plan(ARC)))


def test_personalization_is_reproducible_and_differs_by_draw():
    training = worker().training(toml(plan(algorithm="exact")))
    theta = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    one, measured = training.personalize(theta, training.state, 20)
    again, _ = training.personalize(theta, training.state, 20)
    other, _ = training.personalize(theta, training.state, 20, draw=1)
    nothing, _ = training.personalize(theta, training.state, 0)
    same(one, again)
    same(nothing, theta)
    assert np.abs(one - other).max() > 0
    assert measured.before["return"] == pytest.approx(
        float(pf.exact.expected_return(pf.gridworld(3, [(0, 0)]).task(0), theta)), abs=1e-12
    )
    for m, draw in ((-1, 0), (200_000, 0), (5, 2**30)):
        with pytest.raises(UserError, match="whole number"):
            training.personalize(theta, training.state, m, draw)


def test_a_diverged_round_is_an_error_and_keeps_the_state(tmp_path, monkeypatch):
    agent = Agent(make_agent_config({"fleet": GRID}), 0, tmp_path / "own")
    training = agent.worker.training(toml(plan(algorithm="shrink")))
    agent.answer(question(training))
    kept = agent.store.stored("r").after
    for spoil in (
        lambda upload, state: (upload * np.inf, state),
        lambda upload, state: (upload, jax.tree.map(lambda x: x * np.nan, state)),
    ):
        with monkeypatch.context() as patch:
            honest = type(training)._timed
            patch.setattr(type(training), "_timed", lambda *args, f=honest, spoil=spoil: spoil(*f(*args)))
            reply = agent.answer(question(training, round_=1))
        assert reply.fields["message"] == "the agent's result of round 1 is not finite: lower alpha or beta"
        same(agent.store.stored("r").after, kept)
    assert agent.answer(question(training, round_=1)).kind == "upload"


def test_private_uploads_are_noised_with_secret_numbers():
    quiet = worker().training(toml(plan(privacy={"clip": 0.01, "noise": 0.0})))
    noisy = worker().training(toml(plan(privacy={"clip": 0.01, "noise": 1.0})))
    plain = worker().training(toml(plan()))
    clipped, _ = quiet.update(quiet.message, quiet.state, 0)
    honest, _ = plain.update(plain.message, plain.state, 0)
    assert np.linalg.norm(clipped - quiet.message) == pytest.approx(0.01, rel=1e-4)
    np.testing.assert_allclose(
        (clipped - quiet.message) / 0.01, (honest - plain.message) / np.linalg.norm(honest - plain.message), atol=1e-4
    )
    drawn = [noisy.update(noisy.message, noisy.state, 0)[0] - clipped for _ in range(20)]
    assert np.std(drawn) == pytest.approx(0.01, rel=0.2)
    assert len({x.tobytes() for x in drawn}) == 20


# --- plans that an agent rejects ---------------------------------------------------------------------------------

REFUSED = {
    "no toml": ("name = ", "not valid TOML"),
    "a file to start from": (plan(start={"path": "/etc/passwd", "sha256": "0"}), "cannot choose what is read"),
    "attack": (plan(attack={"name": "sign-flip", "agents": 1}), "attack"),
    "two seeds": (plan(seeds=[1, 2]), "exactly one seed"),
    "no federation": (
        plan(algorithm="exact", **{"fleet": GRID}) | {"algorithm": {"name": "local-pg", "beta": 0.1}},
        "needs no federation",
    ),
    "too much": (plan() | {"algorithm": {**ALGORITHMS["first-order"], "m_out": 900_000}}, "limit is 100000"),
    "a file here": (
        plan() | {"fleet": {"env": "arrays", "file": "/etc/passwd", "horizon": 3, "discount": 0.5}},
        "file",
    ),
    "a mistake": (plan(round=3), "the plan: unknown key 'round'"),
}


@pytest.mark.parametrize(("table", "why"), REFUSED.values(), ids=REFUSED)
def test_an_agent_rejects_a_plan_in_one_sentence(table, why):
    with pytest.raises(UserError, match=why) as error:
        worker().training(table if isinstance(table, str) else toml(table))
    assert "\n" not in str(error.value)


EVIL = {
    "fleet": {"env": "evil_module:f"},
    "policy": {"name": "evil_module:f"},
    "algorithm": {"name": "evil_module:f"},
    "evaluation": {"name": "evil_module:f"},
    "curvature": "evil_module:f",
    "baseline": {"name": "evil_module:f"},
    "aggregation": {"name": "evil_module:f"},
    "unheard_of": [{"deep": ["evil_module:f"]}],
}


@pytest.mark.parametrize("part", EVIL)
def test_untrusted_names_are_not_imported(part, tmp_path, monkeypatch):
    (tmp_path / "evil_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"'evil_module:f' .* does not trust"):
        read_plan(toml({**plan(), part: EVIL[part]}), make_agent_config({"fleet": GRID}))
    assert "evil_module" not in sys.modules
    moment = toml(plan()).replace('name = "table"', "name = 12:30:00")
    with pytest.raises(UserError, match="does not trust"):
        read_plan(moment, make_agent_config({"fleet": GRID}))


def test_trusted_names_are_imported():
    table = plan() | {"fleet": {"env": "perfedrl.envs:gridworld", "width": 3}}
    with pytest.raises(UserError, match="trust"):
        worker().training(toml(table))
    assert worker(trust=["perfedrl.envs:gridworld"]).training(toml(table)).trajectories == 20


AGENT_CONFIGS = {
    "no fleet": ({}, "lacks 'fleet'"),
    "no env": ({"fleet": {"width": 3}}, "needs env"),
    "unknown env": ({"fleet": {"env": "grid-world"}}, "did you mean"),
    "unknown key": ({"fleet": GRID, "trusted": []}, "did you mean 'trust'"),
    "no path": ({"fleet": GRID, "trust": ["numpy"]}, "not an import path"),
    "a limit": ({"fleet": GRID, "limits": {"seconds": -1}}, r"limits.seconds: .*greater than 0"),
    "no limit": ({"fleet": GRID, "limits": {"second": 1}}, "limits.second"),
    "no world": ({"fleet": {"env": "robots:nothing"}}, "must return a Fleet"),
    "agent of a task": ({"fleet": {"env": "robots:single_task"}, "agent": 1}, "single task"),
    "agent of a robot": ({"fleet": {"env": "robots:robot"}, "agent": 1}, "returns a sampler"),
    "no import": ({"fleet": {"env": "nowhere.at_all:f"}}, "cannot be imported"),
}


@pytest.mark.parametrize(("table", "why"), AGENT_CONFIGS.values(), ids=AGENT_CONFIGS)
def test_an_agents_config_is_checked(table, why, tmp_path):
    with pytest.raises(UserError, match=why) as error:
        load_agent_config(write(tmp_path / "agent.toml", table))
    assert "\n" not in str(error.value)


def test_the_command_line_replaces_the_file():
    assert load_agent_config(None, "arc").env == "arc"
    with pytest.raises(UserError, match="--env NAME"):
        load_agent_config(None)


def test_the_command_line_replaces_the_environment(tmp_path):
    path = write(tmp_path / "agent.toml", {"fleet": GRID, "limits": {"seconds": 5}})
    assert load_agent_config(path).fleet["width"] == 3
    assert load_agent_config(path, "windy-cliff").env == "windy-cliff"
    for number in (3, -1):
        with pytest.raises(UserError, match="number"):
            Worker(load_agent_config(path), number)


# --- Python samplers ----------------------------------------------------------------------------------------------


def test_an_agent_may_sample_in_python():
    training = worker(fleet={"env": "robots:robot"}).training(toml(plan(algorithm="exact")))
    upload, state = training.update(training.message, training.state, 0)
    again, _ = training.update(training.message, training.state, 0)
    same(upload, again)
    assert state == ()
    assert np.abs(upload - training.message).max() > 0
    theta = np.zeros((9, 4), np.float32)
    with pytest.raises(UserError, match="episodes"):
        worker(fleet={"env": "robots:robot"}, limits={"episodes": 5}).training(toml(plan())).evaluate(theta, (), 0)
    small = worker(fleet={"env": "robots:robot"}).training(toml(plan(evaluation={**MEASURE, "episodes": 200})))
    measured = small.evaluate(theta, (), 3)
    true = float(pf.exact.expected_return(pf.gridworld(3).task(1), theta))
    assert measured.before["return"] == pytest.approx(true, abs=0.2)
    own, _ = small.personalize(theta, (), 8)
    assert np.abs(own - theta).max() > 0


@pytest.mark.parametrize(
    ("params", "limits", "why"),
    [
        ({"spoilt": "nan"}, {}, "not finite"),
        ({"spoilt": "short"}, {}, "got arrays"),
        ({"pause": 0.02}, {"seconds": 0.01}, "time limit for one request is over"),
    ],
)
def test_an_invalid_sampler_fails_the_round_with_one_sentence(params, limits, why):
    training = worker(fleet={"env": "robots:robot", **params}, limits=limits).training(toml(plan()))
    with pytest.raises(UserError, match=why):
        training.update(training.message, training.state, 0)


def test_an_environment_that_takes_a_policy_must_return_a_sampler():
    with pytest.raises(UserError, match="must return a sampler"):
        worker(fleet={"env": "robots:sampler_that_is_none"}).training(toml(plan()))


# --- questions ----------------------------------------------------------------------------------------------------


def question(training, kind="update", round_=0, run="r", generation=1, table=None, **fields) -> Frame:
    fields = {"run": run, "generation": str(generation), "round": str(round_), **fields}
    return Frame(kind, {"plan": toml(table or plan(algorithm="shrink")), **fields}, named_leaves(training.message))


@pytest.fixture
def agent(tmp_path):
    return Agent(make_agent_config({"fleet": GRID}), 0, tmp_path / "own")


@pytest.mark.slow
def test_a_restarted_agent_continues_from_its_last_answer(agent, tmp_path):
    training = agent.worker.training(toml(plan(algorithm="shrink")))
    assert agent.answer(question(training, "prepare")).kind == "prepared"
    state, expected = training.state, []
    for k in range(3):
        upload, state = training.update(training.message, state, k)
        expected.append(upload)
    first = agent.answer(question(training))
    assert (first.kind, first.fields["trajectories"]) == ("upload", "32")
    again = agent.answer(question(training))
    assert again.fields["trajectories"] == "0"
    other = Agent(agent.worker.config, 0, tmp_path / "own")
    second, third = (other.answer(question(training, round_=k, generation=2)) for k in (1, 2))
    for frame, upload in zip((first, again, second, third), (expected[0], *expected), strict=False):
        same(unnamed(training.message, dict(frame.tensors), "it"), upload)
    outcomes = other.answer(question(training, "evaluate", round_=3, generation=2))
    measured = training.evaluate(training.message, state, 3)
    assert outcomes.kind == "outcomes"
    assert {name: float(x) for name, x in outcomes.tensors.items()} == {
        "before.return": measured.before["return"],
        "after.return": measured.after["return"],
    }
    own = other.answer(question(training, "personalize", generation=2, m="9", parameters="yes"))
    params, _ = training.personalize(training.message, state, 9)
    same(own.tensors["parameters.theta"], params)
    assert (tmp_path / "own" / "personal-r.safetensors").stat().st_mode & 0o777 == 0o600
    own = other.answer(question(training, "personalize", generation=3, m="9"))
    assert set(own.tensors) == {"before.return", "after.return"}
    assert "stale" in other.answer(question(training, "personalize", m="9")).fields["message"]


def test_an_agent_answers_invalid_requests_with_an_error(agent, capfd, monkeypatch):
    training = agent.worker.training(toml(plan(algorithm="shrink")))
    good = question(training)
    theta = good.tensors["theta"]
    wrong = {
        "unheard of": (Frame("hack"), "got 'hack'"),
        "no plan": (Frame("update", {"run": "r", "generation": "1", "round": "0"}), "needs the field 'plan'"),
        "no number": (question(training, generation="-1"), "must be a whole number"),
        "a run": (question(training, run="../x"), "run's id"),
        "no tensor": (Frame("update", good.fields, {}), "lacks tensor 'theta'"),
        "another": (Frame("update", good.fields, {"theta": theta, "x": theta}), "unknown tensor 'x'"),
        "type": (
            Frame("update", good.fields, {"theta": theta.astype(float)}),
            r"expected float32\[9, 4\], got float64\[9, 4\]",
        ),
        "shape": (Frame("update", good.fields, {"theta": theta[:2]}), r"got float32\[2, 4\]"),
        "nan": (Frame("update", good.fields, {"theta": theta * np.nan}), "not finite"),
        "trust": (question(training, table=plan(curvature="evil:f")), "trust"),
        "counted": (Frame("update", {**good.fields, "counted": "1e3 1e3 1e3"}, good.tensors), "must be rounds, or -1"),
    }
    for frame, why in wrong.values():
        with monkeypatch.context() as patch:
            patch.setattr(type(training), "_timed", lambda *_: pytest.fail("something was computed"))
            reply = agent.answer(frame)
        assert reply.kind == "error"
        assert re.search(why, reply.fields["message"]), reply.fields["message"]
    assert not list(agent.store.folder.iterdir())
    monkeypatch.setattr(type(training), "_timed", lambda *_: 1 / 0)
    reply = agent.answer(good)
    assert reply.fields["message"] == "the agent failed to process 'update': ZeroDivisionError, see its log"
    assert "Traceback" in capfd.readouterr().err


def test_private_uploads_are_counted_and_repeats_are_not(tmp_path):
    agent = Agent(make_agent_config({"fleet": GRID, "tell_outcomes": False}), 0, tmp_path / "own")
    table = plan(privacy={"clip": 0.1, "noise": 4.0})

    def ask(k, kind="update"):
        return agent.answer(question(training, kind, k, table=table))

    training = agent.worker.training(toml(table))
    first, again, second = ask(0), ask(0), ask(1)
    same(first.tensors["theta"], again.tensors["theta"])
    assert [frame.fields["privacy_releases"] for frame in (first, again, second)] == ["1", "1", "2"]
    assert float(second.fields["epsilon"]) > float(first.fields["epsilon"]) > 0
    assert "does not report outcomes" in ask(2, "evaluate").fields["message"]


@pytest.mark.parametrize(("keep", "after", "kept"), [("better", 1.5, 1), ("better", 2.5, 2), ("adapted", 1.5, 2)])
def test_an_agent_may_keep_the_shared_policy_if_its_step_made_it_worse(tmp_path, monkeypatch, keep, after, kept):
    told = []
    agent = Agent(make_agent_config({"fleet": GRID, "keep": keep}), 0, tmp_path / "own", told.append)
    training = agent.worker.training(toml(plan()))
    outcomes = AgentOutcomes({"return": 2.0}, {"return": after})
    monkeypatch.setattr(type(training), "personalize", lambda *_: (np.full((9, 4), 2.0), outcomes))
    message = {"theta": np.ones((9, 4), np.float32)}
    asked = question(training, "personalize", m="9")
    assert agent.answer(Frame(asked.kind, asked.fields, message)).kind == "personalized"
    own = pf.load_policy(tmp_path / "own" / "personal-r.safetensors")
    assert (own.params["theta"] == kept).all()
    assert (own.about["kept"], len(own.about["adaptations"])) == (("start", 0) if kept == 1 else ("adapted", 1))
    assert ("the shared policy is kept in" in told[-1]) == (kept == 1)


@pytest.mark.parametrize(("after", "said"), [(2.5, "2.5 after"), (1.5, "only 1.5 after")])
def test_a_loss_by_adaptation_is_told(after, said):
    outcomes = AgentOutcomes({"return": 2.0}, {"return": after})
    assert told_of_returns(outcomes) == f"return 2 before adaptation, {said}"
