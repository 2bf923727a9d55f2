"""Sessions over loopback TCP and TLS: frames arrive once and in order, and a listener bounds what strangers take."""

import asyncio
import random
import socket
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from types import SimpleNamespace

import pytest
from faulty_proxy import FaultyProxy

from perfedrl.federation.connections import dialer, session
from perfedrl.federation.connections.dialer import Dialer, NotAdmitted, Target, probe
from perfedrl.federation.connections.listener import Listener, ListenerLimits
from perfedrl.federation.connections.streams import (
    BROKEN,
    FRAME,
    HEADER,
    HELLO,
    MOST_FRAME,
    MOST_TEXT,
    PING,
    UNKNOWN,
    WELCOME,
    BadRecord,
    Hello,
    Record,
    Stream,
    client_context,
    server_context,
)
from perfedrl.federation.engine.driver import is_agent
from perfedrl.federation.engine.fleet_folder import FleetFolder, Kit
from perfedrl.federation.engine.local_fleet import free_port
from perfedrl.federation.engine.provision import init


def keeping(frames, pause=0.0):
    """Keep frames in a list, and pause after each."""

    def deliver(frame):
        frames.append(frame)
        return pause

    return deliver


class Server:
    """A listener that keeps what arrives, by endpoint; `told` is what a person would be told."""

    def __init__(self):
        self.received, self.peers, self.told, self.ended = {}, {}, [], []

    async def opened(self, peer):
        frames = self.received.setdefault(peer.hello.endpoint, [])
        self.peers[peer.hello.endpoint] = peer
        peer.deliver = keeping(frames)

        async def ended():
            self.ended.append(peer.hello.endpoint)

        peer.ended = ended

    def tell(self, name, sentence):
        self.told.append((name, sentence))


@asynccontextmanager
async def listening(context=None, limits=ListenerLimits()):  # noqa: B008
    """A running server and its port."""
    server, bound = Server(), socket.create_server(("127.0.0.1", 0))
    server.port = bound.getsockname()[1]
    server.listener = Listener(bound, context, server.opened, server.tell, is_agent, limits)
    task = asyncio.ensure_future(server.listener.run())
    try:
        yield server
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def dialing(target, endpoint="agent", instance="", **more):
    """A running client, with what arrives there in `received`."""
    received = []

    async def opened(_):
        client.opened.set()

    def tell(line):
        client.told.append(line)

    client = Dialer(target, endpoint, opened, keeping(received), tell, **more)
    client.received, client.opened, client.told = received, asyncio.Event(), []
    client._hello = Hello(client._hello.session, instance, endpoint)
    task = client.task = asyncio.ensure_future(client.run())
    try:
        yield client
    finally:
        client.session.end()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition, seconds=120.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def frames(seed, count=300):
    chance = random.Random(seed)
    return [chance.randbytes(chance.choice((1, 20, 2000, 70_000))) for _ in range(count)]


@pytest.mark.parametrize("seed", range(3))
def test_through_resets_cuts_and_delays_every_frame_arrives_once_and_in_order(seed):
    """In both directions at once; the proxy ends dozens of connections."""
    there, back = frames(f"there {seed}"), frames(f"back {seed}")

    async def main(proxy):
        async with listening() as server:
            proxy._target = server.port
            async with dialing(Target("127.0.0.1", proxy.port)) as client:
                await client.opened.wait()
                peer = server.peers["agent"]
                for k in range(300):
                    client.session.send(there[k])
                    peer.session.send(back[k])
                    await asyncio.sleep(0)
                await until(lambda: len(server.received["agent"]) == len(client.received) == 300)
                assert server.received["agent"] == there
                assert client.received == back
                assert server.peers == {"agent": peer}, "it was one session"

    with FaultyProxy(free_port(), 0, seed, most_bytes=600_000, longest_delay=0.02) as proxy:
        asyncio.run(main(proxy))
    assert proxy.faults["reset"] + proxy.faults["cut"] > 10, proxy.faults


def test_a_stream_without_signs_of_life_is_replaced(monkeypatch):
    """A connection that neither ends nor carries anything, as behind a router that forgot it."""
    monkeypatch.setattr(session, "PING_EVERY", 0.02)
    monkeypatch.setattr(session, "SILENCE", 0.1)

    async def main():
        async with listening() as server, dialing(Target("127.0.0.1", server.port)) as client:
            await client.opened.wait()
            await until(lambda: client.session.attached)
            stuck = client.session._stream
            stuck.write = lambda *_: None
            server.peers["agent"].session._stream.write = lambda *_: None
            client.session.send(b"held back")
            await until(lambda: server.received["agent"] == [b"held back"])
            assert client.session._stream is not stuck

    asyncio.run(main())


