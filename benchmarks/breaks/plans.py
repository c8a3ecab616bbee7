"""Breaks of planned layouts: each would rank others first without an error."""

from benchmarks.breaks.table import Break

PLANS = (
    # ---- this library's own steps, and the search ----
    Break(
        "a candidate leaves the heap before others are compared with it",
        "jaxptd/planner/search/best.py",
        "yield candidate.step.seconds, candidate",
        "yield 0.0, candidate",
        "tests/planner/search/test_best.py",
        "nothing_is_faster",
    ),
    Break(
        "the first choice is the only one, though it does not fit",
        "jaxptd/planner/search/best.py",
        "elif what[1].choice == first:",
        "elif what[1].choice is None:",
        "tests/planner/search/test_best.py",
        "nothing_is_faster",
    ),
    Break(
        "bounds count what a stage sends twice",
        "jaxptd/planner/search/bounds.py",
        "hops=chunks * self.cost.hop if p > 1 else 0.0,",
        "hops=9 * chunks * self.cost.hop if p > 1 else 0.0,",
        "tests/planner/search/test_best.py",
        "bounds_are_below",
    ),
    Break(
        "an outline's interleaved stage holds as much as that of 1f1b",
        "jaxptd/planner/own/outline.py",
        "return min(m * V, (V + 1) * p - 1)",
        "return min(m * V, V * p)",
        "tests/planner/own/test_outline.py",
    ),
    Break(
        "a permute over nodes uses all rails of a node",
        "jaxptd/planner/cost/links.py",
        "rate = cluster.rail",
        "rate = cluster.bandwidth(group)",
        "tests/planner/cost/test_links.py",
        "permute",
    ),
    Break(
        "collectives of all stages are sent by one",
        "jaxptd/planner/own/traffic.py",
        '1 if "pp" in each.axes else layout.pp',
        "1",
        "tests/planner/own/test_traffic.py",
    ),
)
