"""The code outside the library that a config names, such as an algorithm or an environment of the user's own.

A config counts this code by its content: its digests stand in the config's table `code`, so that a changed file gives
the config another digest, and its run another folder.
"""

import ast
import functools
import hashlib
import importlib.util
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from perfedrl.errors import UserError
from perfedrl.gym_environment.recipe import own_factory, specification

LIBRARIES = ("perfedrl", "gymnasium")
"""Packages whose versions stand in the provenance of a run; their parts are not code of the user's."""

IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:\S+")
IGNORED = ("site-packages", "__pycache__")

Tables = Sequence[Mapping[str, Any]]
"""The tables of a config that name parts."""

_read: dict[str, tuple[Any, str | None]] = {}
"""For each name, the object that it meant when its source was read, and the digest of that source."""


def code_digests(tables: Tables) -> dict[str, str]:
    """The sha256 of the source of each part outside the library that a config's tables name."""
    return {name: digest for name, digest in _named_code(tables).items() if digest is not None}


def without_source(tables: Tables) -> list[str]:
    """The names of parts outside the library whose source is not found."""
    return [name for name, digest in _named_code(tables).items() if digest is None]


def changed_code(tables: Tables, digests: Mapping[str, str]) -> list[str]:
    """The names of parts whose source is not the one of which `digests` were taken."""
    return [name for name, digest in code_digests(tables).items() if digests.get(name, digest) != digest]


def code_names(table: Mapping[str, Any]) -> list[str]:
    """The texts in a config's table that may be names of code, `module:attribute`."""
    return [text for text in _texts(table) if IMPORT_PATH.fullmatch(text)]


def module_folders(tables: Tables) -> dict[str, str]:
    """The folders of the modules outside the library that a config's tables name; installed modules have none."""
    names = {_package(name) for pair in _named_sources(tables).items() for name in pair}
    sources = {name: _source(name) for name in sorted(names - {*LIBRARIES})}
    return {
        name: str(source.folder.resolve())
        for name, source in sources.items()
        if source.files and not _is_installed(source.folder)
    }


def _named_code(tables: Tables) -> dict[str, str | None]:
    """All names of code outside the library in a config's tables, with the digest of their source, if it is found."""
    parts = _parts(tables)
    own = {name: source for name, source in _named_sources(tables).items() if _package(source) not in LIBRARIES}
    digests = {name: _digest_as_loaded(source) for name, source in own.items()}
    return {name: digest for name, digest in digests.items() if digest or name in parts}


def _named_sources(tables: Tables) -> dict[str, str]:
    """All names of code in a config's tables, with what they mean as `module:attribute`.

    The first key of a table names its part; parameters may name code too, and count where that code is found. A
    parameter such as "http://example.org" does not name the standard library's module.
    """
    found = {name: name for name in _parts(tables) if ":" in name}
    texts = (text for text in _texts(tables) if IMPORT_PATH.fullmatch(text))
    found |= {text: text for text in texts if _package(text) not in sys.stdlib_module_names}
    return found | {name: point for name in _gymnasium_ids(tables) if (point := entry_point(name))}


def _parts(tables: Tables) -> list[str]:
    """The names of parts: the first value of each table, and ids of Gymnasium environments."""
    return [*(next(iter(table.values())) for table in tables if table), *_gymnasium_ids(tables)]


def _gymnasium_ids(tables: Tables) -> list[str]:
    """The ids in the table of a Gymnasium fleet."""
    return [name for table in tables if table.get("env") == "gymnasium" for name in _texts(table.get("id"))]


def entry_point(name: str) -> str | None:
    """What a registered Gymnasium id stands for, as `module:name`; None for other names."""
    try:
        creator = None if own_factory(name) is not None else specification(name).entry_point
    except UserError:  # it is reported where the fleet is built
        return None
    if creator is None or isinstance(creator, str):
        return creator
    while isinstance(creator, functools.partial):
        creator = creator.func
    named = creator if inspect.isroutine(creator) or isinstance(creator, type) else type(creator)
    return f"{named.__module__}:{named.__qualname__}"


def _digest_as_loaded(name: str) -> str | None:
    """The digest of the source of `module:attribute`, as it was when this process first asked for it.

    So a file that is edited while a process runs keeps the digest of the code that the process has imported. The file
    is read again once the name means another object, as after a reload of its module.
    """
    module, _, attribute = name.partition(":")
    loaded = vars(sys.modules[module]).get(attribute.partition(".")[0]) if module in sys.modules else None
    if name not in _read or _read[name][0] is not loaded:
        _read[name] = loaded, source_digest(module)
    return _read[name][1]


def source_digest(module: str) -> str | None:
    """The sha256 of the Python files of a module's package and of the modules beside it that it imports.

    None where no source is found, as for a module written in C or typed into a notebook.
    """
    files = dict(_files(module.split(".")[0]))
    if not files:
        return None
    whole = hashlib.sha256()
    for name, content in sorted(files.items()):
        whole.update(f"{name}\0{len(content)}\0".encode() + content)
    return whole.hexdigest()


def _files(package: str) -> Iterator[tuple[str, bytes]]:
    """The files of a package or module, and of those beside it that it imports, by their paths in the same folder."""
    waiting, seen = [package], {package}
    while waiting:
        folder, paths = _source(waiting.pop())
        for path in paths:
            content = path.read_bytes()
            yield path.relative_to(folder).as_posix(), content
            for name in () if _is_installed(folder) else _imports(content):
                if name not in seen and name not in LIBRARIES and _source(name).folder == folder:
                    waiting.append(name)
                seen.add(name)


class Source(NamedTuple):
    """The folder in which a top-level package or module lies, and its Python files; none where they are not found."""

    folder: Path = Path()
    files: Sequence[Path] = ()


def _source(package: str) -> Source:
    """Find the source of a top-level package or module."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.submodule_search_locations:
        root = Path(next(iter(spec.submodule_search_locations)))
        files = (path for path in root.rglob("*.py") if not _is_ignored(path.relative_to(root)))
        return Source(root.parent, sorted(files))
    origin = Path((spec and spec.origin) or "")
    return Source(origin.parent, [origin]) if origin.suffix == ".py" and origin.is_file() else Source()


def _package(name: str) -> str:
    """The top-level package or module of `module:attribute`."""
    return name.partition(":")[0].partition(".")[0]


def _is_ignored(path: Path) -> bool:
    """Whether a path in a package is that of a hidden file, a cache or an environment."""
    return any(part in IGNORED or part.startswith(".") for part in path.parts)


def _is_installed(folder: Path) -> bool:
    """Whether a folder is one of those into which packages are installed, where everything lies side by side."""
    return str(folder) in {*sysconfig.get_paths().values()} or "site-packages" in folder.parts


def _imports(content: bytes) -> Iterator[str]:
    """The top-level names that a file imports."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def _texts(value: Any) -> Iterator[str]:
    """All texts in nested tables and lists."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
