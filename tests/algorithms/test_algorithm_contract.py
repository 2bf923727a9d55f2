"""What every registered algorithm keeps, and the usual variants and wrappings of some."""

from functools import cache
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simulations import simulation_of
from tiers import some_slow

import perfedrl as pf
from perfedrl.algorithms import ALGORITHMS, Algorithm, Attacked, ControlVariate, FedOpt, Private, Robust, ServerState
from perfedrl.algorithms.aggregation import GeometricMedian
from perfedrl.algorithms.attacks import Random
from perfedrl.compilation import jit
from perfedrl.estimators import Sampled
from perfedrl.exact.tabular import Exact
from perfedrl.experiments.files import named_leaves
from perfedrl.federation.frames import Frame, decode, encode
from perfedrl.key_domains import START
from perfedrl.simulation.compiled import fleet_round
from perfedrl.simulation.keys import agent_key, agent_keys
from perfedrl.simulation.run_state import FleetState

FLEET, TABLE = pf.gridworld(width=3, horizon=5), pf.TableSoftmax(9, 4)
SETTINGS: dict[str, Any] = {"alpha": 1.0, "beta": 0.3, "m_in": 3, "m_h": 3, "m_out": 3, "m": 3, "m_anchor": 3}
SETTINGS |= {"m_choose": 3, "local_steps": 2, "head_steps": 1, "steps": 2, "fine_tuning_steps": 2, "mean_delay": 0.5}
SEED, ROUNDS = 11, 3


class Bowl(eqx.Module):
    """J(theta) = -|theta - 1|^2 / 2, of parameters of any shape and precision."""

    traceable = True

    def gradient(self, params, key, m):
        return jax.tree.map(lambda x: 1 - x, params)

    def curvature(self, params, v, key, m):
        return jax.tree.map(jnp.negative, v)

    def value(self, params, key, m):
        return jnp.zeros(())


class Case(NamedTuple):
    """An algorithm and where it is tried; `exact` makes its agents without noise, if there are any such."""

    algorithm: Any
    fleet: Any = FLEET
    policy: Any = TABLE
    curvature: str = pf.estimators.CURVATURE
    baseline: str = "leave-one-out"  # compiles faster than the default
    exact: Any = Exact(TABLE)

    @property
    def agent(self):
        return Sampled(self.policy, self.curvature, self.baseline)

    def first_states(self, params, algorithm=None):
        """The server's and a client's first state, of this algorithm or of another one."""
        fitted = (algorithm or self.algorithm).fitted_to(self.agent.outline(self.fleet.task(0)))
        return fitted.init(params)


def make(name, **change):
    """A registered algorithm with small batches; it takes of the settings what it has."""
    accepted = ALGORITHMS.parameters(name)
    return ALGORITHMS[name](**{k: v for k, v in {**SETTINGS, **change}.items() if k in accepted})


FIRST_ORDER = make("per-fedavg-pg", variant="first-order")
NO_EXACT = {"exact": None}  # those that look into trajectories
CASES = {name: Case(make(name)) for name in ALGORITHMS}
CASES["sg-mrl"] = CASES["sg-mrl"]._replace(baseline="ridge", **NO_EXACT)
CASES |= {name: CASES[name]._replace(**NO_EXACT) for name in ("per-fedavg-storm", "per-fedavg-trpo", "promp", "fedppo")}
CASES["shared-representation"] = Case(
    make("shared-representation"), pf.arc(horizon=5), pf.MLPSoftmax((2, 3, 8)), exact=lambda task: Bowl()
)
CASES["context"] = Case(
    # Where a gradient is 0 but for rounding, as the divergence's at first, Adam's usual eps makes a whole step of it.
    make("context", epochs=2, optimizer_settings={"eps": 1e-3}),
    pf.arc(horizon=5),
    pf.policies.context_mlp(pf.arc(horizon=5), (3,), 2, (3,)),
    **NO_EXACT,
)
CASES |= {
    "first-order": Case(FIRST_ORDER),
    "trust region, learned steps": Case(
        make("per-fedavg-trpo", variant="differentiated", learn_alpha="per-parameter", iterations=5), **NO_EXACT
    ),
    "promp, personal optimizer": Case(make("promp", variant="differentiated", optimizer_state="personal"), **NO_EXACT),
    "promp, kept batches": Case(
        make("promp", local_steps=1, optimizer="sgd", epochs=1, rounds_per_batch=2), **NO_EXACT
    ),
    "clustered meta-steps": Case(make("clustered", clusters=3, variant="exact")),
    "two steps, central differences": Case(make("per-fedavg-pg", adaptation_steps=2), curvature="central-fresh"),
    "controlled, learned step": Case(make("per-fedavg-pg", m_h=4, control="shrink", learn_alpha="scalar")),
    "annealed adam, learned step": Case(make("per-fedavg-pg", optimizer="adam", anneal=2, learn_alpha="scalar")),
    "personal adam": Case(make("per-fedavg-pg", m_h=4, control="shrink", optimizer="adam", optimizer_state="personal")),
    "zeroth-order": Case(make("mixing", gradient="zeroth-order", weight_rate=0.1), **NO_EXACT),
    "control variate of steps": Case(ControlVariate(FIRST_ORDER, "step", FLEET.agents)),
    "control variate of rounds, optimizer": Case(
        ControlVariate(FedOpt(make("pfedme"), "adam", rate=0.1), "round", FLEET.agents)
    ),
    "attacked": Case(Attacked(Robust(Private(FIRST_ORDER, 0.5, 0.1), GeometricMedian()), Random(), 1)),
}

