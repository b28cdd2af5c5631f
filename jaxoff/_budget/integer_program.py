"""An integer program for the solver HiGHS, by way of scipy."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping

import numpy as np

from jaxoff._report.standard_output import to_standard_error

# Bounds of a search. A search takes a few nodes and 0.1 s as a rule; many values of equal size can make it
# endless.
# Nodes first, as their number does not depend on the machine.
_NODES = 5000
_SECONDS = 20.0
# Part of the cost by which a solution may be above the optimum: its proof to 1e-9 took ten times as long.
_GAP = 1e-3

# Index of a variable -> its coefficient in a linear expression.
type Terms = Mapping[int, float]


class IntegerProgram:
    """An integer program, built up by variables and constraints.

    Attributes:
      unit: number of bytes in a unit of memory variables.
      cost: index of a variable -> its coefficient in the cost of the program.
    """

    def __init__(self, unit: float):
        self.unit = unit
        self._upper: list[float] = []
        self._lower: list[float] = []
        self._integer: list[bool] = []
        self.cost: dict[int, float] = collections.defaultdict(float)
        self._rows: list[tuple[Terms, float]] = []

    def add_variable(self, upper: float = 1.0, *, lower: float = 0.0, integer: bool = False) -> int:
        """Adds a variable between two bounds, and returns its index."""
        self._upper.append(upper)
        self._lower.append(lower)
        self._integer.append(integer)
        return len(self._upper) - 1

    def add_upper_bound(self, terms: Iterable[tuple[int, float]], bound: float) -> None:
        """Adds the constraint: sum of terms <= bound."""
        summed: dict[int, float] = collections.defaultdict(float)
        for variable, factor in terms:
            summed[variable] += factor
        self._rows.append((summed, bound))

    def add_lower_bound(
        self, variable: int, terms: Iterable[tuple[int, float]], constant: float = 0.0
    ) -> None:
        """Adds the constraint: variable >= sum of terms + constant."""
        self.add_upper_bound([*terms, (variable, -1.0)], -constant)

    def minimise(self, cost: Terms) -> np.ndarray | None:
        """Returns the values of all variables at minimal cost, or None if no values meet the constraints.

        A search that reaches its bounds returns the best values found.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        entries = [(r, v, f) for r, (terms, _) in enumerate(self._rows) for v, f in terms.items()]
        rows, columns, factors = zip(*entries, strict=True) if entries else ((), (), ())
        matrix = csr_array((factors, (rows, columns)), shape=(len(self._rows), len(self._upper)))
        bounds = [bound for _, bound in self._rows]
        objective = np.zeros(len(self._upper))
        for variable, factor in cost.items():
            objective[variable] = factor
        with to_standard_error():
            found = milp(
                objective,
                integrality=np.array(self._integer, int),
                bounds=Bounds(np.array(self._lower), np.array(self._upper)),  # pyright: ignore
                constraints=LinearConstraint(matrix, ub=np.array(bounds)),  # pyright: ignore
                options={"mip_rel_gap": _GAP, "node_limit": _NODES, "time_limit": _SECONDS},
            )
        return found.x
