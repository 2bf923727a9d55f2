"""README's examples and the pages' short commands run as printed, and the map of the paper names what exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from check_docs import resolve
from names_of_tests import TESTS

from perfedrl.algorithms.composition import ORDER
from perfedrl.cli import federation
from perfedrl.experiments.config import load_config
from perfedrl.studies.theory import analysis

ROOT = Path(__file__).parents[2]
MAP = (ROOT / "docs" / "paper_to_code.md").read_text()
ROWS = re.findall(r"^\| (?!paper|lines|---)(.+?) \| `(perfedrl\.[\w.]+)` \| `(test_\w+)` \|$", MAP, re.MULTILINE)
THEORY_PAGE = (ROOT / "docs" / "theory.md").read_text()
THEORY_COMMANDS = re.findall(r"^perfedrl (theory configs/[^#\n]*?)(?: --json \S+)? *#", THEORY_PAGE, re.MULTILINE)


@pytest.mark.slow
def test_the_readme_examples_run_as_printed(tmp_path):
    code, own = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", own], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == own.splitlines()[-1].partition("# ")[2]
    assert len([line for line in code.splitlines() if line.strip() and not line.startswith("#")]) <= 15
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (before, personalized), (_, shared) = re.findall(r"step: ([\d.]+) ([\d.]+)", done.stdout)
    assert float(personalized) > float(shared) + 0.05 > float(before) + 0.05, done.stdout


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90


@pytest.mark.slow
@pytest.mark.parametrize("page", ["configs", "normalization", "algorithms/per-fedavg"])
def test_examples_of_other_pages_run(page, tmp_path):
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL)
    assert examples
    for code in examples:
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr


def test_the_example_of_the_theory_page_runs_as_printed():
    (code,) = re.findall(r"```python\n(.*?)```", THEORY_PAGE, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("10887 0.00724")
    assert "83 55 165 ['(i) ceiling', '(iv) variance'] 3298761" in done.stdout


def test_the_planning_example_plans_for_something_that_is_not_already_true():
    """README's plan asks for less than the start has, and its config has the settings of the plan."""
    found = re.findall(r"perfedrl theory (\S+) --epsilon (\S+)", (ROOT / "README.md").read_text())
    assert found
    for path, epsilon in found:
        config = load_config(ROOT / path)
        findings = analysis.of_config(config, float(epsilon))
        plan, a = findings.plans["cheapest"], config.experiment.algorithm
        assert findings.first_square > float(epsilon)
        assert (config.rounds, a.local_steps, a.m_in, a.m_h, a.m_out) == (
            *(plan.K, plan.tau, plan.m_in, plan.m_h, plan.m_out),
        )
        assert a.beta == pytest.approx(plan.beta, rel=1e-4)


@pytest.mark.parametrize("line", THEORY_COMMANDS)
def test_commands_of_the_theory_page_are_as_the_program_takes_them(line, run, monkeypatch):
    monkeypatch.chdir(ROOT)
    code, out, err = run(*line.split(), "--no-measure")
    assert (code, err) == (0, "")
    assert "constants" in out


def test_the_map_of_the_paper_has_all_its_rows():
    table_lines = [line for line in MAP.splitlines() if line.startswith("| ") and "`test_" in line]
    assert len(ROWS) == len(table_lines) >= 30
    items = " ".join(item for item, _, _ in ROWS)
    for item in [f"eq. ({i})" for i in range(1, 8)] + [f"Lemma {i}" for i in range(1, 6)]:
        assert item in items, f"{item} is missing from docs/paper_to_code.md"
    for item in ("Theorem 1", "Corollary 1", "Corollary 2", "Prop. 1", "Prop. 2", "Prop. 3", "Remark 1", "Remark 2"):
        assert item in items, f"{item} is missing from docs/paper_to_code.md"


@pytest.mark.parametrize(("item", "function", "test"), ROWS, ids=[item for item, _, _ in ROWS])
def test_what_the_map_names_exists(item, function, test):
    assert callable(resolve(function))
    assert test in TESTS


def test_the_tests_that_the_page_on_security_names_exist():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "security.md").read_text()))
    assert len(named) > 20
    assert named <= TESTS, named - TESTS


OF_EVERY_STUDY = ("study.py", "figures.py", "tables.py")


def test_the_architecture_page_names_every_module_and_no_other():
    """A name without a folder belongs to the folder named last before it, or to the package itself."""
    source, folder, named = ROOT / "src" / "perfedrl", "", set()
    for span in re.findall(r"`([\w/]+(?:/|\.py))`", (ROOT / "docs" / "architecture.md").read_text()):
        if span.endswith("/") and (source / span).is_dir():
            folder = span
            named.add(span)
        elif span.endswith(".py") and not (ROOT / span).exists() and span not in OF_EVERY_STUDY:
            found = [path for path in (span, folder + span) if (source / path).exists()]
            assert found, f"docs/architecture.md names {span} after {folder}, which does not exist"
            named.add(found[0])
    packages = {path.parent.relative_to(source).as_posix() + "/" for path in source.glob("*/**/__init__.py")}
    modules = {
        path for path in source.rglob("[!_]*.py") if path.parts[-3] != "studies" or path.name not in OF_EVERY_STUDY
    }
    assert not (packages | {path.relative_to(source).as_posix() for path in modules}) - named


def test_the_architecture_page_has_the_order_of_wrappers():
    order = " -> ".join(["algorithm", *(wrapper.__name__ for wrapper in ORDER)])
    assert f"\n{order}\n" in (ROOT / "docs" / "architecture.md").read_text()


def test_classes_and_registries_that_contributing_names_exist():
    names = set(re.findall(r"`([A-Z]\w+)`", (ROOT / "CONTRIBUTING.md").read_text()))
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    defined = set(re.findall(r"^(?:class )?([A-Z]\w+)\b", "\n".join(path.read_text() for path in files), re.MULTILINE))
    assert not names - defined


def test_the_federation_page_has_every_command_of_a_fleet():
    text = (ROOT / "docs" / "federation.md").read_text()
    over_a_network = {command.callback.__name__ for command in federation.app.registered_commands}
    assert set(re.findall(r"\bperfedrl federation ([a-z]+)\b", text)) == over_a_network


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("check", "CartPole-v1", "--set", "length=0.3"), "nothing is wrong"),
        (("inspect", "configs/arc.toml"), "arc-recommended-episode.png"),
        (("list", "envs"), "gridworld"),
        (("list", "estimators"), "causal"),
        (("theory", "witness"), "0.1571893"),
        pytest.param(
            *(("reproduce", "mechanisms", "--runs", "results/mechanisms", "--saved"), "fast-fedpg"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda words: words[0] if isinstance(words, tuple) else "",
)
def test_short_commands_of_the_pages_run(words, shown, run, tmp_path):
    """In an empty folder that has the project's configs and results."""
    for name in ("configs", "results"):
        (tmp_path / name).symlink_to(ROOT / name)
    code, out, err = run(*words)
    assert code == 0, err
    assert shown in out
