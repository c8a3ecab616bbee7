"""Explains what a step does with parameters: `ParamPlan`s in words, a row per group."""

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from jaxptd.config import Config
from jaxptd.display import Table, bytes_text, count_text, html_of
from jaxptd.fields import checked
from jaxptd.layout import Layout
from jaxptd.models.families import architecture_of, family_of, sizes_of, with_vocabulary
from jaxptd.models.stages import parameter_infos
from jaxptd.parts.sizes import elements_on_device
from jaxptd.shapes import ParamShape
from jaxptd.step.resolved import resolve
from jaxptd.zero.plan import ParamPlan, StateShapes, Why, explained

COLUMNS = ("where", "gathered", "reduced", "added", "gradient")
_GATHERED = {"first_microbatch": "first micro-batch", "layer": "each layer"}
_REDUCED = {"last_microbatch": "last micro-batch", "each_layer": "each layer"}
_ADDED = {"in_loop": "in loop", "in_tick": "in tick"}


@dataclasses.dataclass(frozen=True)
class Group:
    """Parameters that a step treats alike.

    Args:
        name: the group's name in tables.
        plan: what the step does with each.
        why: the reasons.
        names: the parameters' names.
        elements: their elements on one device.
        bytes: the size of these.
    """

    name: str
    plan: ParamPlan
    why: Why
    names: list[str]
    elements: int
    bytes: int

    @property
    def words(self) -> dict[str, str]:
        """The words of the plan, by column."""
        plan = self.plan
        return {
            "where": plan.where,
            "gathered": _GATHERED.get(plan.gather, plan.gather),
            "reduced": _REDUCED.get(plan.reduce, plan.reduce),
            "added": _ADDED.get(plan.accumulate, plan.accumulate),
            "gradient": plan.grad_dtype,
        }

    @property
    def reasons(self) -> dict[str, str]:
        """The reasons, by column."""
        return dict(zip(self.words, self.why, strict=True))


@dataclasses.dataclass(frozen=True, repr=False)
class ParamPlans:
    """The plans of a model's parameters, a row per group.

    Args:
        layout: the step's.
        groups: those of layers come first.
    """

    layout: Layout
    groups: list[Group]

    def as_dict(self) -> dict[str, Any]:
        """The groups as in JSON."""
        groups = [
            {
                "group": each.name,
                "parameters": each.elements,
                "bytes": each.bytes,
                "names": each.names,
                "plan": dataclasses.asdict(each.plan),
                "why": each.reasons,
            }
            for each in self.groups
        ]
        return {"layout": str(self.layout), "groups": groups}

    def table(self) -> Table:
        """A row per group, with what one device holds."""
        rows = []
        for each in self.groups:
            words = each.words
            if each.plan.gather != "never":
                words["gathered"] += f", {each.plan.gather_dtype}"
            sizes = count_text(each.elements), bytes_text(each.bytes)
            rows.append((each.name, *sizes, *words.values()))
        return Table("", ("group", "count", "bytes", *COLUMNS), rows)

    @property
    def reasons(self) -> list[str]:
        """A line per action of a step, with the groups to which it applies and the reason."""
        lines: dict[tuple[str, str], list[str]] = {}
        for column in COLUMNS:
            for each in self.groups:
                line = f"{column} {each.words[column]}", each.reasons[column]
                lines.setdefault(line, []).append(each.name)
        every = len(self.groups)
        return [
            f"{what} ({'all' if len(names) == every else ', '.join(names)}): {why}"
            for (what, why), names in lines.items()
        ]

    @property
    def _head(self) -> str:
        """The layout, and the ZeRO stage at which its layers run if that differs."""
        zero, stage = self.layout.zero, self.groups[0].plan.stage
        runs = f"; layout.zero={zero} runs as stage {stage}, for the reasons below"
        return f"{self.layout}{runs if stage != zero else ''}"

    def __repr__(self) -> str:
        return "\n".join([self._head, str(self.table()), *self.reasons])

    def _repr_html_(self) -> str:
        return html_of(self._head, self.table(), *self.reasons)


@checked("jaxptd.memory.explain")
def explain(config: Config) -> ParamPlans:
    """Explains what a training step does with each group of parameters, and why.

    ZeRO, offloading and gradient accumulation decide together where parameters are, when they are
    gathered, and when their gradients are summed. Needs no devices; nothing is compiled.

    >>> import jaxptd
    >>> config = jaxptd.load_config("test-tiny", ["--layout.dp=2", "--layout.zero=3"])
    >>> [group.plan.gather for group in explain(config).groups]
    ['layer', 'layer', 'step', 'step']

    Args:
        config: a run's; its data is not read.

    Raises:
        UserError: the model does not fit the layout.
    """
    config = with_vocabulary(config)
    family_of(config.model).check(config)
    zero = StateShapes.of(config, _infos(config))
    groups: dict[tuple[str, ParamPlan], list[str]] = {}
    for name, info in zero.infos.items():
        kind = "other" if info.stack is None else "layer"
        kind += " matrices" if info.matrix else " vectors"
        groups.setdefault((kind, zero.plans[name]), []).append(name)
    ends = [group for group in groups if group[1].runs == "outside"]
    layers = [group for group in groups if group not in ends]
    kinds = [kind for kind, _ in groups]
    found = []
    for kind, plan in (*layers, *ends):
        name = f"{kind}, {plan.gather_dtype}" if kinds.count(kind) > 1 else kind
        found.append(_group(config, zero, name, groups[kind, plan]))
    return ParamPlans(config.layout, found)


def _infos(config: Config) -> Mapping[str, ParamShape]:
    """Shapes of the parameters; models of images have no formula, so theirs are the model's."""
    if not architecture_of(config.model).of_images:
        return parameter_infos(config)
    device = SimpleNamespace(platform="cpu")
    mesh: Any = SimpleNamespace(devices=SimpleNamespace(flat=[device]))
    return resolve(config, mesh).infos


def _group(config: Config, zero: StateShapes, name: str, names: list[str]) -> Group:
    plan, why = explained(config, zero.infos[names[0]])
    elements = sum(elements_on_device(zero.stored[each], config.layout) for each in names)
    return Group(name, plan, why, names, elements, elements * sizes_of(config).master_itemsize)
