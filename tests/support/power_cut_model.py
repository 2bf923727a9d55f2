"""A server and two agents on disks that lose what is not synced, through all interleavings of steps and faults.

The real code runs: the operator's `prepare`, the server's coordinator with its state machine and its run's folder, the
agents' request handlers and answer stores, and everything that writes their files. Only local training, the network and
the clock are replaced (`little_fleet`).

`Exploration` goes from world to world. A world is what is on three disks, the job that runs, and what is under way. At
every system call of the server its power may go, or its process alone; at every system call of an agent its power may
go, also right after it has sent its answer, which may be lost; a question may be delayed, for ever or to any later
moment. Each of these is one fault, and a world has a number of faults that may still happen. After a power cut the
server's newest checkpoint may also turn out to be damaged, a number of times. Worlds that are alike are visited once.

In every world the run must be able to go on: without further faults each question is answered, the next one follows,
and the job reaches its end. No agent may compute an answer again that it has sent. Every checkpoint, and the result,
must have the bits of the undisturbed run, in which every upload is counted once. The log and the status, which a
restart does not read, and lock files are always lost.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from crashing_disk import Disk
from little_fleet import AGENT, NAMES, OPERATOR, SUPERVISOR, UncertifiedFleet, simulated_surroundings, start_job
from safetensors import SafetensorError
from safetensors.numpy import load
from system_calls import SystemCall, intercepted

from perfedrl.errors import UserError
from perfedrl.federation.agent import request_handler
from perfedrl.federation.agent.answer_store import AnswerStore
from perfedrl.federation.frames import decode, digest, encode
from perfedrl.federation.server.answers import Answers
from perfedrl.federation.server.run_folder import CHECKPOINT, EARLIER, EVENTS, LOCK, PROGRESS

LOST = (PROGRESS, EVENTS, LOCK)


class Violation(AssertionError):  # noqa: N818
    """Something happened that must not."""


class AtQuestion(BaseException):
    """The job asks a question that has no answers yet."""


@dataclass(frozen=True)
class Asked:
    """A question: its kind, its frame, and the agents that are not asked."""

    kind: str
    frame: bytes
    without: frozenset[str]

    @property
    def agents(self) -> list[int]:
        """The indices of the agents that are asked."""
        return [i for i, name in enumerate(NAMES) if name not in self.without]

    def key(self) -> Any:
        """What tells questions apart."""
        frame = decode(self.frame)
        return self.kind, tuple(sorted(frame.fields.items())), digest(frame.tensors), self.without


@dataclass(frozen=True)
class Step:
    """What one process did until it waited or ended: the disks between its system calls, and how it stopped.

    `error` is the job's; `question` is None at its end. `reply` is an agent's, which is sent when the disk is
    `disks[sent]`, and `computed` the round and the digest of the message for which it trained.
    """

    disks: tuple[Disk, ...]
    question: Asked | None = None
    error: str = ""
    reply: bytes = b""
    sent: int = -1
    computed: tuple[tuple[int, str], ...] = ()

    @property
    def disk(self) -> Disk:
        """The disk at the end."""
        return self.disks[-1]


@dataclass(frozen=True)
class RunningJob:
    """A job: the disk on which it began, who started it, and the answers to its questions so far."""

    began: Disk
    by: str
    answers: tuple[tuple[tuple[str, bytes], ...], ...] = ()
    failed: tuple[frozenset[str], ...] = ()
    question: Asked | None = None

    def key(self) -> Any:
        """What tells jobs apart whose disks are alike: the question, and the agents that failed at the last one."""
        assert self.question is not None
        return self.question.key(), self.failed[-1:]


@dataclass(frozen=True)
class World:
    """The disks of the server and of the agents, the job that runs, if one does, and what may still happen.

    `late` holds a question for each agent that may still reach it; `sent` the answers (agent, run, round, digest of the
    message) that have left an agent.
    """

    server: Disk
    agents: tuple[Disk, ...]
    job: RunningJob | None
    next_by: str
    late: tuple[bytes | None, ...]
    sent: frozenset[tuple[int, str, int, str]]
    faults: int
    damages: int
    path: tuple[str, ...] = ()

    def key(self) -> Any:
        """A value that is equal for worlds that are alike; the faults that may still happen are left out."""
        disks = self.server.key, tuple(disk.key for disk in self.agents)
        job = None if self.job is None else self.job.key()
        late = tuple(None if x is None else Asked("", x, frozenset()).key() for x in self.late)
        return disks, job, self.next_by, late, self.sent

    def then(self, what: str, **changes: Any) -> "World":
        """The next world, and what led there."""
        return replace(self, path=(*self.path, what), **changes)


@dataclass
class Exploration:
    """All worlds that can be reached with a number of faults; `after_sending` runs when an agent has sent an answer."""

    folder: Path
    faults: int
    damages: int = 1
    after_sending: Callable[[], None] = lambda: None
    worlds: int = 0
    finished: int = 0
    _best: dict[Any, list[tuple[int, int]]] = field(default_factory=dict)
    _steps: dict[Any, Step] = field(default_factory=dict)
    _reference: set[Any] = field(default_factory=set)
    _result: Any = None

    def run(self) -> None:
        """Visit all worlds; raise `Violation` with the path to the first one in which something is wrong."""
        nothing = Disk()
        first = World(nothing, (nothing, nothing), None, OPERATOR, (None, None), frozenset(), 0, 0)
        with simulated_surroundings():
            self._visit_all(first)  # without faults, which is the reference
            self._best.clear()
            self.worlds = self.finished = 0
            self._visit_all(replace(first, faults=self.faults, damages=self.damages))

    def _visit_all(self, first: World) -> None:
        ahead = [first]
        while ahead:
            world = ahead.pop()
            if self._is_new(world):
                self.worlds += 1
                try:
                    ahead += self._following(world)
                except Violation as error:
                    raise Violation("\n".join((str(error), "after:", *world.path))) from None

    def _is_new(self, world: World) -> bool:
        """Whether no world that is alike was visited with as many faults ahead."""
        known = self._best.setdefault(world.key(), [])
        if any(faults >= world.faults and damages >= world.damages for faults, damages in known):
            return False
        known.append((world.faults, world.damages))
        return True

    def _following(self, world: World) -> Iterator[World]:
        """All worlds that may follow a world."""
        for i, frame in enumerate(world.late):
            if frame is not None:
                for after, _ in self._asked(world, i, frame, "late question"):
                    yield replace(after, late=without(after.late, i))
        if world.job is None:
            yield from self._damaged(world)
            yield from self._started(world)
        else:
            yield from self._answered(world)

    # --- the server

    def _damaged(self, world: World) -> Iterator[World]:
        """The newest checkpoint is damaged, where the one before it is another file; at a power cut only."""
        files = world.server.files
        newest = next((path for path in files if path.endswith(f"/{CHECKPOINT}")), None)
        if newest is None or not world.damages or world.next_by != OPERATOR:
            return
        earlier = newest.replace(CHECKPOINT, EARLIER)
        number, content = world.server.number(newest), files[newest]
        if earlier in files and world.server.number(earlier) != number:
            changed = {**world.server.content, number: content[: len(content) // 2]}
            damaged = replace(world.server, content=changed, safe_content=changed)
            yield world.then("the newest checkpoint is damaged", server=damaged, damages=world.damages - 1)

    def _started(self, world: World) -> Iterator[World]:
        """The next job begins, and goes on to its first question."""
        job = RunningJob(world.server, world.next_by)
        yield from self._advanced(world, job, f"a job begins by the {world.next_by}", any_fault=False)

    def _advanced(self, world: World, job: RunningJob, what: str, any_fault: bool) -> Iterator[World]:
        """The job goes on to its next question or its end; or the power goes, or its process ends, on the way."""
        step = self._job_step(job)
        if world.faults:
            # Before its first question what is killed is the operator's command, if that started the job.
            by = SUPERVISOR if job.answers else job.by
            yield from self._cut(world, step.disks, what, by)
        if step.error:
            if not any_fault:
                raise Violation(f"wedged: {what}, and the job fails: {step.error}")
            yield world.then(f"{what}; it fails: {step.error}", server=step.disk, job=None, next_by=OPERATOR)
        elif step.question is None:
            self._check_result(step.disk)
            self.finished += 1
            if world.faults:
                for disk in distinct(step.disk.after_power_cut()):
                    after = world.then(f"{what} and ends; power cut", server=disk, job=None, next_by=OPERATOR)
                    yield replace(after, faults=world.faults - 1)
        else:
            last = world.job.question if world.job is not None else None
            if not any_fault and last is not None and progress(step.question) == progress(last):
                raise Violation(f"wedged: all agents answered {last.kind!r}, and it is asked again")
            asking = f"{what} to {step.question.kind!r}"
            yield world.then(asking, server=step.disk, job=replace(job, question=step.question))

    def _cut(self, world: World, disks: tuple[Disk, ...], what: str, by: str = SUPERVISOR) -> Iterator[World]:
        """All worlds after the server's power, or its process, has gone at one of its system calls."""
        fewer = replace(world, job=None, faults=world.faults - 1)
        for disk in distinct(power_cuts(disks)):
            yield fewer.then(f"{what}; power cut of the server", server=disk, next_by=OPERATOR)
        for disk in distinct(disks):
            yield fewer.then(f"{what}; the server's process is killed", server=disk, next_by=by)

    def _job_step(self, job: RunningJob) -> Step:
        """Run a job from its beginning with the answers so far; return what it does after the last of them."""
        key = job.began.key, job.by, job.answers, job.failed
        if key not in self._steps:
            self._steps[key] = step = self._run_job(job)
            self._check_checkpoints(step.disks)
        return self._steps[key]

    def _run_job(self, job: RunningJob) -> Step:
        place, disks, answers = self.folder / "server", [job.began], list(zip(job.answers, job.failed, strict=True))
        job.began.put_into(place)
        asked: list[Asked] = []

        def ask(kind, frame, without, enough, deadline):
            asked.append(Asked(kind, frame, frozenset(without)))
            if len(asked) > len(answers):
                raise AtQuestion
            frames, failed = answers[len(asked) - 1]
            del disks[:-1]
            found = Answers(tuple(name for name in NAMES if name not in without), dict(frames))
            found.failures |= dict.fromkeys(sorted(failed), "the agent is gone")
            enough(found)
            return found

        error, question = "", None
        with intercepted(place, recorder(disks)):
            try:
                start_job(UncertifiedFleet(place), job.by, ask)
            except AtQuestion:
                question = asked[-1]
            except UserError as problem:
                error = str(problem)
        check_faithful(disks[-1], place)
        return Step(tuple(disks), question, error)

    # --- the agents

    def _answered(self, world: World) -> Iterator[World]:
        """Each agent that is asked answers, or does not; then the server goes on. Or its power goes meanwhile."""
        assert world.job is not None
        question = world.job.question
        assert question is not None
        if world.faults:
            late = tuple(question.frame if i in question.agents else x for i, x in enumerate(world.late))
            yield from self._cut(replace(world, late=late), (world.server,), f"{question.kind!r} is under way")
        for after, replies in self._all_asked(world, question.agents, question.frame, {}):
            frames = tuple((NAMES[i], reply) for i, reply in sorted(replies.items()) if reply)
            failed = frozenset(NAMES[i] for i, reply in replies.items() if reply == b"")
            job = replace(
                world.job, answers=(*world.job.answers, frames), failed=(*world.job.failed, failed), question=None
            )
            fine = len(frames) == len(question.agents)
            yield from self._advanced(after, job, f"{question.kind!r} is answered by {len(frames)}", not fine)

    def _all_asked(self, world: World, agents: list[int], frame: bytes, replies: dict[int, Any]) -> Iterator[Any]:
        """Ask some agents; give each world after that, with the replies: None of silent, b"" of failed agents."""
        if not agents:
            yield world, replies
            return
        i, rest = agents[0], agents[1:]
        if world.faults:
            late = tuple(frame if j == i else x for j, x in enumerate(world.late))
            delayed = world.then(f"a question to agent {i} is delayed", late=late, faults=world.faults - 1)
            yield from self._all_asked(delayed, rest, frame, {**replies, i: None})
        for after, reply in self._asked(world, i, frame, "question"):
            yield from self._all_asked(after, rest, frame, {**replies, i: reply})

    def _asked(self, world: World, i: int, frame: bytes, what: str) -> Iterator[tuple[World, bytes]]:
        """Ask one agent: it answers; or its power goes on the way, or when the answer is sent, which may be lost."""
        step, asked = self._agent_step(i, world.agents[i], frame), decode(frame)
        run, sent = asked.fields["run"], world.sent
        for round_, message in step.computed:
            if (i, run, round_, message) in sent:
                raise Violation(f"doubled: agent {i} computes its answer of round {round_} again, which it has sent")
        if decode(step.reply).kind == "upload":
            sent |= {(i, run, int(asked.fields["round"]), digest(asked.tensors, asked.fields["plan"]))}

        def with_disk(disk: Disk) -> tuple[Disk, ...]:
            return tuple(disk if j == i else x for j, x in enumerate(world.agents))

        name = f"{what} {asked.kind!r} of round {asked.fields['round']} to agent {i}"
        if (reply := decode(step.reply)).kind == "error":
            name += f", which says: {reply.fields['message']}"
        yield world.then(name, agents=with_disk(step.disk), sent=sent), step.reply
        if not world.faults:
            return
        fewer = replace(world, faults=world.faults - 1)
        for disk in distinct(power_cuts(step.disks[: step.sent])):
            yield fewer.then(f"{name}; power cut before it answers", agents=with_disk(disk)), b""
        for disk in distinct(power_cuts(step.disks[step.sent :])):
            yield fewer.then(f"{name}; power cut, answer lost", agents=with_disk(disk), sent=sent), b""
            yield fewer.then(f"{name}; power cut after it", agents=with_disk(disk), sent=sent), step.reply

    def _agent_step(self, i: int, disk: Disk, frame: bytes) -> Step:
        key = i, disk.key, frame
        if key not in self._steps:
            self._steps[key] = self._run_agent(i, disk, frame)
        return self._steps[key]

    def _run_agent(self, i: int, disk: Disk, frame: bytes) -> Step:
        """Start an agent, and let it answer one question: between questions it keeps nothing but its files."""
        place, disks, computed = self.folder / f"agent-{i}", [disk], []
        disk.put_into(place)
        real = AnswerStore.answer

        def answer(store, run, generation, round_, message, start, compute, *rest):
            def counted(state):
                computed.append((round_, message))
                return compute(state)

            return real(store, run, generation, round_, message, start, counted, *rest)

        with intercepted(place, recorder(disks)), mock.patch.object(AnswerStore, "answer", answer):
            try:
                agent = request_handler.Agent(AGENT, i, place / "agent")
            except UserError as error:
                raise Violation(f"wedged: agent {i} does not start: {error}") from error
            reply = encode(agent.answer(decode(frame)))
            sent = len(disks) - 1
            self.after_sending()
        check_faithful(disks[-1], place)
        return Step(tuple(disks), reply=reply, sent=sent, computed=tuple(computed))

    # --- what must hold

    def _check_checkpoints(self, disks: tuple[Disk, ...]) -> None:
        """Check that every checkpoint, at any time, is one of the undisturbed run, or the one that was damaged."""
        found = {
            content
            for disk in disks
            for path, content in disk.files.items()
            if path.endswith((f"/{CHECKPOINT}", f"/{EARLIER}")) and content is not None
        }
        states = {state for content in found if (state := saved_state(content)) is not None}
        if self._result is None:
            self._reference |= states
        elif not states <= self._reference:
            raise Violation("lost or doubled: a checkpoint is no state of the undisturbed run")

    def _check_result(self, disk: Disk) -> None:
        files = {path: content for path, content in disk.files.items() if path.startswith("runs/")}
        result = {path: content for path, content in files.items() if path.endswith((".npz", ".safetensors"))}
        if self._result is None:
            self._result = result
        elif result != self._result:
            raise Violation("lost or doubled: the result is not that of the undisturbed run")


