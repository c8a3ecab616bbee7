"""Terms: the summands of a step's time."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

PRODUCTS, HBM, HOST, WAITING = "matmuls", "HBM", "host", "waiting"


class Term(NamedTuple):
    """One part of a step's time.

    name: what runs.
    kind: the group in which it is reported, such as `attention`.
    seconds: time of all executions.
    resource: what bounds it: matmuls, HBM, NVLink, network, host or waiting.
    flops, bytes: executed and moved.
    runs: number of executions.
    """

    name: str
    kind: str
    seconds: float
    resource: str
    flops: float = 0.0
    bytes: float = 0.0
    runs: float = 1.0

    @property
    def rate(self) -> float:
        """FLOP/s or bytes/s of the resource that bounds it; 0 for waiting."""
        amount = self.flops if self.resource == PRODUCTS else self.bytes
        return amount / self.seconds if self.seconds else 0.0

    def times(self, number: float) -> "Term":
        """The term, executed `number` times as often."""
        name, kind, seconds, resource, flops, moved, runs = self
        amounts = flops * number, moved * number, runs * number
        return Term(name, kind, seconds * number, resource, *amounts)

    def named(self, name: str, kind: str | None = None) -> "Term":
        """The term under another name and, if given, of another kind."""
        return Term(name, self.kind if kind is None else kind, *self[2:])


def total(terms: Iterable[Term]) -> float:
    """Total seconds of the terms."""
    return sum(term.seconds for term in terms)


def scaled(terms: Sequence[Term], number: float) -> list[Term]:
    return [term.times(number) for term in terms]


def merged(terms: Iterable[Term]) -> list[Term]:
    """Adds up terms of the same name and resource, in order of first appearance."""
    terms_by_name: dict[tuple[str, str], Term] = {}
    for term in terms:
        key = term.name, term.resource
        other = terms_by_name.get(key)
        terms_by_name[key] = term if other is None else _sum(other, term)
    return list(terms_by_name.values())


def _sum(a: Term, b: Term) -> Term:
    amounts = a.flops + b.flops, a.bytes + b.bytes, a.runs + b.runs
    return Term(a.name, a.kind, a.seconds + b.seconds, a.resource, *amounts)
