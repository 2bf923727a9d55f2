"""Contracts are read in one place: no module asks an object for an attribute that its contract does not have.

A call of `hasattr`, or of `getattr` with a literal name, is an undocumented method. Each one that remains is listed
here with its reason, so that a new one is a decision.
"""

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "perfedrl"

FOREIGN = {
    "cli/__init__.py": 1,  # click's exceptions: only those of the parser can format themselves
    "compilation.py": 1,  # the operating system: os.sched_getaffinity is not on macOS
    "gym_environment/recipe.py": 3,  # Gymnasium's environments and the user's factories
}
"""Files that look at objects of other packages, and users' factories -> number of such calls."""


def probes(path: Path) -> list[int]:
    """Lines of a file that call `hasattr`, or `getattr` with a literal name."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            literal = len(node.args) > 1 and isinstance(node.args[1], ast.Constant)
            if node.func.id == "hasattr" or (node.func.id == "getattr" and literal):
                found.append(node.lineno)
    return found


def test_attributes_are_not_probed():
    files = {str(path.relative_to(SOURCE)): probes(path) for path in sorted(SOURCE.rglob("*.py"))}
    unexpected = {name: lines for name, lines in files.items() if len(lines) > FOREIGN.get(name, 0)}
    assert unexpected == {}, "make it a documented member of the contract (algorithms/base.py, envs, policies)"
    stale = {name: count for name, count in FOREIGN.items() if len(files.get(name, [])) < count}
    assert stale == {}, "these probes are gone: lower the numbers in this file"


def test_delegation_is_explicit():
    """`__getattr__` hides what a wrapper does; modules that load lazily have one of their own."""
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                methods = {x.name for x in node.body if isinstance(x, ast.FunctionDef)}
                if "__getattr__" in methods:
                    found.append(f"{path.relative_to(SOURCE)}: {node.name}")
    assert found == []
