"""check_docs: the pages and help texts are right, and each kind of mistake is found."""

import check_docs
import pytest
from check_docs import COMMANDS, PAGES, ROOT, Line
from names_of_tests import TESTS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_only_what_exists(page):
    assert check_docs.problems(page) == []


def test_examples_of_help_texts_are_accepted_and_name_configs_that_exist():
    assert check_docs.help_problems() == []


def test_every_command_is_run_by_a_test_that_exists_or_has_a_reason():
    for pattern, how in COMMANDS.items():
        assert how in TESTS or how.startswith("too long: "), f"{pattern}: {how}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[a](missing.md)", "links to missing.md, which does not exist"),
        ("![a](missing.png)", "links to missing.png, which does not exist"),
        ("# One heading\n[a](#another-heading)", "links to #another-heading, which has no such heading"),
        ("```\nperfedrl trian configs/arc.toml\n```", "perfedrl has no command trian"),
        ("```sh\nperfedrl train configs/arc.toml --sede 1\n```", "No such option: --sede"),
        ("```\nperfedrl train configs/nothing.toml  # a comment\n```", "configs/nothing.toml does not exist"),
        ("```\nperfedrl train\n```", "Missing argument"),
        ("`perfedrl reproduce e99`", "e99 does not exist"),
        ("`perfedrl federation dance`", "perfedrl federation has no command dance"),
        ("```\nperfedrl demo --seeds 2\n```", "which no test runs"),
        ("Use `make tea`.", "names `make tea`, which the Makefile does not have"),
        ("See `envs/nowhere.py`.", "names the file envs/nowhere.py, which does not exist"),
        ("See tests/nowhere/test_x.py for it.", "names the file tests/nowhere/test_x.py, which does not exist"),
        ("It is in `results/nothing`.", "names results/nothing, which does not exist"),
        ("Call `perfedrl.exact.nothing`.", "names perfedrl.exact.nothing, which does not exist"),
    ],
)  # fmt: skip
def test_a_mistake_on_a_page_is_found(tmp_path, text, problem):
    page = tmp_path / "page.md"
    page.write_text(f"{text}\n")
    (found,) = check_docs.problems(page)
    assert problem in found


@pytest.mark.parametrize(
    "text",
    [
        "# One `code` heading, twice\n[a](#one-code-heading-twice), [b](https://example.org/nowhere)",
        "```\nperfedrl theory configs/planned.toml --epsilon 0.1\n```",
        "`perfedrl personalize --goal` and `perfedrl train FILE`",
        "`make test`, `envs/base.py`, `base.py`, `perfedrl.exact.hessian`, `pf.personalize(run)`, `results/`",
    ],
)
def test_what_is_right_is_left_alone(tmp_path, text):
    page = tmp_path / "page.md"
    page.write_text(f"{text}\n")
    assert check_docs.problems(page) == []


def test_an_example_in_a_help_text_is_parsed_whole():
    assert "does not exist" in check_docs.misspoken(Line(("inspect", "configs/nowhere.toml", "--agent", "3"), True))
