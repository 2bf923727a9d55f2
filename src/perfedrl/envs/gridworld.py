"""The tabular family of the paper: one grid, one goal cell per agent (Appendix C.1)."""

import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from perfedrl.envs.fleet import Fleet, family_fleet
from perfedrl.envs.new_agents import Settings
from perfedrl.envs.tabular import TabularMDP, check_table
from perfedrl.errors import UserError

MOVES = ((-1, 0), (1, 0), (0, -1), (0, 1))
"""U, D, L, R as (row, column) steps."""

Cell = tuple[int, int]


def gridworld(
    width: int = 5,
    goals: Sequence[Cell] | None = None,
    held_out: Sequence[Cell] = (),
    horizon: int = 15,
    discount: float = 0.9,
) -> Fleet:
    """Agents on a width x width grid that differ only in their goal cell, given as (row, column).

    Moves are deterministic and stay in place at the walls; reward 1 at every step that starts in the goal cell; the
    start is uniform over the other cells. Without `goals`: the four corners and the four edge midpoints.
    """
    if width < 2:
        raise UserError(f"a gridworld needs width >= 2; it is {width}")
    check_table(width**2, len(MOVES), f"width ({width})")
    goals = default_goals(width) if goals is None else goals

    def make(_: Any, settings: Settings) -> TabularMDP:
        return _mdp(width, checked_cell(settings["goal"], width), horizon, discount)

    hints = {"goal": f"row,column, each from 0 to {width - 1}"}
    return family_fleet(make, [{"goal": x} for x in goals], [{"goal": x} for x in held_out], hints=hints)


def checked_cell(cell: Any, width: int) -> Cell:
    """Return a cell of the grid as two whole numbers."""
    if np.shape(cell) != (2,) or not all(isinstance(x, numbers.Real) and float(x).is_integer() for x in cell):
        raise UserError(f"a goal is two whole numbers, row and column; got {cell!r}")
    row, column = (int(x) for x in cell)
    if not 0 <= min(row, column) <= max(row, column) < width:
        raise UserError(f"goal {list(cell)} lies outside the {width} x {width} grid (cells are numbered from 0)")
    return row, column


def default_goals(width: int) -> tuple[Cell, ...]:
    """Return the corners, then the edge midpoints, without duplicates (small grids have fewer than eight)."""
    end, middle = width - 1, width // 2
    corners = (0, 0), (0, end), (end, 0), (end, end)
    midpoints = (0, middle), (middle, 0), (middle, end), (end, middle)
    return tuple(dict.fromkeys(corners + midpoints))


def grid_moves(height: int, width: int) -> np.ndarray:
    """Return the cell that each move leads to, [S, A]; a move off the grid stays in place."""
    row, column = np.divmod(np.arange(height * width), width)
    rows = np.clip(row[:, None] + [dr for dr, _ in MOVES], 0, height - 1)
    columns = np.clip(column[:, None] + [dc for _, dc in MOVES], 0, width - 1)
    return rows * width + columns


def _mdp(width: int, goal: Cell, horizon: int, discount: float) -> TabularMDP:
    S = width * width
    at_goal = np.arange(S) == goal[0] * width + goal[1]
    return TabularMDP(
        P=np.eye(S)[grid_moves(width, width)],
        r=np.repeat(at_goal[:, None].astype(float), len(MOVES), axis=1),
        mu=~at_goal / (S - 1),
        horizon=horizon,
        discount=discount,
    )
