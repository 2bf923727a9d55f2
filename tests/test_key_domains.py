"""Constants that are folded into random keys: distinct, and outside the ranges of agents and rounds."""

import ast
from itertools import combinations
from pathlib import Path

import pytest

from perfedrl import key_domains
from perfedrl.experiments.config import MOST_ROUNDS as CONFIG_ROUNDS
from perfedrl.key_domains import AGENT_LEVEL, LARGEST_FOLD, MOST_AGENTS, MOST_ROUNDS, ROUND_LEVEL, SEED_LEVEL

SOURCE = Path(__file__).parents[1] / "src" / "perfedrl"
LEVELS = {"seed": SEED_LEVEL, "agent": AGENT_LEVEL, "round": ROUND_LEVEL}


@pytest.mark.parametrize("level", LEVELS)
def test_constants_of_one_level_are_distinct_and_fit_in_32_bits(level):
    values = list(LEVELS[level].values())
    assert len(set(values)) == len(values)
    assert all(0 <= value <= LARGEST_FOLD for value in values)


def test_constants_of_a_seed_are_no_agents_numbers():
    assert min(SEED_LEVEL.values()) >= MOST_AGENTS


def test_ranges_that_are_folded_into_an_agents_key_are_disjoint():
    ranges = [range(MOST_ROUNDS), *(range(first, first + MOST_ROUNDS) for first in AGENT_LEVEL.values())]
    for one, other in combinations(ranges, 2):
        assert one.stop <= other.start or other.stop <= one.start
    assert max(r.stop for r in ranges) <= LARGEST_FOLD + 1


def test_a_config_cannot_reach_the_last_rounds_which_later_evaluations_use():
    assert CONFIG_ROUNDS + 2 < MOST_ROUNDS


def test_every_constant_of_the_file_stands_in_its_table():
    limits = {"LARGEST_FOLD", "MOST_AGENTS", "MOST_ROUNDS"}
    constants = {name for name in vars(key_domains) if name.isupper()} - limits
    tables = {"SEED_LEVEL", "AGENT_LEVEL", "ROUND_LEVEL"}
    assert constants - tables == {name for table in LEVELS.values() for name in table}


def large(node: ast.expr) -> bool:
    """Whether an expression is a number from 2**30 on."""
    try:
        value = eval(compile(ast.Expression(node), "", "eval"), {"__builtins__": {}})
    except (NameError, TypeError, ValueError, AttributeError, ZeroDivisionError, SyntaxError):
        return False
    return isinstance(value, int) and not isinstance(value, bool) and value >= 2**30


def test_no_other_file_folds_a_large_constant_into_a_key():
    for path in sorted(SOURCE.rglob("*.py")):
        if path.name == "key_domains.py":
            continue
        tree = ast.parse(path.read_text())
        constants = {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign) and large(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("fold_in"):
                named = {n.id for argument in node.args[1:] for n in ast.walk(argument) if isinstance(n, ast.Name)}
                folded = [n for argument in node.args[1:] for n in ast.walk(argument) if isinstance(n, ast.Constant)]
                assert not named & constants, f"{path.name} folds {named & constants} into a key"
                assert not any(large(n) for n in folded), f"{path.name} folds a large number into a key"