UNORDERED = {
    "attacked": "attackers are the fleet's last agents: the place says who lies",
}
ROUNDED_BESIDE = {
    "context": "last bits were seen to depend on the number of seeds, for a reason not found (docs/architecture.md)",
}
SENT_ANYWAY = {
    "fast-fedpg": "the gradient that it keeps is the one it sent",
}
ALONE = [
    ("fedavg-pg", {}),
    ("fine-tuned", {}),
    ("clustered", {}),
    ("clustered", {"alpha": 0.0, "variant": "exact"}),
    ("local-pg", {}),
    ("reptile", {"server_step": 1.0}),
    ("softmax-fedpg", {}),
    ("per-fedavg-pg", {"alpha": 0.0}),
    ("per-fedavg-pg", {"alpha": 0.0, "variant": "first-order"}),
    ("per-fedavg-storm", {"alpha": 0.0, "momentum": 1.0}),
    ("mixing", {"weight": 0.0}),
    ("mixing", {"weight": 1.0}),
    ("pfedme", {"alpha": 0.3, "weight": 0.0}),
    ("pfedme", {"alpha": 0.3, "weight": float("inf")}),
    ("pmeta-rl", {"alpha": 0.3, "weight": 0.0}),
    ("afedpg", {"delays": "none", "decay": 0.0, "normalize": False}),
    ("fedppo", {"optimizer": "sgd", "epochs": 1}),
    ("promp", {"alpha": 0.0, "optimizer": "sgd", "epochs": 1}),
]
ALONE_FAST = [("reptile", {"server_step": 1.0}), ("per-fedavg-pg", {"alpha": 0.0}), ("mixing", {"weight": 0.0})]
NEVER_LOCAL = {
    "context": "its policy has a context; without an adaptation it is fedppo, see its own tests",
    "fast-fedpg": "two rounds make one of steps: without noise, see below",
    "fednpg": "its steps are along action values",
    "fedsarsa": "its steps are along temporal differences",
    "from-scratch": "it does not train",
    "per-fedavg-trpo": "its steps are as long as a limit on the divergence allows",
    "sg-mrl": "its score term is noise also where alpha = 0",
    "shared-representation": "head and representation take turns",
}


LOOPED = ("per-fedavg-pg", "fast-fedpg", "clustered", "shared-representation", "afedpg", "mixing", "sg-mrl", "local-pg")
LOOPED += ("per-fedavg-storm", "control variate of rounds, optimizer")
"""Cases whose agent-by-agent loop `make test` compiles."""


def on_cases(*fast):
    """Try a property on every case, of which `make test` takes these."""
    return pytest.mark.parametrize("name", some_slow(CASES, fast))


@pytest.fixture
def case(name):
    return CASES[name]


client = jit(lambda algorithm, agent, message, state, task, key: algorithm.client(message, state, agent(task), key))
server = jit(lambda algorithm, state, uploads, weights: algorithm.server(state, uploads, weights))


class Round(NamedTuple):
    """One round of the loop: what the server had, what each agent had, sent and has, and the agents' keys."""

    before: ServerState
    states: list
    uploads: Any
    after: list
    keys: list


def one_by_one(case, tasks, rounds=ROUNDS):
    """What a network of single agents computes: client by client, each with its own key, then the server."""
    algorithm, made = jax.tree.map(jnp.asarray, (case.algorithm, case.agent))
    state, start = case.first_states(case.policy.init(start_key()), algorithm)
    states, seen = [start] * len(tasks), []
    for k in range(rounds):
        keys = [jax.random.fold_in(agent_key(SEED, i), k) for i in range(len(tasks))]
        work = [client(algorithm, made, state.message, *each) for each in zip(states, tasks, keys, strict=True)]
        uploads, after = stacked([upload for upload, _ in work]), [s for _, s in work]
        seen.append(Round(state, states, uploads, after, keys))
        state, states = server(algorithm, state, uploads, jnp.ones(len(tasks))), after
    return seen, state, states


