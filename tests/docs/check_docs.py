"""Check that README, CONTRIBUTING, CHANGELOG, the pages of docs/ and the help texts name only things that exist.

`make docs-check` runs it. It reads links and anchors, images, `perfedrl` commands (by the real parser, without running
them), make targets, files and Python names. Every command in a fenced block is also run by a test or listed in COMMANDS
with the reason why it is not.
"""

import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "perfedrl"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
TUTORIALS = ROOT / "docs" / "tutorials"
CHANGELOG = ROOT / "CHANGELOG.md"

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
SPAN = re.compile(r"`([^`\n]+)`")
PROGRAM = re.compile(r"^(?:\$ )?(?:\S*/)?perfedrl +(?=[a-z-])")
MAKE = re.compile(r"(?:^|`)(?:CI=true )?make ([a-z][a-z-]*)", re.MULTILINE)
FILE = re.compile(r"(?<![\w./*-])((?:[\w.-]+/)*[\w-]+\.(?:py|md|toml))(?![\w/])")
FOLDER = re.compile(r"^(?:src|tests|docs|configs|benchmarks|results)(?:/[\w.-]+)*/?$")
DOTTED = re.compile(r"^(?:perfedrl|pf)(?:\.\w+)+")
EXAMPLES = re.compile(r"Examples?: (.+)", re.DOTALL)

USERS_OWN = {
    "agent.toml",
    "large.toml",
    "my_plan.toml",
    "my_module.py",
    "my_package.py",
    "machines.py",
    "boats.py",
    "thermostat.py",
    "halfway.py",
    "mine.py",
}
"""Files that a reader makes while following a page."""

TRAINS = "too long: it trains"
NETWORK = "too long: processes of a fleet; tests/federation/engine runs the same commands on a small fleet"
COMMANDS = {
    "check *": "test_short_commands_of_the_pages_run",
    "compare configs/compare/gridworld.toml": TRAINS,
    "compare configs/compare/[*].toml --results results/compare --saved --figures *": "too long: draws every figure",
    "compare halves.toml": "test_an_algorithm_of_ones_own_runs_from_python_and_from_a_config",
    "diagnose *": TRAINS,
    "estimators*": TRAINS,
    "evaluate runs/*": "too long: the run must be trained first",
    "federation *": NETWORK,
    "federation renew *": "test_the_command_says_what_to_copy",
    "federation request *": "test_requests_of_unknown_revoked_and_signed_agents",
    "federation sign *": "test_requests_of_unknown_revoked_and_signed_agents",
    "inspect configs/arc.toml": "test_short_commands_of_the_pages_run",
    "list *": "test_short_commands_of_the_pages_run",
    "personalize runs/*": "too long: the run must be trained first",
    "reproduce *": TRAINS,
    "reproduce mechanisms --runs results/mechanisms --saved": "test_short_commands_of_the_pages_run",
    "theory configs/*": "test_commands_of_the_theory_page_are_as_the_program_takes_them",
    "theory witness": "test_short_commands_of_the_pages_run",
    "train *": TRAINS,
}
"""Commands of fenced blocks (patterns) -> the test that runs them, or why none does."""


class Line(NamedTuple):
    """A `perfedrl` command of a page: its words after the program's name, and whether it is meant to be complete."""

    words: tuple[str, ...]
    complete: bool

    @property
    def text(self) -> str:
        return " ".join(self.words)


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """The fenced blocks of a page: language and content."""
    yield from FENCE.findall(text)


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return FENCE.sub("", text)


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def broken_links(page: Path) -> Iterator[str]:
    """Relative links and images that lead nowhere, and anchors that no heading has."""
    for target in LINK.findall(prose(page.read_text())):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists():
            yield f"links to {target}, which does not exist"
        elif anchor and anchor not in {slug(heading) for heading in HEADING.findall(prose(there.read_text()))}:
            yield f"links to {target}, which has no such heading"


def command_lines(text: str) -> Iterator[Line]:
    """The `perfedrl` commands of a page: lines of fenced shell blocks, and code spans, which may be incomplete."""
    for language, content in blocks(text):
        if language not in ("", "sh", "console", "ini"):
            continue
        for line in content.replace("\\\n", " ").splitlines():
            if found := PROGRAM.match(line.strip().removeprefix("ExecStart=")):
                rest = line.strip().removeprefix("ExecStart=")[found.end() :]
                yield Line(tuple(shlex.split(rest, comments=True)), language != "ini")
    for span in SPAN.findall(prose(text)):
        if (found := PROGRAM.match(span)) and "|" not in span:
            yield Line(tuple(shlex.split(span[found.end() :])), False)


@cache
def program():
    """The parser of the real command line."""
    from typer.main import get_command

    from perfedrl.cli import application

    return get_command(application())


