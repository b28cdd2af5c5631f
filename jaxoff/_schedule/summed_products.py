"""Products that are only added up, such as the gradients of one input by several weights.

Where the compiler divides their contracted axis, each product is a sum over devices. XLA adds the products
of a device first, and exchanges the sum instead of each product, if nothing but the additions reads them:
a barrier over a product is another reader.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxoff._jaxpr.compat import Var
from jaxoff._jaxpr.dataflow import index_readers, variables
from jaxoff._jaxpr.kernels import KernelGraph
from jaxoff._schedule.problem import OrderProblem

_ADDITIONS = ("add", "add_any")


@dataclasses.dataclass(frozen=True)
class SummedProducts:
    """The sums of products in a program, each a tree of additions.

    Attributes:
      last: product -> the last product of its sum, in program order.
      others: last product of a sum -> the other products, which run just before it.
      readers: kernel that adds products up, alone or among other equations -> the last product of the sum.
    """

    last: Mapping[int, int] = dataclasses.field(default_factory=dict)
    others: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    readers: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def find_sum(self, i: int) -> int | None:
        """The last product of the sum to which kernel `i` belongs."""
        return self.last.get(i, self.readers.get(i))


def find_summed_products(problem: OrderProblem, graph: KernelGraph) -> SummedProducts:
    """Finds the sums of two and more products of one shape and dtype, each read by one addition alone.

    There are none in a program whose values the compiler does not divide.
    """
    if not (problem.is_divided or problem.shares_fused):
        return SummedProducts()
    readers = index_readers(graph.eqns)
    terms: dict[Var, tuple[int, ...]] = {}  # product, or sum that no other sum reads -> its products
    for i, eqn in enumerate(graph.eqns):
        if eqn.primitive.name == "dot_general":
            terms[eqn.outvars[0]] = (i,)
        elif eqn.primitive.name in _ADDITIONS and len(set(operands := variables(eqn))) == 2:
            is_sum = all(
                v in terms
                and len(readers[v]) == 1
                and v not in problem.outs
                and v.aval == eqn.outvars[0].aval
                for v in operands
            )
            if is_sum:
                terms[eqn.outvars[0]] = tuple(product for v in operands for product in terms.pop(v))
    sums = [sorted(products) for products in terms.values() if len(products) > 1]
    return SummedProducts(
        {i: products[-1] for products in sums for i in products},
        {products[-1]: tuple(products[:-1]) for products in sums},
        {k: p[-1] for p in sums for k in graph.readers.get(graph.eqns[p[-1]].outvars[0], ())},
    )
