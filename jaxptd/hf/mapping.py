"""Maps each tensor of a file to a part of a parameter, and names parameters accordingly.

A tensor or parameter without its counterpart is an error.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np

from jaxptd.config.lora import INSIDE
from jaxptd.errors import UserError, quoted
from jaxptd.fields import check_argument
from jaxptd.hf.adapter_rules import adapter_rules
from jaxptd.hf.dims import Rule
from jaxptd.hf.families import Tensors, family_named
from jaxptd.step import Program

Arrays = dict[str, np.ndarray]


# ---- parameters and gradients under Hugging Face's names -----------------------------------------


def names(
    program: Program,
    params: Mapping[str, Any],
    *,
    is_canonical: bool | None = None,
    gradients: bool | None = None,
) -> Arrays:
    """Converts parameters or gradients to the names and shapes of Hugging Face's files.

    Args:
        program: has the model.
        params: some or all of its parameters, or their gradients: in canonical form, as
            `Run.loss_and_gradients` and `Program.canonical` return them, or as in `run.state`.
        is_canonical: which of the two forms. None decides by shape and type, taking numpy arrays as
            canonical. Only in pipelines can JAX arrays of both forms have the same shape.
        gradients: whether these are gradients. Only families whose files have other numbers, such
            as those of norms less 1 (Gemma), must be told.

    Raises:
        UserError: an array is not a parameter of the model, has another shape, or could be of
            either form, or be a gradient; or the family has no Hugging Face names.
    """
    check_argument("jaxptd.hf.names", "program", program, Program)
    check_argument("jaxptd.hf.names", "params", params, dict)
    tensors: Arrays = {}
    ours = {name: info.shape for name, info in program.infos.items()}
    rules = rules_of(program.config.model.family, ours)
    for name, x in canonical(program, params, is_canonical):
        for rule in rules[name]:
            if rule.plus and gradients is None:
                raise UserError(
                    f"{name} is {rule.plus:g} more than the tensor in a file, and its gradient is "
                    "the same: pass gradients=True for gradients, else False"
                )
            tensors |= rule.tensors(x - rule.plus if rule.plus and not gradients else x)
    return tensors


def canonical(
    program: Program, params: Mapping[str, Any], is_canonical: bool | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Each parameter, canonical, one at a time on the host. Arguments and errors as of `names`."""
    stored = program.states.stored
    if unknown := [name for name in params if name not in stored]:
        raise UserError(f"the model has no parameter {quoted(unknown[0])}; see Program.infos")
    shapes = {name: tuple(np.shape(x)) for name, x in params.items()}
    guess = is_canonical is None
    is_stored = not is_canonical and (
        not guess or any(shapes[name] != stored[name].shape for name in params)
    )
    for name, x in params.items():
        each = stored[name]
        if shapes[name] != (each.stored_shape if is_stored else each.shape):
            raise UserError(
                f"{name} is {list(shapes[name])}; the canonical parameter is {list(each.shape)}"
            )
        if guess and not is_stored and isinstance(x, jax.Array) and _is_ambiguous(program, name):
            raise UserError(
                f"{name} has this shape both in canonical form and in the state; pass "
                "is_canonical=True for the result of program.canonical, else False"
            )
        yield name, np.asarray(each.to_canonical(x) if is_stored else x)


def _is_ambiguous(program: Program, name: str) -> bool:
    """True if the state holds a parameter in another order but the same shape."""
    each = program.states.stored[name]
    return each.shape == each.stored_shape and not each.is_canonical


HEAD = "lm_head.weight"  # exists if the output layer has its own table
LISTED = 3

