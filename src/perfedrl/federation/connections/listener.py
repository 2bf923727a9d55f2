"""The listening end: admits whoever has a certificate of the fleet, and keeps strangers from using up the machine."""

import asyncio
import socket
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from perfedrl.federation.connections.session import Deliver, Session
from perfedrl.federation.connections.streams import (
    BROKEN,
    HELLO,
    REFUSED,
    UNKNOWN,
    WELCOME,
    BadRecord,
    Hello,
    Stream,
    accepted,
)

BACKLOG = 1024
TELL_EVERY = 10.0
"""Seconds between two sentences about refusals of one name."""


@dataclass(frozen=True)
class ListenerLimits:
    """What a listener allows.

    `unfinished` connections may be before the end of their hand-shake, for at most `handshake` seconds. A new one takes
    the place of the oldest of the busiest address, of those that sent nothing yet if there are any. One name may have
    `per_name` sessions. A session without a stream ends after `resume` seconds. Before a second process takes an
    agent's name, the first has `answer` seconds for a sign of life.
    """

    unfinished: int = 256
    handshake: float = 10.0
    per_name: int = 8
    resume: float = 15.0
    answer: float = 5.0


@dataclass(eq=False)
class Arrival:
    """A connection before the end of its hand-shake: where it comes from, and whether it has sent anything."""

    host: str
    spoke: bool = False


@dataclass(eq=False)
class Peer:
    """One session at the listening end, with what is known of the process at the other end."""

    name: str
    hello: Hello
    addresses: tuple[str, str]
    deliver: Deliver = lambda _: 0.0
    ended: Callable[[], Awaitable[None]] | None = None
    expiry: asyncio.TimerHandle | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    session: Session = field(init=False)

    def __post_init__(self) -> None:
        self.session = Session(lambda frame: self.deliver(frame))


Opened = Callable[[Peer], Awaitable[None]]
"""Called for a new session, before its first frame; it sets the peer's `deliver` and `ended`."""
Alone = Callable[[str], bool]
"""Whether a name belongs to one process and its descendants, as an agent's does."""
Tell = Callable[[str, str], None]
"""Called with a name and a sentence about it, for what a person should know."""


