"""The connecting end: opens a session, and continues it over new streams while the network fails."""

import asyncio
import os
import random
import secrets
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from perfedrl.federation.connections.session import Deliver, Session
from perfedrl.federation.connections.streams import BROKEN, BUFFER, HELLO, REFUSED, WELCOME, Hello, Record, Stream

INSTANCE = "PERFEDRL_INSTANCE"
"""The environment variable with the secret name of this copy of a kit, which all its processes share."""
FIRST_DELAY, LONGEST_DELAY = 0.05, 1.0
"""Seconds before the next attempt to connect, at first and at most."""
AFTER_REFUSAL = 10.0
CONNECT_TIMEOUT, REPLY_TIMEOUT = 10.0, 20.0
RESUME = 15.0
"""Seconds after which a session without a stream ends, as at the listening end."""


class NotAdmitted(Exception):  # noqa: N818
    """The listening end does not open a session; its reason."""


@dataclass(frozen=True)
class Target:
    """Where to connect: a host and port with TLS, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    context: ssl.SSLContext | None = None
    path: Path | None = None

    async def stream(self) -> Stream:
        """A new stream."""
        async with asyncio.timeout(CONNECT_TIMEOUT):
            if self.path is not None:
                return Stream(*await asyncio.open_unix_connection(str(self.path), limit=BUFFER))
            return Stream(*await asyncio.open_connection(self.host, self.port, ssl=self.context, limit=BUFFER))

    async def greet(self, hello: Hello, received: int = 0) -> tuple[Stream, Record]:
        """Connect, and send a greeting; return the stream and the reply."""
        stream = await self.stream()
        try:
            stream.write(HELLO, received, hello.encode())
            async with asyncio.timeout(REPLY_TIMEOUT):
                reply = await stream.read()
            if reply.kind == REFUSED:
                raise NotAdmitted(reply.payload.decode(errors="replace"))
        except BaseException:
            stream.abort()
            raise
        return stream, reply


Opened = Callable[[Stream], Awaitable[None]]


class Dialer:
    """One session to a target, in the event loop's thread; `opened` is called before its first frame."""

    def __init__(
        self,
        target: Target,
        endpoint: str,
        opened: Opened,
        deliver: Deliver,
        tell: Callable[[str], None],
        resume: float = RESUME,
    ):
        self._target, self._opened, self._tell, self._resume = target, opened, tell, resume
        self._hello = Hello(secrets.token_hex(16), os.environ.get(INSTANCE, ""), endpoint)
        self.session = Session(deliver)

    async def run(self) -> None:
        """Keep the session until either side ends it, or until it cannot be continued."""
        lost, delay = time.monotonic(), FIRST_DELAY
        try:
            while not self.session.over:
                try:
                    stream, reply = await self._target.greet(self._hello, self.session.received)
                    if reply.kind != WELCOME or await self._carry(stream, reply.received):
                        return
                    lost, delay = time.monotonic(), FIRST_DELAY
                except NotAdmitted as error:
                    self._tell(f"the server refuses the connection: {error}")
                    delay = AFTER_REFUSAL
                except BROKEN:
                    pass
                if self._hello.resume and time.monotonic() - lost >= self._resume:
                    return
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                delay = min(2 * delay, LONGEST_DELAY)
        finally:
            self.session.end()

    async def _carry(self, stream: Stream, received: int) -> bool:
        """Carry the session's frames over a stream; return whether the session is over."""
        if not self._hello.resume:
            self._hello = replace(self._hello, resume=True)
            await self._opened(stream)
        return await self.session.carry(stream, received)


async def probe(target: Target, instance: str) -> None:
    """Ask whether an instance would be admitted; raise `NotAdmitted` with the reason if not."""
    stream, _ = await target.greet(Hello(secrets.token_hex(16), instance, probe=True))
    with suppress(*BROKEN):
        await stream.end()