Shapes = Mapping[str, Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Mapped:
    """The tensors of a file, and the parameters that they make up.

    Args:
        rules: for each of our parameters.
        names: name in a rule -> name in the file.
        ignored: names in the file of tensors that hold no parameter.
        copies: name in the file of a tensor that must equal another -> the other's name.
    """

    rules: Mapping[str, Sequence[Rule]]
    names: Mapping[str, str]
    ignored: Sequence[str]
    copies: Mapping[str, str]


def tensors_of(family: str) -> Tensors:
    """The tensors of one of our families. Raises UserError if Hugging Face has no such family."""
    return family_named(family)[1].tensors


def rules_of(family: str, ours: Shapes) -> dict[str, list[Rule]]:
    """The rules for each parameter of one of our models, by name and number of dims.

    Raises:
        UserError: the family has no Hugging Face tensors, or none for a parameter, or the model
            lacks a parameter that it needs for them.
    """
    tensors, layers = tensors_of(family), _layers(ours)
    base = {name: shape for name, shape in ours.items() if INSIDE not in name}
    by_name = {name: _rules_for(name, shape, tensors.rules, layers) for name, shape in base.items()}
    if lacking := [name for name in tensors.needs if name not in ours]:
        raise UserError(
            f"model.family={family} without {lacking[0]} has no Hugging Face names; use as many "
            "levels as the model that the family is named after"
        )
    held = [name for name in base if _plain(name)[0] not in tensors.zeros]
    if without := [name for name in held if not by_name[name]]:
        raise UserError(
            f"{quoted(without[0])} has no counterpart in Hugging Face's model.family={family}; "
            "use the options of the model that the family is named after"
        )
    return by_name | adapter_rules(by_name, ours)


_RUN = re.compile(r"blocks_(\d+)\.")  # begins the names of a run of layers, see `models/decoder.py`
_MODULE = re.compile(r"mtp_(\d+)\.")  # begins the names of an MTP module
OF_MODULE = "mtp."  # begins in a rule the names of what a module has besides a layer's parameters


def _plain(name: str) -> tuple[str, int]:
    """The name of a parameter if all layers were of one kind, and its stack's first layer."""
    run = _RUN.match(name)
    return (f"blocks.{name[run.end() :]}", int(run[1])) if run else (name, 0)


def _layers(ours: Shapes) -> int:
    """The number of a decoder's layers."""
    stacks = {name.partition(".")[0]: shape[0] for name, shape in ours.items() if shape}
    return sum(count for stack, count in stacks.items() if re.fullmatch(r"blocks(_\d+)?", stack))


def _rules_for(name: str, shape: Sequence[int], rules: Sequence[Rule], layers: int) -> list[Rule]:
    """The rules of one parameter, also of one that is in a run of layers or in an MTP module."""
    if module := _MODULE.match(name):
        rest, number = name[module.end() :], layers + int(module[1]) - 1
        kinds = (f"{OF_MODULE}{rest}", len(shape)), (f"blocks.{rest}", len(shape) + 1)
        return [r.of_layer(name, number) for r in rules if (r.ours, r.rank) in kinds]
    plain, first = _plain(name)
    found = [rule for rule in rules if (rule.ours, rule.rank) == (plain, len(shape))]
    if plain == name:
        return found
    return [dataclasses.replace(rule, ours=name, first=rule.first + first) for rule in found]


def copies_of(family: str, ours: Shapes) -> dict[str, str]:
    """Tensors that files have twice: a copy's name -> the other's; those of MTP modules' tables."""
    head = "head.table" if "head.table" in ours else "tokens.table"
    tables, rules, layers = tensors_of(family).of_modules, rules_of(family, ours), _layers(ours)
    modules = sorted({int(found[1]) for name in ours if (found := _MODULE.match(name))})
    return {
        copy.format(layers + k - 1): rules[head if table == "head.table" else table][0].name
        for k in modules
        for copy, table in tables
    }


def map_tensors(family: str, ours: Shapes, theirs: Shapes, *, where: object) -> Mapped:
    """Finds the tensor of each part of each parameter.

    Args:
        family: of the model.
        ours: canonical shapes of the parameters.
        theirs: shapes of the tensors.
        where: the directory, for messages.

    Raises:
        UserError: a tensor is unknown, duplicate, missing, or has another shape.
    """
    kind = family_named(family)[1]
    rules = _as_stored(kind.tensors, rules_of(family, ours), ours, theirs)
    wanted = {
        name: (rule, ours[rule.ours])
        for each in rules.values()
        for rule in each
        for name in rule.names(ours[rule.ours])
    }
    names, others = _named(kind.tensors, set(wanted), list(theirs), where)
    aliases = {
        name: real for name in others for real in kind.tensors.others(name) if real in wanted
    }
    of_modules = copies_of(family, ours)
    aliases |= {name: of_modules[name] for name in others if name in of_modules}
    ignored = _ignored(kind.tensors, [name for name in others if name not in aliases], where)
    names = {real: name for name, real in aliases.items()} | names
    for name, real in [*aliases.items(), *((name, real) for real, name in names.items())]:
        rule, shape = wanted[real]
        _check_shape(f"{where}: {name}", rule, theirs[name], rule.shape(shape))
    if missing := [name for name in wanted if name not in names]:
        raise UserError(
            f"{where} has no tensor {_listed(missing)}; use a directory that has all tensors of "
            f"{kind.architecture} with its config.json"
        )
    copies = {name: names[real] for name, real in aliases.items() if names[real] != name}
    return Mapped(rules, names, ignored, copies)


def _as_stored(
    tensors: Tensors, usual: Mapping[str, list[Rule]], ours: Shapes, theirs: Shapes
) -> Mapping[str, list[Rule]]:
    """The rules of each parameter: the alternative ones if the files have one of their tensors."""
    if not tensors.alternatives:
        return usual
    stored = {
        real for name in theirs for real in (*_spellings(tensors, name), *tensors.others(name))
    }
    found = dict(usual)
    for name, shape in ours.items():
        other = _rules_for(name, shape, tensors.alternatives, _layers(ours))
        if any(each in stored for rule in other for each in rule.names(shape)):
            found[name] = other
    return found


def _spellings(tensors: Tensors, name: str) -> tuple[str, str, str]:
    """A name in a file, with the family's prefix, and without it."""
    return name, f"{tensors.prefix}{name}", name.removeprefix(tensors.prefix)


def file_name(family: str, name: str, stored: Sequence[str]) -> str | None:
    """A tensor's name in a file: as it is, without the family's prefix, or with another one."""
    prefix = tensors_of(family).prefix
    names = (name, name.removeprefix(prefix), f"{prefix}{name}")
    return next((each for each in names if each in stored), None)


def _named(
    tensors: Tensors, wanted: Set[str], stored: Sequence[str], where: object
) -> tuple[dict[str, str], list[str]]:
    """The name in the file of each wanted tensor, and the remaining names."""
    names, others = dict[str, str](), list[str]()
    for name in stored:
        full = next((each for each in _spellings(tensors, name) if each in wanted), name)
        if full in names:
            raise UserError(
                f"{where} has {names[full]} and {name}, two names of one tensor; remove one"
            )
        if full in wanted:
            names[full] = name
        else:
            others.append(name)
    return names, others


def _ignored(tensors: Tensors, names: list[str], where: object) -> list[str]:
    """These names. Raises UserError if one of them might hold a parameter."""
    plain = {name: name.removeprefix(tensors.prefix) for name in names}
    further = [
        x.removesuffix(end) for x in plain.values() for end in tensors.further if x.endswith(end)
    ]
    unknown = [
        name
        for name, x in plain.items()
        if not any(re.fullmatch(each, x) for each in tensors.ignored)
        and not x.startswith(tuple(further))
    ]
    if unknown:
        raise UserError(
            f"{where} has {_listed(unknown)}, unknown to the model of its config.json; use a "
            "directory with that model alone, without adapters or quantization"
        )
    return names


def _check_shape(what: str, rule: Rule, shape: Sequence[int], wanted: Sequence[int]) -> None:
    """Raises UserError unless a tensor has the shape, or more rows where the rule allows it."""
    rows = shape[:1] if rule.longer and list(shape[:1]) >= list(wanted[:1]) else wanted[:1]
    if list(shape) != [*rows, *wanted[1:]]:
        raise UserError(
            f"{what} is {list(shape)}, but the model needs {list(wanted)}; use the sizes of its "
            "config.json"
        )


def _listed(names: Sequence[str]) -> str:
    rest = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(quoted(name) for name in names[:LISTED]) + rest
