"""Least squares for a handful of coefficients that cannot be negative. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def fit(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients c ≥ 0 that minimise Σ(row·c − value)². What would be negative is left out and the rest fitted anew.

    Raises ValueError when the rows do not determine the coefficients.
    """
    kept = list(range(len(rows[0])))
    while kept:
        scale = [max(abs(row[i]) for row in rows) or 1.0 for i in kept]
        scaled = [[row[i] / s for i, s in zip(kept, scale, strict=True)] for row in rows]
        found = [c / s for c, s in zip(_solve(scaled, values), scale, strict=True)]
        worst = min(range(len(found)), key=found.__getitem__)
        if found[worst] >= 0:
            coefficients = [0.0] * len(rows[0])
            for i, c in zip(kept, found, strict=True):
                coefficients[i] = c
            return coefficients
        del kept[worst]
    return [0.0] * len(rows[0])


def _solve(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """The normal equations, by elimination with pivoting."""
    size = len(rows[0])
    matrix = [
        [sum(row[i] * row[j] for row in rows) for j in range(size)]
        + [sum(row[i] * value for row, value in zip(rows, values, strict=True))]
        for i in range(size)
    ]
    for column in range(size):
        pivot = max(range(column, size), key=lambda i: abs(matrix[i][column]))
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        if abs(matrix[column][column]) < 1e-12:
            raise ValueError("the measurements do not tell the coefficients apart")
        for other in range(size):
            if other != column:
                factor = matrix[other][column] / matrix[column][column]
                matrix[other] = [a - factor * b for a, b in zip(matrix[other], matrix[column], strict=True)]
    return [matrix[i][size] / matrix[i][i] for i in range(size)]
