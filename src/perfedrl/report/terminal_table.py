"""Tables for the terminal that fit its width without cutting a number or a name."""

import re
from collections.abc import Sequence
from typing import Any

import rich.table
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column

__all__ = ["Column", "TerminalTable"]

BESIDE_TEXT = 3
"""Characters that a column takes beside its text: a line and a blank on both sides."""


UNBROKEN = re.compile(r"\S+ \([^()]* \.\. [^()]*\)|\S+")
"""What stays on one line: a word, or a number with its interval."""


class TerminalTable(rich.table.Table):
    """A table whose columns are as wide as their longest word at least; text wraps between words.

    If the columns do not fit side by side, the table is shown in several parts, one below the other. Every part begins
    with the first `keys` columns, which say what a row is about.
    """

    def __init__(self, *headers: Column | str, keys: int = 1, **settings: Any):
        super().__init__(*headers, **settings)
        self._keys = keys

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.columns:
            return
        sizes = [sizes_of(column, console) for column in self.columns]
        groups = column_groups([least for least, _ in sizes], self._keys, options.max_width)
        for i, group in enumerate(groups):
            widths = fitted([sizes[k] for k in group], options.max_width)
            part = rich.table.Table(title=self.title if i == 0 else None)
            for k, width in zip(group, widths, strict=True):
                column = self.columns[k].copy()
                column.width, column.overflow, column.no_wrap = width, "fold", False
                part.columns.append(column)
            for row, cells in zip(self.rows, zip(*(self.columns[k].cells for k in group), strict=True), strict=True):
                part.add_row(*cells, style=row.style, end_section=row.end_section)
            yield part
        if self.caption:  # not as rich's caption, which is as narrow as the last part
            yield console.render_str(str(self.caption), style="table.caption")


def sizes_of(column: Column, console: Console) -> tuple[int, int]:
    """The lengths of a column's longest word and of its longest line."""
    lines = [
        line
        for cell in (column.header, *column.cells)
        for line in (console.render_str(cell).plain if isinstance(cell, str) else str(cell)).splitlines()
    ]
    words = [word for line in lines for word in UNBROKEN.findall(line)]
    return max(map(cell_len, words), default=1), max(map(cell_len, lines), default=1)


def column_groups(least: Sequence[int], keys: int, width: int) -> list[list[int]]:
    """Columns that fit side by side at their least widths; the first `keys` columns are in every group."""
    first = list(range(min(keys, len(least))))
    groups = [first]
    for k in range(len(first), len(least)):
        wider = [*groups[-1], k]
        if groups[-1] == first or sum(least[i] + BESIDE_TEXT for i in wider) + 1 <= width:
            groups[-1] = wider
        else:
            groups.append([*first, k])
    return groups


def fitted(sizes: Sequence[tuple[int, int]], width: int) -> list[int]:
    """The widths of columns: those of their longest lines, with the widest reduced until they fit."""
    widths = [longest for _, longest in sizes]
    while sum(widths) + BESIDE_TEXT * len(widths) + 1 > width:
        wrapping = [k for k, (least, _) in enumerate(sizes) if widths[k] > least]
        widest = max(wrapping or range(len(widths)), key=lambda k: widths[k])
        if widths[widest] == 1:
            break
        widths[widest] -= 1
    return widths
