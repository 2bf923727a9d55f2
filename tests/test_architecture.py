"""The shape of the house: imports only point down, files stay small, nothing unpickles."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "perfedrl"
LAYERS = (
    ("errors", "types", "pace"),
    ("memory", "own_modules"),
    ("registry", "compilation", "privacy", "key_domains", "contracts", "saved_policies", "gym_environment"),
    ("envs",),
    ("policies",),
    ("rollout",),
    ("exact",),
    ("estimators",),
    ("algorithms",),
    ("simulation",),
    ("theory",),
    ("experiments",),
    ("report",),
    ("studies",),
    ("federation",),
    ("cli",),
)
"""From the ground up; a module may import from its own layer's package and from layers below."""
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = sorted(SOURCE.rglob("*.py"))


def room(path: Path) -> str:
    """The first name below the package: a module or a sub-package."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The rooms that a file imports from, wherever in the file the import stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "perfedrl":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("perfedrl."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("perfedrl.")}
    return found


def test_no_two_classes_have_the_same_name():
    found: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_only_point_down(path):
    here = room(path)
    if here in ("__init__", "__main__"):
        return
    assert here in LEVEL, f"{here} has no layer yet: add it to this test and to docs/architecture.md"
    for other in imported(path) - {here}:
        assert LEVEL[other] < LEVEL[here], f"{here} must not import {other}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_file_is_one_idea(path):
    lines = path.read_text().splitlines()
    assert len(lines) <= 500
    assert path.name == "__init__.py" or ast.get_docstring(ast.parse(path.read_text())), "say what the file is for"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno <= 60, f"{node.name} is long"


def test_nothing_unpickles():
    for path in FILES:
        text = path.read_text()
        assert "import pickle" not in text
        assert "allow_pickle=True" not in text


def test_tests_lie_beside_the_packages_they_speak_of():
    """Each folder of tests is a package of the library, besides those of documents, of faults and of shared helpers."""
    others = {Path("docs"), Path("faults"), Path("support")}
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("*.py")} - others
    assert [folder for folder in sorted(folders) if not (SOURCE / folder).is_dir()] == []


def test_no_test_file_imports_another():
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in getattr(node, "names", [])]
            assert not [name for name in names if str(name).startswith("test_")], f"{path.name}: use tests/support"
