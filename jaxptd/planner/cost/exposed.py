"""Seconds of collectives that nothing hides."""

from collections.abc import Iterable, Mapping, Sequence

from jaxptd.planner.cost import links
from jaxptd.planner.cost.collectives import Placed
from jaxptd.planner.cost.setting import Setting
from jaxptd.planner.cost.terms import Term

HIDING = ("products", "attention")  # kinds of terms that collectives can run beside
BESIDE = 0.9  # share of a kernel's time that a collective beside it can use: it starts after it


def exposed_terms(
    setting: Setting, collectives: Iterable[Placed], hosts: Mapping[str, float]
) -> list[Term]:
    """A term for each collective with the seconds that are left after hiding.

    Args:
        setting: the step.
        collectives: of one place.
        hosts: seconds of what may hide them, by the names of `collectives.Under`.
    """
    groups: dict[str, list[tuple[Placed, Term]]] = {}
    for each in collectives:
        groups.setdefault(each.under, []).append((each, collective_term(setting, each)))
    return [
        term for under, members in groups.items() for term in _left(members, hosts.get(under, 0.0))
    ]


def collective_term(setting: Setting, each: Placed) -> Term:
    """The term of a collective without anything beside it."""
    group = setting.spread.group(each.axes)
    term = links.collective(setting.cluster, each.kind, group, each.bytes)
    return term.times(each.count).named(each.name, "+".join(each.axes))


def _left(members: Sequence[tuple[Placed, Term]], host: float) -> list[Term]:
    """Shortens terms that run beside the same kernels by what these hide, each by its share.

    What is sent in one of several micro-batches runs beside the kernels of that one.
    """
    seconds = sum(term.seconds for _, term in members)
    runs = min(1.0, max(each.count for each, _ in members))
    left = max(0.0, seconds - BESIDE * runs * host) / seconds if seconds else 0.0
    return [term._replace(seconds=term.seconds * left) for _, term in members]
