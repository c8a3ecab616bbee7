"""The collectives of a training step, by each way of counting them."""

import dataclasses
from typing import Any

from jaxptd.analysis.collective import Collective, subtract
from jaxptd.display import Table, html_of
from jaxptd.layout import Layout

TITLES = {
    "jaxpr": "one training step, from the jaxpr",
    "compiled": "one training step, from the compiled HLO",
    "formula": "one training step, by the formula",
    "per_layer": "of which one layer (of each stack), forward and backward, all micro-batches",
}


@dataclasses.dataclass(frozen=True, repr=False)
class CommsReport:
    """Collectives by kind and axes, one list for each of `TITLES`.

    Args:
        layout: of the step.
        devices: in words.
        jaxpr: of the program, as this library wrote it.
        compiled: of XLA's program; None where it was not compiled.
        formula: what the config alone implies.
        per_layer: in the jaxpr, for one layer more in each stack.
    """

    layout: Layout
    devices: str
    jaxpr: list[Collective]
    compiled: list[Collective] | None
    formula: list[Collective]
    per_layer: list[Collective]

    @property
    def as_formula(self) -> bool:
        """True if the program moves what the formula says."""
        return subtract(self.jaxpr, self.formula) == []

    @property
    def titles(self) -> list[str]:
        """The names in `TITLES` that were counted."""
        return [name for name in TITLES if getattr(self, name) is not None]

    @property
    def verdict(self) -> str:
        return f"the jaxpr {'moves' if self.as_formula else 'does NOT move'} what the formula says"

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis."""
        return {str(axis): size for axis, size in self.layout.sizes.items()}

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON has it."""
        found = {name: getattr(self, name) for name in self.titles}
        rows = {name: [row.as_dict(self.sizes) for row in each] for name, each in found.items()}
        return {"mesh": self.sizes, **rows}

    def table(self, name: str) -> Table:
        """The collectives of one of `titles`."""
        columns = ("collective", "axes", "executions", "bytes", "ring bytes sent")
        rows = [
            (row.kind, " x ".join(row.axes), row.count, row.bytes, row.wire_bytes(self.sizes))
            for row in getattr(self, name)
        ]
        return Table(TITLES[name], columns, rows)

    def __repr__(self) -> str:
        head = f"{self.layout} on {self.devices}; {self.verdict}"
        return "\n".join([head, str(self.table("jaxpr"))])

    def _repr_html_(self) -> str:
        head = f"{self.layout} on {self.devices}; {self.verdict}"
        return html_of(head, *(self.table(name) for name in self.titles))