class Scripted:
    """A stream whose records the test provides; it yields those that had arrived even after it was given up."""

    def __init__(self):
        self.records = asyncio.Queue()

    async def read(self):
        return await self.records.get()

    def write(self, *_):
        pass

    abort = write


def test_a_frame_that_had_arrived_on_a_stream_that_was_given_up_is_not_delivered_twice():
    async def main():
        received, old, new = [], Scripted(), Scripted()
        ours = session.Session(keeping(received))
        carrying = [asyncio.ensure_future(ours.carry(old, 0))]
        await until(lambda: ours.attached)
        ours.detach()
        carrying.append(asyncio.ensure_future(ours.carry(new, 0)))
        await until(lambda: ours.attached)
        await old.records.put(Record(FRAME, 0, b"first"))
        assert await carrying[0] is False
        await new.records.put(Record(FRAME, 0, b"first"))
        await until(lambda: received)
        assert (received, ours.received) == ([b"first"], 1)
        carrying[1].cancel()

    asyncio.run(main())


def test_a_session_without_a_stream_ends_at_both_ends():
    async def main():
        async with listening(limits=ListenerLimits(resume=0.2)) as server:
            target = Target("127.0.0.1", server.port)
            async with dialing(target, resume=0.2) as client:
                await until(lambda: client.session.attached)
                object.__setattr__(target, "port", free_port())
                client.session.detach()
                await until(client.task.done)
                await until(lambda: server.ended == ["agent"])
                assert client.session.over
                with pytest.raises(session.SessionOver):
                    client.session.send(b"too late")

    asyncio.run(main())


def test_a_session_that_the_server_forgot_ends():
    """After a restart of the server: the engine begins a new one."""

    async def main():
        async with listening() as server, dialing(Target("127.0.0.1", server.port)) as client:
            await until(lambda: client.session.attached)
            peer = server.peers["agent"]
            server.listener.peers.clear()
            client.session.detach()
            await until(client.task.done)
            assert client.session.over
            assert not peer.session.attached

    asyncio.run(main())


def test_a_peer_that_is_held_back_holds_back_nobody_else():
    async def main():
        async with listening() as server, dialing(Target("127.0.0.1", server.port), "slow") as slow:
            await slow.opened.wait()
            server.peers["slow"].deliver = keeping(server.received["slow"], 1000.0)
            async with dialing(Target("127.0.0.1", server.port), "other") as other:
                for k in range(10):
                    slow.session.send(bytes([k]))
                    other.session.send(bytes([k]))
                await until(lambda: len(server.received.get("other", ())) == 10)
                await until(lambda: server.received["slow"])
                assert server.received["slow"] == [b"\0"]

    asyncio.run(main())


def test_either_end_ends_a_session_after_its_last_frames():
    async def main():
        async with listening() as server, dialing(Target("127.0.0.1", server.port)) as client:
            await until(lambda: client.session.attached)
            client.session.send(b"last")
            client.session.close()
            await until(lambda: server.ended == ["agent"])
            assert server.received["agent"] == [b"last"]
            async with dialing(Target("127.0.0.1", server.port)) as other:
                await until(lambda: other.session.attached)
                server.peers["agent"].session.send(b"first")
                server.peers["agent"].session.close()
                await until(other.task.done)
                assert other.received == [b"first"]

    asyncio.run(main())


@pytest.mark.parametrize("count", [-1, 1, 10**6], ids=["fewer", "one more", "many more"])
def test_acknowledgements_of_frames_that_were_not_sent_end_the_stream(count):
    async def main():
        ours = session.Session(keeping([]))
        ours._acknowledged = ours._written = 5
        with pytest.raises(BadRecord):
            ours._acknowledge(5 + count)

    asyncio.run(main())


