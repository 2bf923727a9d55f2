"""Memory is estimated from shapes, near the compiler's count; what does not fit is rejected before compiling."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import tomli_w
from fixtures import write
from tiers import some_slow
from tiny_config import BASE, changed

import perfedrl as pf
from perfedrl import memory
from perfedrl.compilation import jit
from perfedrl.experiments.config import make_config
from perfedrl.federation.agent.config import make_agent_config
from perfedrl.federation.agent.worker import Worker
from perfedrl.memory import Need, TooLargeError, check_host_memory, check_memory, readable

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))
N = 1000
ARRAY = 4 * N


def need(f, *args) -> int:
    """The estimated bytes of a function, without those of its arguments."""
    program = jax.jit(f).trace(*args).jaxpr
    return memory.Program(program.jaxpr).peak().bytes


def test_fused_operations_take_no_memory():
    x = jnp.ones(N)
    assert need(lambda x: jnp.sum(jnp.tanh(x * 2) + 1), x) == 4
    assert need(lambda x: jnp.sum(jnp.ones((N, N)) * x), x) == 4


def test_arrays_count_until_their_last_use():
    def chain(x):
        for _ in range(5):
            x = jnp.cumsum(x)
        return jnp.sum(x)

    def together(x):
        return jnp.sum(jnp.stack([jnp.cumsum(x + i) for i in range(5)]) ** 2)

    assert need(chain, jnp.ones(N)) == 2 * ARRAY
    assert need(together, jnp.ones(N)) >= 10 * ARRAY


def test_a_loop_takes_one_pass_and_what_it_collects():
    def body(carry, _):
        return carry + jnp.sum(jnp.cumsum(jnp.full(N, carry))), carry

    def total(x):
        return jax.lax.scan(body, x, length=50)

    assert ARRAY <= need(total, jnp.ones(())) <= 2 * ARRAY + 50 * 8 + 100


def test_agents_at_a_time_count_and_agents_in_turn_do_not():
    def agent(x):
        return jnp.sum(jnp.cumsum(jnp.full(N, x)))

    def by_two(xs):
        return jax.lax.map(agent, xs, batch_size=2)

    alone, all_ = need(agent, jnp.ones(())), need(jax.vmap(agent), jnp.ones(10))
    assert all_ == pytest.approx(10 * alone, rel=0.05)
    assert need(by_two, jnp.ones(10)) == pytest.approx(2 * alone, rel=0.1)


def test_a_program_that_does_not_fit_is_rejected_before_it_is_compiled(monkeypatch):
    program = jit(lambda x: jnp.cumsum(jnp.ones((x.shape[0], 1_000_000)) * x[:, None], axis=1))
    assert program.need(jnp.ones(100)).shape == (100, 1_000_000)
    monkeypatch.setenv(memory.LIMIT, "0.5")
    with pytest.raises(TooLargeError, match=r"about 763 MiB .* 512 MiB; the largest array has shape 100 x 1000000"):
        program(jnp.ones(100))
    assert program.compilations() == 0


def test_the_limit_can_be_set_and_must_be_a_number(monkeypatch):
    monkeypatch.setenv(memory.LIMIT, "1e-6")
    with pytest.raises(TooLargeError, match=r"this machine has 1.07e\+03 bytes|this machine has 1.05 KiB"):
        check_host_memory(Need(2**20, (2**18,)))
    monkeypatch.setenv(memory.LIMIT, "much")
    with pytest.raises(pf.UserError, match="number of GiB"):
        check_host_memory(Need(1, ()))


def test_a_gpu_has_a_memory_of_its_own(monkeypatch):
    gpu = SimpleNamespace(device_kind="Some GPU", memory_stats=lambda: {"bytes_limit": 2**20})
    monkeypatch.setattr(memory.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(memory.jax, "local_devices", lambda: [gpu])
    check_memory(Need(2**20, (2**18,)))
    with pytest.raises(TooLargeError, match="2 MiB of memory, and the device Some GPU has 1 MiB"):
        check_memory(Need(2**21, (2**19,)))
    monkeypatch.setenv(memory.LIMIT, "1")
    check_memory(Need(2**21, (2**19,)))


def test_sizes_are_readable():
    assert [readable(x) for x in (0, 1023, 2**20, 5.62 * 2**60)] == ["0 bytes", "1.02e+03 bytes", "1 MiB", "5.62 EiB"]


MLP = {"policy": {"name": "mlp", "hidden": [8]}, "fleet": {"env": "arc", "goals": 2, "held_out": 1}}
COMPARED = {
    "table": BASE,
    "network": {**BASE, **MLP, "evaluation": {"name": "monte-carlo", "trajectories": 5, "episodes": 6}},
}


@pytest.mark.parametrize("name", some_slow(COMPARED, fast=["network"]))
def test_the_estimate_is_near_the_count_of_the_compiler(name):
    from bench_memory import compared

    for what, (estimated, counted) in compared(make_config(COMPARED[name])).items():
        assert 1 / 4 < estimated / counted < 4, what


LARGE = {"algorithm": {"m_in": 1_000_000}, "fleet": {"horizon": 100_000}}
TOO_LARGE = {
    "a wide grid": (changed(fleet={"width": 30_000}), r"EiB .* lower width \(30000\)"),
    "long batches": (changed(**LARGE), r"TiB .* lower m_in \(1000000\) or horizon \(100000\)"),
    "many states": (changed(fleet={"env": "random-mdps", "states": 10**6}), r"lower states \(1000000\) or actions"),
    "episodes": (
        {**BASE, **MLP, "seeds": 20, "evaluation": {"name": "monte-carlo", "episodes": 10_000_000}},
        r"lower episodes \(10000000\)",
    ),
    "a wide network": ({**BASE, **MLP, "policy": {"name": "mlp", "hidden": [60_000] * 2}}, r"widths \(60000\)"),
    "played agents": (
        changed(fleet={"env": "gymnasium", "id": "CartPole-v1", "horizon": 100_000}, algorithm={"m_in": 1_000_000})
        | {"policy": MLP["policy"]},
        r"lower m_in \(1000000\) or horizon \(100000\)",
    ),
}
TOO_LARGE["many states"][0]["fleet"].pop("width")
TOO_LARGE["played agents"][0]["fleet"].pop("width")


@pytest.mark.parametrize("name", TOO_LARGE)
def test_what_is_too_large_is_rejected_with_the_setting_to_lower(name, tmp_path, monkeypatch):
    monkeypatch.setenv(memory.LIMIT, "16")
    table, message = TOO_LARGE[name]
    with pytest.raises(pf.UserError, match=message):
        pf.train(make_config(table), tmp_path / "runs")
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_run_that_would_fit_with_fewer_seeds_or_agents_is_told_so(monkeypatch):
    monkeypatch.setenv(memory.LIMIT, "0.001")
    table = {**BASE, **MLP, "seeds": 7, "evaluation": {"name": "monte-carlo", "episodes": 400, "trajectories": 1}}
    with pytest.raises(pf.UserError, match="or run fewer seeds"):
        pf.inspect(make_config(table))


def test_seeds_that_share_a_machine_count_on_every_core():
    config = make_config(BASE)
    simulation = pf.Simulation(config.experiment, config.seeds)
    assert len(jax.local_devices()) == int(os.environ["JAX_NUM_CPU_DEVICES"])
    single = pf.Simulation(config.experiment, config.seeds[:1])
    both, one = simulation.need(simulation.start()).bytes, single.need(single.start()).bytes
    assert both > 1.5 * one


@pytest.mark.parametrize("path", some_slow(sorted((ROOT / "configs").glob("*.toml")), fast=[ROOT / "configs/arc.toml"]))
def test_no_committed_config_needs_more_than_a_gigabyte(path):
    config = pf.load_config(path)
    simulation = pf.Simulation(config.experiment, config.seeds)
    assert simulation.need(simulation.start()).bytes < 2**30


def test_every_command_that_computes_rejects_what_is_too_large(run, tmp_path, monkeypatch):
    config = write(tmp_path / "tiny.toml", BASE)
    assert run("train", config)[0] == 0
    folder = next((tmp_path / "runs").iterdir())
    monkeypatch.setenv(memory.LIMIT, "3e-6")
    for command in (["train", config, "--restart"], ["inspect", config], ["evaluate", folder]):
        code, _, err = run(*command)
        assert code == 2
        assert "of memory, and this machine has" in err.strip().splitlines()[-1]
        assert "Traceback" not in err
    with pytest.raises(pf.UserError, match="of memory, and this machine has"):
        pf.personalize(folder, agent=0)


def test_an_agent_of_a_networked_fleet_rejects_what_is_too_large(monkeypatch):
    table = changed(seeds=[1], fleet={"goals": [[0, 0], [1, 1]]})
    training = Worker(make_agent_config({"fleet": table["fleet"]}), 0).training(tomli_w.dumps(table))
    monkeypatch.setenv(memory.LIMIT, "1e-6")
    with pytest.raises(TooLargeError):
        training.update(training.message, training.state, 0)
