"""Checks a Hugging Face directory from headers and configs alone: can jaxptd train it?

Parts are checked one by one, so that a directory with several problems gets a line for each.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxptd.config import ModelConfig
from jaxptd.data import Tokenizer, load_tokenizer
from jaxptd.data.tokenizer_folders import SETTINGS, TOKENIZER, settings
from jaxptd.display import Table, bytes_text, count_text
from jaxptd.errors import UserError
from jaxptd.hf import mxfp4
from jaxptd.hf.directory import Directory, read_json
from jaxptd.hf.families import FAMILIES
from jaxptd.hf.load import program_of
from jaxptd.hf.mapping import map_tensors
from jaxptd.hf.read import remarks_of
from jaxptd.models.families import family_of
from jaxptd.models.family import Family

BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, mxfp4.NAME: mxfp4.BITS / 8}
CANNOT = "cannot be read: "
OWN = ", with a tokenizer of your own, --data.tokenizer"


def check(path: Path) -> dict[str, Any]:
    """Checks a directory, reading headers only.

    Returns:
        `verdict`, and what could be read. About the weights: `model`, `parameters`, `bytes`,
        `precisions`, `mapping`, `ignored`, `copies`, `remarks`, `positions` and `seq_length`. About
        the tokenizer: `tokenizer` (its kind and ids, or null), `begin` and `ends` (id -> spelling),
        and `chat_template`. `problems` has a line for each part that cannot be read.

    Raises:
        UserError: there is no such directory.
    """
    directory, problems = Directory(path), dict[str, str]()
    facts = _tried(problems, "weights", lambda: _weights(directory))
    family = _family(directory, facts)
    if family is None or family.has_vocabulary:
        facts |= _tried(problems, "tokenizer", lambda: _tokenizer(path, family))
        facts |= _tried(problems, "chat template", lambda: {"chat_template": has_template(path)})
    facts["problems"] = problems
    return facts | {"verdict": _verdict(facts, family)}


def lines(report: dict[str, Any]) -> list[str]:
    """The facts of `check`, one per line, followed by the verdict."""
    facts = dict[str, str]()
    model = report.get("model")
    if model:
        precisions = ", ".join(report["precisions"])
        facts["weights"] = f"readable, {count_text(report['parameters'])} parameters"
        facts["dtype"] = f"{precisions} in the files; runs compute in model.dtype={model['dtype']}"
        if report["positions"]:
            used = f"runs use model.seq_length={report['seq_length']}"
            facts["context length"] = f"{report['positions']} positions; {used}"
    if "tokenizer" in report:
        facts |= _tokenizer_facts(report)
    if "chat_template" in report:
        facts["chat template"] = "yes" if report["chat_template"] else "none"
    facts |= {name: CANNOT + problem for name, problem in report["problems"].items()}
    said = [f"{name}: {fact}" for name, fact in facts.items()]
    remarks = [f"remark: {line}" for line in report.get("remarks", ())]
    return [*said, *remarks, f"verdict: {report['verdict']}"]


def table(facts: dict[str, Any]) -> str:
    """The rules that read the weights, one per row."""
    title = (
        f"{count_text(facts['parameters'])} parameters, {bytes_text(facts['bytes'])} in "
        f"{', '.join(facts['precisions'])}; ignored: {', '.join(facts['ignored']) or 'nothing'}"
    )
    if facts["copies"]:
        title += f"; compared on reading: {', '.join(facts['copies'])}"
    names = ("tensor", "its dims", "parameter", "our dims")
    return str(Table(title, names, [tuple(row) for row in facts["mapping"]]))


def has_template(path: Path) -> bool:
    """True if a directory has a chat template, in a file or in `tokenizer_config.json`."""
    if any((path / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    return bool(settings(str(path)).get("chat_template")) if (path / SETTINGS).exists() else False


# ---- the parts ----------------------------------------------------------------------------------


def _tried(
    problems: dict[str, str], part: str, look: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Reads a part; if that fails, notes the problem and returns nothing."""
    try:
        return look()
    except UserError as error:
        problems[part] = str(error)
        return {}


