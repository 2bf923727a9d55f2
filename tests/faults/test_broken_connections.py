"""Connections to an agent's daemon break at every byte: the agent is not hurt, and gives the same answer next time."""

import threading

import pytest
from fault_injection import FlakyProxy
from little_fleet import AGENT, CONFIG, server_start, simulated_surroundings
from tiers import some_slow

from perfedrl.experiments.files import named_leaves
from perfedrl.federation.agent.daemon import Daemon, listening
from perfedrl.federation.agent.daemon_client import AgentUnreachable, call
from perfedrl.federation.agent.request_handler import Agent
from perfedrl.federation.frames import Frame, encode

QUESTION = Frame(
    "update",
    {"run": "r", "generation": "1", "round": "0", "plan": CONFIG.to_toml()},
    named_leaves(server_start().message),
)
LENGTH = 8 + len(encode(QUESTION))


@pytest.fixture
def daemon(tmp_path):
    """The socket of a daemon in this process, and the sentences that its agent says."""
    told = []
    tmp_path.chmod(0o700)
    with simulated_surroundings(), listening(tmp_path / "real.sock") as listener:
        made = Daemon(Agent(AGENT, 0, tmp_path / "agent", told.append), listener)
        thread = threading.Thread(target=made.run, daemon=True)
        thread.start()
        yield tmp_path / "real.sock", told
        made.stop()
        thread.join(60)


def answers_again(path, told):
    """The answer after all, and how often it was computed."""
    reply = call(path, QUESTION)
    computed = [line for line in told if "played" in line and "nothing new" not in line]
    return reply.tensors["theta"].tobytes(), len(computed)


@pytest.mark.parametrize("direction", ["to", "from"])
@pytest.mark.parametrize("step", some_slow([1, 97], fast=[97]))
def test_a_connection_that_is_reset_at_any_byte_costs_no_answer(daemon, tmp_path, direction, step):
    path, told = daemon
    right = call(path, QUESTION)
    whole = LENGTH if direction == "to" else 8 + len(encode(right))
    cuts = [0, 1, 7, 8, 9, *range(10, whole - 1, step), whole - 1]
    proxy = FlakyProxy(tmp_path / "proxy.sock", path, {i: ("reset", direction, n) for i, n in enumerate(cuts)})
    for n in cuts:
        with pytest.raises(AgentUnreachable, match="ended before it answered") as error:
            call(proxy.path, QUESTION)
        assert "\n" not in str(error.value), f"reset after {n} bytes {direction} the daemon"
    assert proxy.connections == len(cuts)
    proxy.close()
    assert answers_again(path, told) == (right.tensors["theta"].tobytes(), 1)


def test_a_partition_ends_with_a_sentence_and_a_delay_with_the_answer(daemon, tmp_path):
    path, told = daemon
    broken = {0: ("partition", "from", 4), 1: ("delay", "to", 20)}
    proxy = FlakyProxy(tmp_path / "proxy.sock", path, broken)
    with pytest.raises(AgentUnreachable, match=r"did not answer within 0\.5 s"):
        call(proxy.path, QUESTION, timeout=0.5)
    delayed = []
    thread = threading.Thread(target=lambda: delayed.append(call(proxy.path, QUESTION)))
    thread.start()
    right, computed = answers_again(path, told)
    assert not delayed
    proxy.heal()
    thread.join(60)
    assert delayed[0].tensors["theta"].tobytes() == right
    assert computed == 1
    proxy.close()