class Listener:
    """Accepts connections on a socket; all methods run in the event loop's thread."""

    def __init__(
        self,
        listening: socket.socket,
        context: ssl.SSLContext | None,
        opened: Opened,
        tell: Tell,
        alone: Alone,
        limits: ListenerLimits = ListenerLimits(),  # noqa: B008
    ):
        self._socket, self._context, self._opened = listening, context, opened
        self._tell, self._alone, self.limits = tell, alone, limits
        self._streams: Counter[str] = Counter()
        self._unfinished: dict[asyncio.Task, Arrival] = {}
        self._tasks: set[asyncio.Task] = set()
        self._told: dict[str, float] = {}
        self.peers: dict[tuple[str, str], Peer] = {}
        """The sessions, by name and session's id: nobody can continue a session of another name."""

    async def run(self) -> None:
        """Accept connections until the task is cancelled; then end all sessions."""
        loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        self._socket.listen(BACKLOG)
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(self._socket)
                except OSError:  # the client is gone, or too many files are open for the moment
                    await asyncio.sleep(0.05)
                    continue
                self._begin(connection)
        finally:
            self._socket.close()
            for peer in list(self.peers.values()):
                self._drop(peer)
            for task in list(self._unfinished):
                task.cancel()

    def _begin(self, connection: socket.socket) -> None:
        """Start the hand-shake of a connection, after that of another was given up if there are too many."""
        if len(self._unfinished) >= self.limits.unfinished:
            self._make_room()
        arrival = Arrival(_host(connection))
        task = asyncio.get_running_loop().create_task(self._serve(connection, arrival))
        self._unfinished[task] = arrival
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _make_room(self) -> None:
        """Give up the hand-shake that is least likely to end."""
        silent = {task: arrival for task, arrival in self._unfinished.items() if not arrival.spoke}
        candidates = silent or self._unfinished
        busiest = Counter(arrival.host for arrival in candidates.values()).most_common(1)[0][0]
        oldest = next(task for task, arrival in candidates.items() if arrival.host == busiest)
        del self._unfinished[oldest]
        oldest.cancel()

    def _done(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        self._unfinished.pop(task, None)

    async def _serve(self, connection: socket.socket, arrival: Arrival) -> None:
        """Serve one connection from its hand-shake to its end."""
        stream = None
        try:
            async with asyncio.timeout(self.limits.handshake):
                await _first_bytes(connection)
                arrival.spoke = True
                stream = await accepted(connection, self._context)
                record = await stream.read()
                if record.kind != HELLO:
                    raise BadRecord("expected a greeting")
                hello = Hello.decode(record.payload)
        except BROKEN:
            connection.close() if stream is None else stream.abort()
            return
        except BaseException:
            connection.close() if stream is None else stream.abort()
            raise
        task = asyncio.current_task()
        assert task is not None
        self._unfinished.pop(task, None)
        name = stream.common_name
        fresh = self._known(name, hello) is None  # nobody else can keep a session from going on
        self._streams[name] += fresh
        try:
            if not fresh or self._streams[name] <= 2 * self.limits.per_name:  # a stream may break unnoticed here
                await self._admit(name, stream, hello, record.received)
        finally:
            self._streams[name] -= fresh
            stream.abort()

    async def _admit(self, name: str, stream: Stream, hello: Hello, received: int) -> None:
        """Open or continue a session, and carry its frames; or say why not."""
        if (peer := self._known(name, hello)) is None:
            if hello.resume:
                stream.write(UNKNOWN)
                return await stream.end()
            if refusal := await self._refusal(name, hello, stream.addresses[1]):
                stream.write(REFUSED, 0, refusal.encode())
                return await stream.end()
            if hello.probe:
                stream.write(WELCOME)
                return await stream.end()
            peer = self._known(name, hello) or await self._open(Peer(name, hello, stream.addresses))
        await peer.ready.wait()
        if peer.session.over:  # another process took its place while it was opened
            return self._drop(peer)
        if peer.expiry is not None:
            peer.expiry.cancel()
        peer.session.detach()
        stream.write(WELCOME, peer.session.received)
        finished = await peer.session.carry(stream, received)
        if finished or peer.session.over or not self.limits.resume:
            self._drop(peer)
        elif not peer.session.attached:
            loop = asyncio.get_running_loop()
            peer.expiry = loop.call_later(self.limits.resume, self._drop, peer)
        return None

    def _known(self, name: str, hello: Hello) -> Peer | None:
        """The session that a greeting names, if it goes on."""
        peer = self.peers.get((name, hello.session))
        return None if peer is None or peer.session.over else peer

    async def _open(self, peer: Peer) -> Peer:
        """Register a new session; an older one of the same process's predecessor ends."""
        for other in self._of(peer.name):
            if peer.hello.endpoint and other.hello.endpoint == peer.hello.endpoint:
                self._drop(other)
        self.peers[peer.name, peer.hello.session] = peer
        try:
            await self._opened(peer)
        finally:
            peer.ready.set()
        return peer

    def _of(self, name: str) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.name == name]

    async def _refusal(self, name: str, hello: Hello, address: str) -> str:
        """Why a new session is not opened; empty if it is."""
        peers = self._of(name)
        if len(peers) >= self.limits.per_name:
            self._refused(name, f"has {len(peers)} connections already; another one from {address} was refused")
            return f"{name} has {len(peers)} connections already"
        others = [peer for peer in peers if self._alone(name) and peer.hello.instance != hello.instance]
        if not others:
            return ""
        first = others[0].addresses[1]
        if await self._alive(others):
            self._refused(name, f"is connected from {first}; a second copy of its kit at {address} was refused")
            return f"{name} is connected already, from {first}; stop that one first"
        for other in others:
            self._drop(other)
        self._tell(name, f"is connected from a new process at {address}; the one at {first} no longer answers")
        # Others may have been admitted while this one waited for an answer.
        return await self._refusal(name, hello, address) if self._of(name) else ""

    def _refused(self, name: str, sentence: str) -> None:
        """Tell of a refusal, unless another one of this name was told a moment ago."""
        now = time.monotonic()
        if now - self._told.get(name, -TELL_EVERY) >= TELL_EVERY:
            self._told[name] = now
            self._tell(name, sentence)

    async def _alive(self, peers: list[Peer]) -> bool:
        """Whether one of some sessions gives a sign of life in time."""
        began = time.monotonic()
        for peer in peers:
            peer.session.ping()
        while time.monotonic() - began < self.limits.answer:
            going = [peer for peer in peers if not peer.session.over]
            if any(peer.session.heard > began for peer in going):
                return True
            if not going:
                return False
            await asyncio.sleep(0.05)
        return False

    def _drop(self, peer: Peer) -> None:
        """End a session and forget it."""
        if self.peers.get((peer.name, peer.hello.session)) is peer:
            del self.peers[peer.name, peer.hello.session]
        if peer.expiry is not None:
            peer.expiry.cancel()
        peer.session.end()
        if peer.ended is not None:
            ended, peer.ended = peer.ended, None
            task = asyncio.get_running_loop().create_task(_awaited(ended))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _awaited(call: Callable[[], Awaitable[None]]) -> None:
    await call()


async def _first_bytes(connection: socket.socket) -> None:
    """Wait until a connection has sent something, which an honest one does at once."""
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    arrived: asyncio.Future[None] = loop.create_future()

    def note() -> None:
        if not arrived.done():
            arrived.set_result(None)

    loop.add_reader(connection, note)
    try:
        await arrived
    finally:
        loop.remove_reader(connection)


def _host(connection: socket.socket) -> str:
    """The address that a connection comes from, without its port."""
    try:
        name = connection.getpeername()
    except OSError:
        return ""
    return str(name[0]) if isinstance(name, tuple) and name else ""