def start_key():
    return jax.random.fold_in(jax.random.key(0), START)


def stacked(trees):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


def tasks_of(case):
    return [case.fleet.task(i) for i in range(case.fleet.agents)]


@cache
def looped(name):
    return one_by_one(CASES[name], tasks_of(CASES[name]))


def simulation(case, seeds=(SEED,)):
    return simulation_of(case.fleet, case.policy, [case.algorithm] * len(seeds), list(seeds), case.agent)


def advanced(case, *cuts, seeds=(SEED,)):
    simulator = simulation(case, seeds)
    state, done = simulator.start(), 0
    for rounds in cuts:
        state, done = simulator.advance(state, done, rounds), done + rounds
    return state


@cache
def simulated(name):
    """The state after a run beside another seed's."""
    return advanced(CASES[name], ROUNDS, seeds=(5, SEED))


def kinds(tree):
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)


def close(one, two, atol=1e-6):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=atol), one, two)


def same(one, two):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    jax.tree.map(np.testing.assert_array_equal, one, two)


@on_cases(*CASES)
def test_every_registered_algorithm_keeps_the_interface(case):
    assert isinstance(case.algorithm, Algorithm)
    assert case.algorithm.trajectories_per_round >= 0


@on_cases(*LOOPED)
def test_messages_states_and_uploads_keep_their_shapes_and_types(name, case):
    """As a compiled loop needs it, in single precision."""
    params, (rounds, state, states) = case.policy.init(start_key()), looped(name)
    first = rounds[0]
    assert kinds((state, states[0])) == kinds((first.before, first.states[0])) == kinds(case.first_states(params))
    assert all(kinds(played.uploads) == kinds(first.uploads) for played in rounds)
    assert precisions((state, states, first.uploads)) <= {np.dtype(np.float32)}
    assert kinds(case.algorithm.shared(state.message)) == kinds(params)
    for m in (0, 5):
        deploy = lambda key, m=m: case.algorithm.personalize(state.message, states[0], agent(case), key, m)  # noqa: E731
        assert kinds(jax.eval_shape(deploy, jax.random.key(0))) == kinds(params)


@on_cases(*CASES)
def test_without_noise_everything_is_in_double_precision(case):
    """But for those that look into trajectories, which agents without noise have not."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: np.asarray(x, float), case.policy.init(start_key()))
        server, client = case.algorithm.init(params)
        keys = agent_keys(SEED, case.fleet.train)
        if case.exact is None:
            with pytest.raises(pf.UserError, match="show their trajectories"):
                case.algorithm.client(server.message, client, Exact(TABLE)(FLEET.task(0)), keys[0])
            return
        before = FleetState(server, stacked([client] * case.fleet.agents))
        round_ = lambda state: fleet_round(case.algorithm, case.exact, case.fleet.train, state, keys, 0)  # noqa: E731
        after = jax.eval_shape(round_, before)
        assert kinds(after) == kinds(before)
        assert precisions(after) == {np.dtype(float)}


def agent(case):
    return case.agent(case.fleet.task(0))


def precisions(tree):
    return {x.dtype for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)}


@on_cases("per-fedavg-pg", "fast-fedpg", "shared-representation")
def test_the_simulator_is_the_agent_by_agent_loop(name):
    fleet, (_, state, states) = simulated(name), looped(name)
    close(jax.tree.map(lambda x: x[1], fleet.server), state)
    close(jax.tree.map(lambda x: x[1], fleet.clients), stacked(states))


@on_cases("per-fedavg-pg", "fast-fedpg", "attacked")
def test_a_run_in_pieces_has_the_bits_of_one_in_one_piece(name, case):
    same(advanced(case, 1, ROUNDS - 1, seeds=(5, SEED)), simulated(name))


@on_cases("per-fedavg-pg")
def test_a_seed_has_the_same_bits_alone_and_beside_others(name, case, untyped):
    """Variants, to save programs, beside another one and in another place."""
    run = advanced(case, ROUNDS, seeds=(SEED,) if name in set(ALGORITHMS) else (SEED, 7))
    equal = close if name in ROUNDED_BESIDE else same
    equal(jax.tree.map(lambda x: x[0], run), jax.tree.map(lambda x: x[1], simulated(name)))


@on_cases(*LOOPED)
def test_the_server_does_not_care_about_the_order_of_agents(name, case):
    if name in UNORDERED:
        pytest.skip(UNORDERED[name])
    weights = np.arange(1, case.fleet.agents + 1, dtype=np.float32)
    order = np.random.default_rng(0).permutation(case.fleet.agents)
    algorithm = jax.tree.map(jnp.asarray, case.algorithm)
    for played in looped(name)[0]:
        forth = server(algorithm, played.before, played.uploads, weights)
        back = server(algorithm, played.before, jax.tree.map(lambda x: x[order], played.uploads), weights[order])
        close(forth, back)


@on_cases(*LOOPED)
def test_nothing_personal_is_in_the_bytes_of_an_upload(name, case):
    """Not a pair of neighbouring numbers of what an agent keeps: neither of what it had nor of what it has then.

    In the first round nobody has anything of its own, and batches leave so few values that pairs may coincide: there
    what an agent has then is looked for as a whole.
    """
    algorithm, made = jax.tree.map(jnp.asarray, (case.algorithm, case.agent))
    for k, played in enumerate(looped(name)[0]):
        for i, (state, key) in enumerate(zip(played.states, played.keys, strict=True)):
            had = marked(state)
            upload, has = client(algorithm, made, played.before.message, had, case.fleet.task(i), key)
            data = encode(Frame("upload", {"round": "0"}, named_leaves(upload)))
            assert not leaked(had, data)
            assert name in SENT_ANYWAY or not leaked(has, data, run=2 if k else None)


def test_the_check_of_bytes_detects_a_leak():
    state = {"own": jnp.asarray([[1.5, 2.5], [3.5, 0.0]]), "zeros": jnp.zeros(8)}
    clean = encode(Frame("upload", {}, {"theta": np.asarray([1.5, 9.0, 2.5, 0.0, 0.0, 3.5], np.float32)}))
    dirty = encode(Frame("upload", {}, {"theta": np.asarray([9.0, 9.0, 7.0, 2.5, 3.5, 1.0], np.float32)}))
    assert not leaked(state, clean)
    assert leaked(state, dirty) == ["['own']"]


def marked(state):
    """A state whose arrays are replaced by noise, like nothing else; single numbers, flags and the like, stay."""
    rng = np.random.default_rng(1)
    mark = lambda x: rng.normal(size=x.shape).astype(x.dtype) if x.nbytes >= 8 else x  # noqa: E731
    return jax.tree.map(lambda x: jnp.asarray(mark(np.asarray(x))), state)


def leaked(state, data, run=2):
    """Paths of the leaves of which so many neighbours, or all, not all of them equal, are in a frame's bytes."""
    body = b"".join(np.ascontiguousarray(x).tobytes() for x in decode(data).tensors.values())
    assert body in data
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        flat = np.ravel(np.asarray(leaf))
        length = max(2, len(flat)) if run is None else run
        runs = [flat[i : i + length] for i in range(len(flat) - length + 1)]
        if any(x.tobytes() in body for x in runs if np.ptp(x) > 0):
            found.append(jax.tree_util.keystr(path))
    return found