def misspoken(line: Line) -> str | None:
    """Say why the command line would refuse a command, without running it."""
    from perfedrl.studies import GROUPS, STUDIES

    command, words, path = program(), [word for word in line.words if word != "--help"], ["perfedrl"]
    while hasattr(command, "commands"):
        if not words or words[0] not in command.commands:
            return f"{' '.join(path)} has no command {words[0] if words else ''}"
        path.append(words[0])
        command, words = command.commands[words[0]], words[1:]
    try:
        given = command.make_context(" ".join(path), list(words)).params
    except Exception as refusal:  # the parser's
        reason = str(getattr(refusal, "format_message", refusal.__str__)())
        incomplete = type(refusal).__name__ == "MissingParameter" or "requires an argument" in reason
        return None if incomplete and not line.complete else reason
    studies = given["studies"] if path[-1] == "reproduce" else []
    unknown = [name for name in studies if name not in {*STUDIES, *GROUPS}]
    missing = [word for word in words if word.startswith("configs/") and not list(ROOT.glob(word))]
    return f"{(unknown + missing)[0]} does not exist" if unknown + missing else None


def bad_commands(text: str) -> Iterator[str]:
    """Commands that the real parser refuses."""
    for line in command_lines(text):
        if reason := misspoken(line):
            yield f"says `perfedrl {line.text}`, but {reason}"


def untested_commands(text: str) -> Iterator[str]:
    """Complete commands that neither a test runs nor COMMANDS excuses."""
    for line in command_lines(text):
        known = misspoken(line) or any(fnmatch(line.text, pattern) for pattern in COMMANDS)
        if line.complete and not known:
            yield f"says `perfedrl {line.text}`, which no test runs: add it to COMMANDS in tests/docs/check_docs.py"


def missing_targets(text: str) -> Iterator[str]:
    """Targets of make that the Makefile does not have."""
    makefile = (ROOT / "Makefile").read_text()
    code = "\n".join([*(content for language, content in blocks(text) if language in ("", "sh")), text])
    for target in sorted(set(MAKE.findall(code))):
        if not re.search(rf"^{target}:", makefile, re.MULTILINE):
            yield f"names `make {target}`, which the Makefile does not have"


@cache
def own_files() -> frozenset[str]:
    """All ends of the paths of the project's own files: `a/b/c.py`, `b/c.py`, `c.py`."""
    folders = [ROOT / name for name in ("src", "tests", "docs", "configs", "benchmarks", "results")]
    paths = [path for folder in folders for path in folder.rglob("*.*") if path.suffix in (".py", ".md", ".toml")]
    whole = [path.relative_to(ROOT).parts for path in [*paths, *ROOT.glob("*.md"), ROOT / "pyproject.toml"]]
    return frozenset("/".join(parts[i:]) for parts in whole for i in range(len(parts)))


def missing_files(text: str) -> Iterator[str]:
    """Files and folders of the project that a page names and that are not there."""
    for name in sorted(set(FILE.findall(LINK.sub("", prose(text))))):
        if name not in own_files() and Path(name).name not in USERS_OWN:
            yield f"names the file {name}, which does not exist"
    for span in SPAN.findall(prose(text)):
        if FOLDER.match(span) and not (ROOT / span).exists():
            yield f"names {span}, which does not exist"


def resolve(dotted: str) -> object:
    """Import what a dotted name stands for."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:cut]))
            break
        except ModuleNotFoundError:
            continue
    for name in parts[cut:]:
        thing = getattr(thing, name)
    return thing


def missing_names(text: str) -> Iterator[str]:
    """Dotted Python names of the package that cannot be imported."""
    for span in SPAN.findall(prose(text)):
        if (found := DOTTED.match(span)) and not found[0].endswith((".toml", ".py")):
            try:
                resolve(re.sub(r"^pf\b", "perfedrl", found[0]))
            except AttributeError:
                yield f"names {found[0]}, which does not exist"


def problems(page: Path) -> list[str]:
    """All that is wrong with a page; of the changelog, whose old names are history, only links are read."""
    text = page.read_text()
    found = list(broken_links(page))
    if page == CHANGELOG:
        return found
    if page.parent != TUTORIALS:  # tests run every block of these
        found += untested_commands(text)
        found += missing_files(text)
    return [*found, *bad_commands(text), *missing_targets(text), *missing_names(text)]


def help_problems() -> list[str]:
    """Examples in help texts that the command line refuses, or that name configs that are not there."""
    found, waiting = [], [program()]
    while waiting:
        command = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        if examples := EXAMPLES.search(command.help or ""):
            for example in " ".join(examples[1].split()).split(";"):
                words = tuple(shlex.split(example))
                if reason := misspoken(Line(words[1:], True)) if words[0] == "perfedrl" else f"no command in {example}":
                    found.append(f"`{command.name} --help` says `{example.strip()}`, but {reason}")
    return found


def main() -> int:
    """Print every problem; the exit code says whether there is one."""
    found = [f"{page.relative_to(ROOT)} {problem}" for page in PAGES for problem in problems(page)] + help_problems()
    print("\n".join(found) or f"{len(PAGES)} pages and all help texts are as they say")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