def _weights(directory: Directory) -> dict[str, Any]:
    program = program_of(directory, directory.path)
    ours = {name: info.shape for name, info in program.infos.items()}
    model = program.config.model
    mapped = map_tensors(model.family, ours, directory.shapes, where=directory)
    for name in mapped.names.values():
        directory.tensor(name)  # refuses unreadable precisions
    rules = [rule for each in mapped.rules.values() for rule in each]
    used = mapped.names.values()
    sizes = {name: math.prod(directory.shapes[name]) for name in used}
    return {
        "model": dataclasses.asdict(model),
        "parameters": sum(sizes.values()),
        "bytes": sum(int(sizes[name] * BYTES[directory.dtypes[name]]) for name in used),
        "precisions": sorted({directory.dtypes[name] for name in used}),
        "mapping": [[r.name, r.tensor_dims, r.ours, r.dims] for r in rules],
        "ignored": list(mapped.ignored),
        "copies": dict(mapped.copies),
        "remarks": remarks_of(directory),
        "positions": model.max_positions,
        "seq_length": model.seq_length,
    }


def _family(directory: Directory, facts: dict[str, Any]) -> Family | None:
    """The family of a directory's model; None if `config.json` names no supported one."""
    if "model" in facts:
        return family_of(ModelConfig(**facts["model"]))
    kind = FAMILIES.get(str(_config_of(directory).get("model_type")))
    return family_of(ModelConfig(family=kind.name)) if kind else None  # type: ignore[arg-type]


def _config_of(directory: Directory) -> dict[str, Any]:
    try:
        return directory.config
    except UserError:
        return {}


def _tokenizer(path: Path, family: Family | None) -> dict[str, Any]:
    if not (path / TOKENIZER).exists():
        return {"tokenizer": None}
    tokenizer = load_tokenizer(str(path))
    of_text = family is None or family.objective is None  # others place special tokens themselves
    model = read_json(path / TOKENIZER).get("model")
    kind = model.get("type") if isinstance(model, dict) else None
    return {
        "tokenizer": {"kind": kind, "ids": tokenizer.vocab_size},
        "begin": _spelled(tokenizer, tokenizer.begin) if of_text else None,
        "ends": _spelled(tokenizer, tokenizer.ends),
    }


def _spelled(tokenizer: Tokenizer, ids: tuple[int, ...]) -> dict[str, str | None]:
    """The spellings of special tokens by their ids; null where a token is not special."""
    names = {number: name for name, number in tokenizer.special.items()}
    return {str(number): names.get(number) for number in ids}


def _tokenizer_facts(report: dict[str, Any]) -> dict[str, str]:
    """The lines about the tokenizer, and how texts begin and end."""
    if report["tokenizer"] is None:
        return {"tokenizer": f"none: there is no {TOKENIZER}; give --data.tokenizer"}
    kind, ids = report["tokenizer"]["kind"], report["tokenizer"]["ids"]
    model = report["model"]["vocab_size"] if "model" in report else None
    beyond = ", and texts with larger ids are refused" if model and ids > model else ""
    facts = {"tokenizer": f"{kind}, {ids} ids{f'; the model has {model}' if model else ''}{beyond}"}
    if report["begin"] is not None:
        facts["begin"] = _named(report["begin"]) or "none"
    return facts | {"ends": _named(report["ends"])}


def _named(tokens: dict[str, str | None]) -> str:
    return ", ".join(f"{name} ({number})" if name else number for number, name in tokens.items())


def _verdict(facts: dict[str, Any], family: Family | None) -> str:
    if facts["problems"]:
        return CANNOT + next(iter(facts["problems"].values()))
    writes = family is not None and family.writing is not None
    bytes_only = OWN if "tokenizer" in facts and facts["tokenizer"] is None else ""
    return f"can be trained{' and generated from' if writes else ''}{bytes_only}"
