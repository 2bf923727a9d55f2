"""A TCP proxy on the loopback device that resets, cuts, delays and reorders connections at random, by a seed."""

import asyncio
import random
import socket
import struct
import threading
from collections import Counter
from contextlib import suppress

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with which closing a socket resets its connection."""


class FaultyProxy:
    """Relays connections from `port` to another port of this machine, while the `with` block runs.

    The n-th connection has faults of its own: it may be held back while later ones overtake it, chunks are delayed,
    and after some of its bytes (at most `most_bytes`) it is reset, or cut within a chunk. `faults` counts them.
    """

    def __init__(self, port: int, target: int, seed: int, most_bytes: int = 200_000, longest_delay: float = 0.3):
        self.port, self._target, self._seed = port, target, seed
        self._most_bytes, self._longest_delay = most_bytes, longest_delay
        self.faults: Counter[str] = Counter()
        self.harmless = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        asyncio.run_coroutine_threadsafe(asyncio.start_server(self._relay, "127.0.0.1", self.port), self._loop).result()
        return self

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self._cancel(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _cancel(self):
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _relay(self, reader, writer):
        """Relay one connection until its fault."""
        self.faults["connections"] += 1
        chance = random.Random(f"{self._seed} {self.faults['connections']}")
        if chance.random() < 0.3:
            self.faults["reordered"] += 1
            await asyncio.sleep(chance.uniform(0, self._longest_delay))
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        ends = (writer, back)
        left = [chance.randrange(self._most_bytes)]
        cut = chance.random() < 0.5
        ways = (
            self._copy(reader, back, left, cut, random.Random(chance.random())),
            self._copy(there, writer, left, cut, random.Random(chance.random())),
        )
        tasks = [asyncio.ensure_future(way) for way in ways]
        done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            task.cancel()
        reset = any(task.result() == "reset" for task in done)
        for end in ends:
            with suppress(OSError):
                if reset:
                    end.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            end.transport.abort() if reset else end.close()

    async def _copy(self, reader, writer, left, cut, chance):
        """Copy one direction; return what ended it. `left` holds the bytes of both directions before the fault."""
        with suppress(OSError):
            while chunk := await reader.read(2**16):
                if self.harmless:
                    left[0] += len(chunk)
                elif chance.random() < 0.02:
                    self.faults["delayed"] += 1
                    await asyncio.sleep(chance.uniform(0, self._longest_delay))
                left[0] -= len(chunk)
                if left[0] < 0:
                    if cut:
                        writer.write(chunk[: chance.randrange(len(chunk))])
                        await writer.drain()
                    self.faults["cut" if cut else "reset"] += 1
                    return "cut" if cut else "reset"
                writer.write(chunk)
                await writer.drain()
        return "ended"
