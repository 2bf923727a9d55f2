"""Records on a byte stream: all that two processes of a fleet send each other."""

import asyncio
import json
import socket
import ssl
import struct
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

HELLO, WELCOME, REFUSED, UNKNOWN, FRAME, ACKNOWLEDGE, PING, PONG, BYE = range(1, 10)
HEADER = struct.Struct(">BIQ")
"""A record's kind, the length of its payload, and the number of frames that its sender has received."""
MOST_FRAME, MOST_TEXT = 2**22, 2**12
"""The longest frame, and the longest greeting or reason, in bytes; NVFlare cuts messages into frames of 1 MiB."""
LONGEST = {HELLO: MOST_TEXT, REFUSED: MOST_TEXT, FRAME: MOST_FRAME}
"""The longest payload by kind; other kinds have none."""
BUFFER = 2**21
SHORT = 2**14 - HEADER.size
"""Bytes of a payload that fits into one record of TLS together with its header."""


class BadRecord(Exception):  # noqa: N818
    """Bytes that are no record, or a record that does not fit here."""


BROKEN = (OSError, EOFError, BadRecord, TimeoutError)
"""What ends a stream: `ssl.SSLError` is an OSError, an incomplete read an EOFError."""


@dataclass(frozen=True)
class Record:
    """One record."""

    kind: int
    received: int
    payload: bytes


@dataclass(frozen=True)
class Hello:
    """The first record of whoever connects.

    `session` names the session to open or, with `resume`, to continue; `instance` names the copy of a kit;
    `endpoint` is the engine's name of the process. A `probe` asks whether a session would be opened.
    """

    session: str
    instance: str = ""
    endpoint: str = ""
    resume: bool = False
    probe: bool = False

    def encode(self) -> bytes:
        """The record's payload."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(payload: bytes) -> "Hello":
        """Read a payload, and check the types of all fields."""
        try:
            content: dict[str, Any] = json.loads(payload)
            hello = Hello(**content)
        except (ValueError, TypeError, RecursionError) as error:
            raise BadRecord("expected a greeting") from error
        texts, flags = (hello.session, hello.instance, hello.endpoint), (hello.resume, hello.probe)
        if not (all(isinstance(x, str) for x in texts) and all(isinstance(x, bool) for x in flags) and hello.session):
            raise BadRecord("expected a greeting with a session")
        return hello


class Stream:
    """Reads and writes records; used in the event loop's thread only."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    async def read(self) -> Record:
        """The next record."""
        kind, length, received = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        if not HELLO <= kind <= BYE or length > LONGEST.get(kind, 0):
            raise BadRecord(f"a record of kind {kind} with {length} bytes")
        return Record(kind, received, await self._reader.readexactly(length) if length else b"")

    def write(self, kind: int, received: int = 0, payload: bytes | bytearray | memoryview = b"") -> None:
        """Send a record, as soon as the network takes it."""
        header = HEADER.pack(kind, len(payload), received)
        if len(payload) <= SHORT:
            self._writer.write(header + payload)
        else:
            self._writer.writelines((header, payload))

    @property
    def unsent(self) -> int:
        """The number of bytes that the network has not taken yet."""
        return self._writer.transport.get_write_buffer_size()

    def abort(self) -> None:
        """Close the stream without waiting; what was not sent is lost."""
        self._writer.transport.abort()

    async def end(self, seconds: float = 2.0) -> None:
        """Send what was written, and close the stream."""
        with suppress(*BROKEN):
            async with asyncio.timeout(seconds):
                self._writer.close()
                await self._writer.wait_closed()
        self.abort()

    @property
    def common_name(self) -> str:
        """The common name in the peer's certificate; empty without TLS."""
        certificate = self._writer.get_extra_info("peercert") or {}
        names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
        return names[0] if names else ""

    @property
    def addresses(self) -> tuple[str, str]:
        """This end's address and the peer's, to be shown."""
        ends = (self._writer.get_extra_info(key) for key in ("sockname", "peername"))
        own, peer = (f"{end[0]}:{end[1]}" if isinstance(end, tuple) else str(end or "local") for end in ends)
        return own, peer


async def accepted(connection: socket.socket, context: ssl.SSLContext | None) -> Stream:
    """The stream of an accepted connection, after TLS's hand-shake if there is a context."""
    if connection.family != socket.AF_UNIX:  # asyncio does so for sockets that it accepted itself
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    reader = asyncio.StreamReader(limit=BUFFER)
    protocol = asyncio.StreamReaderProtocol(reader)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=context)
    return Stream(reader, asyncio.StreamWriter(transport, protocol, reader, loop))


def client_context(authority: str, certificate: str, key: str) -> ssl.SSLContext:
    """TLS for whoever connects: the server must have the fleet's authority and the right host name."""
    context = ssl.create_default_context(cafile=authority)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(certificate, key)
    return context


def server_context(authority: str, certificate: str, key: str) -> ssl.SSLContext:
    """TLS for the server: whoever connects must have a certificate of the fleet's authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version, context.verify_mode = ssl.TLSVersion.TLSv1_3, ssl.CERT_REQUIRED
    context.num_tickets = 0
    context.load_verify_locations(authority)
    context.load_cert_chain(certificate, key)
    return context
