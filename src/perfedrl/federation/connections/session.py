"""A session: frames in both directions, each delivered once and in order, over one stream after another."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice

from perfedrl.federation.connections.streams import (
    ACKNOWLEDGE,
    BROKEN,
    BYE,
    FRAME,
    PING,
    PONG,
    BadRecord,
    Record,
    Stream,
)

Payload = bytes | bytearray | memoryview
Deliver = Callable[[bytes], float]
"""Takes a frame; returns the seconds to wait before the next one is read, which holds back the peer and nobody else."""

PING_EVERY = 2.0
"""Seconds between two signs of life."""
SILENCE = 10.0
"""Seconds without a sign of life after which a stream counts as broken."""
MOST_WAITING = 2**26
"""Bytes that may wait for their acknowledgement; NVFlare has a window of 16 MiB for one message."""
MOST_UNREAD = 2 * MOST_WAITING
"""Bytes that may wait for a peer that reads nothing, signs of life included, before its stream is given up."""
PAUSE_AFTER_SIGN = 1 / 300
"""Seconds before the next record is read after one without a frame: a peer may send those for nothing."""
UNREPORTED_FRAMES, UNREPORTED_BYTES = 64, 2**20
"""Frames, and bytes, after which their arrival is acknowledged by a record of its own."""


class SessionOver(Exception):  # noqa: N818
    """The session has ended, or its peer takes no more frames."""


class Session:
    """Both ends have one. It keeps every frame until the peer has acknowledged it, and sends it again on a new stream.

    Made and used in the event loop's thread, but for `send` and `close`, which any thread may call.
    """

    def __init__(self, deliver: Deliver):
        self.over, self.heard, self.received = False, time.monotonic(), 0
        self._deliver, self._loop = deliver, asyncio.get_running_loop()
        self._outbox: deque[Payload] = deque()
        self._acknowledged = self._written = 0
        self._waiting, self._lock = 0, threading.Lock()
        self._stream: Stream | None = None
        self._unreported = [0, 0]

    # --- any thread

    def send(self, frame: Payload) -> None:
        """Send a frame; never waits, since a peer that reads nothing must not hold up the threads of the engine."""
        with self._lock:
            if self.over or self._waiting >= MOST_WAITING:
                raise SessionOver("the session has ended" if self.over else "the peer takes no more frames")
            self._outbox.append(frame)
            self._waiting += len(frame)
        self._soon(self._flush)

    def close(self) -> None:
        """End the session: the peer is told, after all frames."""
        self._soon(self.end)

    def _soon(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed: the process ends
            self._loop.call_soon_threadsafe(call)

    # --- the event loop's thread

    @property
    def attached(self) -> bool:
        """Whether there is a stream."""
        return self._stream is not None

    def end(self) -> None:
        """End the session now."""
        with self._lock:
            self.over = True
        if self._stream is not None:
            self._flush()
            self._stream.write(BYE, self.received)
            self._loop.create_task(self._stream.end())
            self._stream = None

    def ping(self) -> None:
        """Ask the peer for a sign of life, which moves `heard`."""
        if self._stream is not None:
            self._stream.write(PING, self.received)

    def detach(self) -> None:
        """Give up the stream, if there is one; the session waits for another."""
        if self._stream is not None:
            self._stream.abort()
            self._stream = None

    async def carry(self, stream: Stream, peer_received: int) -> bool:
        """Exchange frames over a stream until it ends; return whether the peer ended the session.

        `peer_received` is the number of frames that the peer has from earlier streams.
        """
        self.detach()
        try:
            self._rewind(peer_received)
            self._stream, self.heard = stream, time.monotonic()
            self._flush()
        except BROKEN:
            stream.abort()
            return False
        watch = self._loop.create_task(self._watch(stream))
        try:
            while True:
                record = await stream.read()
                if self._stream is not stream:
                    return False
                if record.kind == BYE:
                    self._stream = None
                    await stream.end()
                    return True
                if pause := self._take(stream, record):
                    await asyncio.sleep(pause)
        except BROKEN:
            return False
        finally:
            watch.cancel()
            stream.abort()
            if self._stream is stream:
                self._stream = None

    def _take(self, stream: Stream, record: Record) -> float:
        """Process one record; return the seconds to wait before the next one."""
        self.heard = time.monotonic()
        self._acknowledge(record.received)
        if record.kind == FRAME:
            self.received += 1
            pause = self._deliver(record.payload)
            self._unreported = [self._unreported[0] + 1, self._unreported[1] + len(record.payload)]
            if self._unreported[0] >= UNREPORTED_FRAMES or self._unreported[1] >= UNREPORTED_BYTES:
                self._write(stream, ACKNOWLEDGE)
            return pause
        if record.kind == PING:
            self._write(stream, PONG)
        elif record.kind not in (PONG, ACKNOWLEDGE):
            raise BadRecord(f"a record of kind {record.kind} within a session")
        if stream.unsent > MOST_UNREAD:
            raise BadRecord("a peer that reads nothing")
        return PAUSE_AFTER_SIGN

    def _write(self, stream: Stream, kind: int, payload: Payload = b"") -> None:
        self._unreported = [0, 0]  # every record says how many frames have arrived
        stream.write(kind, self.received, payload)

    def _flush(self) -> None:
        """Write the frames that are not on the current stream yet."""
        if self._stream is None:
            return
        with self._lock:
            frames = list(islice(self._outbox, self._written - self._acknowledged, None))
        for frame in frames:
            self._write(self._stream, FRAME, frame)
        self._written += len(frames)

    def _rewind(self, count: int) -> None:
        """Begin a new stream at the first frame that the peer does not have."""
        with self._lock:
            self._written = self._acknowledged + len(self._outbox)
        self._acknowledge(count)
        self._written = count

    def _acknowledge(self, count: int) -> None:
        """Forget the frames that have arrived."""
        if not self._acknowledged <= count <= self._written:
            raise BadRecord(f"{count} frames are acknowledged, of {self._acknowledged} to {self._written}")
        if count > self._acknowledged:
            with self._lock:
                for _ in range(count - self._acknowledged):
                    self._waiting -= len(self._outbox.popleft())
                self._acknowledged = count

    async def _watch(self, stream: Stream) -> None:
        """Give signs of life, and abort the stream when the peer gives none."""
        while True:
            await asyncio.sleep(PING_EVERY)
            if time.monotonic() - self.heard > SILENCE:
                stream.abort()
                return
            self._write(stream, PING)