async def raw(port, *records):
    """Send records as bytes; return what comes back until the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for kind, payload, length in records:
        writer.write(HEADER.pack(kind, len(payload) if length is None else length, 0) + payload)
    with suppress(ConnectionError):
        async with asyncio.timeout(60):
            return await reader.read(HEADER.size)
    return b""


HELLO_BYTES = Hello("s").encode()


@pytest.mark.parametrize(
    "records",
    [
        [(0, b"", None)],
        [(FRAME, b"frame", None)],
        [(HELLO, b"{}", None)],
        [(HELLO, b"[" * 4000, None)],
        [(HELLO, b'{"session": 3}', None)],
        [(HELLO, b'{"session": "s", "x": 3}', None)],
        [(HELLO, b"", 2**32 - 1)],
    ],
    ids=["no kind", "a frame first", "no session", "nested", "a number", "another field", "too long"],
)
def test_whoever_sends_no_greeting_is_disconnected(records):
    async def main():
        async with listening() as server:
            assert await raw(server.port, *records) == b""
            assert server.peers == {}
            assert HEADER.unpack(await raw(server.port, (HELLO, HELLO_BYTES, None)))[0] == WELCOME

    asyncio.run(main())


@pytest.mark.parametrize(("kind", "length"), [(FRAME, MOST_FRAME), (HELLO, MOST_TEXT), (PING, 0)])
def test_a_record_beyond_its_limit_is_rejected_before_it_is_read(kind, length):
    async def read(announced):
        reader = asyncio.StreamReader()
        reader.feed_data(HEADER.pack(kind, announced, 0))
        reader.feed_eof()
        return await Stream(reader, None).read()

    with pytest.raises(BadRecord):
        asyncio.run(read(length + 1))
    with suppress(EOFError):
        assert asyncio.run(read(length)).kind == kind


def test_idle_strangers_make_room_for_whoever_finishes_the_hand_shake():
    """The oldest unfinished connection of the busiest address is given up; others wait for their time limit."""

    async def main():
        limits = ListenerLimits(unfinished=20)
        async with listening(limits=limits) as server:
            idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(100)]
            other = await asyncio.open_connection("127.0.0.1", server.port, local_addr=("127.0.0.2", 0))
            idle += [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(100)]
            async with dialing(Target("127.0.0.1", server.port)) as client:
                await until(lambda: client.session.attached)
                client.session.send(b"work")
                await until(lambda: server.received["agent"] == [b"work"])
            assert len(server.listener._unfinished) <= limits.unfinished
            gone = [reader for reader, _ in idle if reader.at_eof() or reader.exception()]
            assert len(gone) >= 180
            assert not other[0].at_eof()
            for _, writer in (*idle, other):
                writer.transport.abort()

    asyncio.run(main())


def test_an_unfinished_hand_shake_ends_after_its_time():
    async def main():
        async with listening(limits=ListenerLimits(handshake=0.05)) as server:
            reader, _ = await asyncio.open_connection("127.0.0.1", server.port)
            async with asyncio.timeout(60):
                assert await reader.read() == b""
            assert not server.listener._unfinished

    asyncio.run(main())


def test_neither_end_holds_back_short_frames():
    """Else every answer would wait for the acknowledgement of the last one, which systems delay by 40 ms."""

    async def main():
        async with listening() as server, dialing(Target("127.0.0.1", server.port)) as client:
            await until(lambda: client.session.attached)
            for end in (client.session, server.peers["agent"].session):
                raw = end._stream._writer.get_extra_info("socket")
                assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    asyncio.run(main())


# --- with certificates


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificates") / "fleet"
    init(folder, 2, port=8766)
    return FleetFolder(folder)


def server_tls(fleet):
    startup = fleet.server / "startup"
    return server_context(*(str(startup / name) for name in ("rootCA.pem", "server.crt", "server.key")))


def target_of(fleet, port, name="agent-0"):
    kit = Kit(fleet.kit(name))
    return Target("localhost", port, client_context(str(kit.authority), str(kit.certificate), str(kit.key)))


def test_a_second_copy_of_a_kit_is_refused_while_the_first_answers_and_told(fleet):
    async def main():
        async with listening(server_tls(fleet)) as server:
            target = target_of(fleet, server.port)
            async with dialing(target, "agent-0", "first") as first, dialing(target, "agent-0.job", "first") as job:
                await until(lambda: first.session.attached and job.session.attached)
                async with dialing(target, "agent-0", "second") as second:
                    await until(lambda: second.told)
                    assert "agent-0 is connected already, from " in second.told[0]
                    assert not second.opened.is_set()
                async with dialing(target, "agent-0", "") as nameless:
                    await until(lambda: nameless.told)
                with pytest.raises(NotAdmitted, match="stop that one first"):
                    await probe(target, "another")
                assert first.session.attached
                assert [name for name, _ in server.told] == ["agent-0"], "refusals at once are told once"
                assert "a second copy of its kit at " in server.told[0][1]
                async with dialing(target_of(fleet, server.port, "agent-1"), "agent-1", "second") as another:
                    await until(lambda: another.session.attached)

    asyncio.run(main())


def test_a_copy_takes_over_aloud_when_the_first_no_longer_answers(fleet):
    async def main():
        limits = ListenerLimits(answer=0.2)
        async with listening(server_tls(fleet), limits) as server:
            target = target_of(fleet, server.port)
            async with dialing(target, "agent-0", "first") as first:
                await until(lambda: first.session.attached)
                first.session._stream.write = lambda *_: None
                async with dialing(target, "agent-0", "second") as second:
                    await until(lambda: second.session.attached)
                await until(first.task.done)
            assert "no longer answers" in server.told[0][1]

    asyncio.run(main())


def test_a_restarted_process_replaces_its_predecessors_session(fleet):
    async def main():
        async with listening(server_tls(fleet)) as server:
            target = target_of(fleet, server.port)
            async with dialing(target, "agent-0", "first") as before:
                await until(lambda: before.session.attached)
                old = server.peers["agent-0"]
                async with dialing(target, "agent-0", "first") as after:
                    await until(lambda: after.session.attached)
                    assert old.session.over
                    assert list(server.listener.peers.values()) == [server.peers["agent-0"]]
                    assert server.told == []

    asyncio.run(main())


def test_one_certificate_has_a_bounded_number_of_sessions_and_streams(fleet):
    async def main():
        async with listening(server_tls(fleet), ListenerLimits(per_name=2)) as server, AsyncExitStack() as stack:
            target = target_of(fleet, server.port)
            for name in ("a", "b"):
                client = await stack.enter_async_context(dialing(target, name))
                await client.opened.wait()
            third = await stack.enter_async_context(dialing(target, "c"))
            await until(lambda: third.told)
            assert "has 2 connections already; another one from 127.0.0.1:" in server.told[0][1]
            assert set(server.received) == {"a", "b"}
            server.listener._streams["agent-0"] += 2
            with suppress(*BROKEN):
                await target.greet(Hello("one stream too many"))
                pytest.fail("the server replied")
            another = await stack.enter_async_context(dialing(target_of(fleet, server.port, "agent-1"), "d"))
            await another.opened.wait()

    asyncio.run(main())


def test_a_peer_that_reads_nothing_takes_a_bounded_part_of_the_memory(monkeypatch):
    monkeypatch.setattr(session, "MOST_WAITING", 1000)

    async def main():
        ours = session.Session(keeping([]))
        for _ in range(10):
            ours.send(bytes(100))
        with pytest.raises(session.SessionOver, match="takes no more frames"):
            ours.send(bytes(100))

    asyncio.run(main())


def test_signs_of_life_are_not_free_of_limits(monkeypatch):
    """A peer that sends them and reads nothing is held back, and given up when too much waits for it."""
    monkeypatch.setattr(session, "MOST_UNREAD", 100)

    async def main():
        ours, stream = session.Session(keeping([])), SimpleNamespace(write=lambda *_: None, unsent=0)
        assert ours._take(stream, Record(PING, 0, b"")) > 0
        stream.unsent = 101
        with pytest.raises(BadRecord, match="reads nothing"):
            ours._take(stream, Record(PING, 0, b""))

    asyncio.run(main())


def test_nobody_can_continue_the_session_of_another_name(fleet):
    async def main():
        async with listening(server_tls(fleet)) as server, dialing(target_of(fleet, server.port), "x") as client:
            await until(lambda: client.session.attached)
            stolen = Hello(client._hello.session, resume=True)
            stream, reply = await target_of(fleet, server.port, "agent-1").greet(stolen)
            stream.abort()
            assert reply.kind == UNKNOWN
            assert client.session.attached

    asyncio.run(main())


def test_a_server_that_is_not_there_yet_is_found_when_it_comes(monkeypatch):
    monkeypatch.setattr(dialer, "LONGEST_DELAY", 0.05)

    async def main():
        async with listening() as server:
            target = Target("127.0.0.1", free_port())
            async with dialing(target) as client:
                await asyncio.sleep(0.1)
                object.__setattr__(target, "port", server.port)
                await until(lambda: client.session.attached)

    asyncio.run(main())