@cache
def saved_state(content: bytes) -> frozenset[tuple[str, bytes]] | None:
    """The tensors in a checkpoint; None if it is damaged."""
    try:
        return frozenset((name, x.tobytes()) for name, x in load(content).items())
    except SafetensorError:
        return None


def recorder(disks: list[Disk]) -> Callable[[SystemCall, Callable[..., Any]], Any]:
    """Carry out every call, and append the disk after it."""

    def perform(call: SystemCall, carry_out: Callable[..., Any]) -> Any:
        result = carry_out()
        if not any(is_lost(path) for path in (call.path, call.target)):
            assert call.kind != "write" or result == len(call.data), "a short write"
            disks.append(disks[-1].after(call))
        return result

    return perform


def is_lost(path: str) -> bool:
    """Whether a path is of the log, the status or a lock, or of the status's temporary file."""
    name = Path(path).name
    return name in LOST or name.startswith(f".{PROGRESS}.")


def check_faithful(disk: Disk, folder: Path) -> None:
    """Check that the disk is what is really in a folder: no write went another way."""
    real = {path for path in folder.rglob("*") if not is_lost(str(path))}
    found = {str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes() for path in real}
    assert found == disk.files, "something was written that the disk knows nothing of"


def power_cuts(disks: tuple[Disk, ...]) -> Iterator[Disk]:
    """What a power cut may leave of some disks."""
    for disk in disks:
        yield from disk.after_power_cut()


def distinct(disks: Any) -> Iterator[Disk]:
    """Disks without those that are like an earlier one."""
    known = set()
    for disk in disks:
        key = disk.key
        if key not in known:
            known.add(key)
            yield disk


def without(late: tuple[bytes | None, ...], i: int) -> tuple[bytes | None, ...]:
    """The late questions without that of an agent."""
    return tuple(None if j == i else x for j, x in enumerate(late))


def progress(question: Asked) -> Any:
    """The kind and the round of a question, and who has answered it."""
    return question.kind, decode(question.frame).fields["round"], question.without


def violated(folder: Path, faults: int, **options: Any) -> str:
    """The violation that an exploration finds; empty if there is none."""
    try:
        Exploration(folder, faults, **options).run()
    except Violation as error:
        return str(error)
    return ""
