"""Tables fit the terminal, whatever its width, and show every word of every cell whole."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

import perfedrl
from perfedrl.report.terminal_table import Column, TerminalTable, column_groups, fitted

NAME = "arc-causal-ridge-alpha-0.5-mh100-19ca47d972"
INTERVAL = "-0.872 (-1234.390 .. 1.355)"


def shown(table: TerminalTable, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, no_color=True)
    console.print(table)
    return console.file.getvalue().splitlines()


def wide_table(columns: int = 9) -> TerminalTable:
    numbers = (Column(f"number {k}", justify="right") for k in range(columns))
    table = TerminalTable(Column("run", no_wrap=True), *numbers, "words", title="some runs", caption="with intervals")
    for row in range(2):
        table.add_row(
            f"{row}{NAME}", *(f"{k}{row}.25{k}" for k in range(columns)), f"{INTERVAL} [red]and[/] more words"
        )
        table.add_section()
    return table


@pytest.mark.parametrize("width", [70, 80, 120, 200])
def test_lines_fit_and_no_word_is_cut(width):
    lines = shown(wide_table(), width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert "…" not in text
    for word in (f"1{NAME}", *(f"{k}1.25{k}" for k in range(9)), INTERVAL, "more"):
        assert re.search(rf"(?<!\S){re.escape(word)}(?!\S)", text), word
    assert text.count("some runs") == text.count("with intervals") == 1


def test_a_table_that_is_narrow_enough_is_one_part():
    table = TerminalTable("name", "what")
    table.add_row("a", "b c")
    assert sum(line.startswith("┏") for line in shown(table, 80)) == 1


def test_every_part_begins_with_the_columns_that_name_a_row():
    assert column_groups([10, 5, 5, 5], 1, 100) == [[0, 1, 2, 3]]
    assert column_groups([10, 5, 5, 5], 1, 25) == [[0, 1], [0, 2], [0, 3]]
    assert column_groups([5, 5, 5, 5], 2, 30) == [[0, 1, 2], [0, 1, 3]]


def test_the_widest_column_gives_way_first():
    assert fitted([(3, 10), (3, 40)], 57) == [10, 40]
    assert fitted([(3, 10), (3, 40)], 40) == [10, 23]
    assert fitted([(10, 10), (20, 20)], 27) == [10, 10]


def test_all_tables_of_the_terminal_are_of_this_kind():
    source = Path(perfedrl.__file__).parent
    others = [path.name for path in source.rglob("*.py") if "from rich.table import" in path.read_text()]
    assert others == ["terminal_table.py"]