def test_the_case_of_one_agent_is_covered_for_every_algorithm():
    assert {name for name, _ in ALONE} | set(NEVER_LOCAL) == set(ALGORITHMS)
    assert not {name for name, _ in ALONE} & set(NEVER_LOCAL)


@pytest.mark.parametrize(
    ("name", "change"),
    some_slow(ALONE, ALONE_FAST),
    ids=lambda x: x if isinstance(x, str) else " ".join(map(str, x)),
)
def test_one_agent_alone_is_local_pg_trajectory_for_trajectory(name, change):
    """What it deploys without a further step, after rounds with the same keys."""
    local_steps = 1 if name == "afedpg" else 2
    ends = []
    for algorithm in (make(name, **change), make("local-pg", local_steps=local_steps)):
        _, state, (own,) = one_by_one(Case(algorithm), [FLEET.task(2)])
        ends.append(algorithm.personalize(state.message, own, Bowl(), jax.random.key(0), 0))
    assert np.abs(ends[1]).max() > 0.1
    np.testing.assert_allclose(*ends, rtol=0, atol=1e-6)


def test_one_agent_alone_is_local_pg_in_half_the_rounds_of_fast_fedpg_without_noise():
    fleet = pf.Fleet(jax.tree.map(lambda x: x[2:3], FLEET.train))
    after = {}
    for name, rounds in (("fast-fedpg", 6), ("local-pg", 3)):
        simulator = simulation_of(fleet, TABLE, [make(name)], [SEED], Exact(TABLE))
        after[name] = simulator.advance(simulator.start(), 0, rounds)
    np.testing.assert_allclose(after["fast-fedpg"].server.message.theta, after["local-pg"].clients[:, 0], atol=1e-14)


@pytest.mark.parametrize("variant", some_slow(["exact", "first-order"], ["first-order"]))
def test_at_alpha_0_it_is_fedavg_pg_trajectory_for_trajectory__prop_3_step_5(variant):
    shared = advanced(CASES["fedavg-pg"], 8).server.message
    personalized = advanced(Case(make("per-fedavg-pg", alpha=0.0, variant=variant)), 8).server.message
    assert np.abs(shared).max() > 0.1
    np.testing.assert_array_equal(shared.view(np.int32), personalized.view(np.int32))
