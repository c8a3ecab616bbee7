"""Adapters in the files that PEFT reads and writes.

    DIR/adapter_config.json, adapter_model.safetensors

The names and dims of the tensors follow from the rules of the matrices that they are beside.
Source: PEFT 0.21, `LoraConfig`, `LoraModel` and `get_peft_model_state_dict`.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxptd.config.lora import INSIDE
from jaxptd.config.training import RANDOM
from jaxptd.errors import UserError, quoted
from jaxptd.hf.base import as_json, write_files
from jaxptd.hf.dims import Rule
from jaxptd.hf.directory import EXTRA, Directory, read_json
from jaxptd.hf.load import program_of
from jaxptd.hf.mapping import Arrays, Shapes, rules_of
from jaxptd.hf.write import DTYPES, Shard, made_aside, require_new, save_tensors
from jaxptd.run.adapters import letters_of
from jaxptd.run.saved import SavedParams
from jaxptd.stores import Place, on_disk

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
TASKS = {"t5": "SEQ_2_SEQ_LM", "bert": None}  # of PEFT; others are CAUSAL_LM
Rules = Mapping[str, list[Rule]]


# ---- the rules of adapters -----------------------------------------------------------------------


def adapter_rules(family: str, shapes: Shapes, letters: Mapping[str, str]) -> Rules:
    """The rules of each adapter's parameters.

    Args:
        family: of the model.
        shapes: of all parameters, canonical.
        letters: those of the dims of adapters, by their names, as in `ParamShape.matrix`.

    Returns:
        none for an adapter where PEFT has one for several of ours.

    Raises:
        UserError: the family has no Hugging Face names.
    """
    base = {name: shape for name, shape in shapes.items() if INSIDE not in name}
    found, of_base = dict[str, list[Rule]](), rules_of(family, base)
    for first in (name for name in shapes if name.endswith(f"{INSIDE}a")):
        linear = first.removesuffix(f"{INSIDE}a")
        pairs = [_pair(rule, linear, letters[first]) for rule in of_base[f"{linear}.w"]]
        known = [pair for pair in pairs if pair]
        found[first], found[f"{linear}{INSIDE}b"] = ([pair[i] for pair in known] for i in (0, 1))
    return found


def _pair(rule: Rule, linear: str, matrix: str) -> tuple[Rule, Rule] | None:
    """The rules of A and of B beside a matrix; None: PEFT has one adapter for several of ours.

    matrix: the letters of A's dims.
    """
    dims = re.findall(r"\([^)]*\)|\S+", rule.dims)
    stack = int(matrix.startswith("s"))
    begin, end = stack + matrix.count("r"), stack + matrix.count("r") + matrix.count("s") - stack
    layers, rows, parts, columns = dims[:stack], dims[stack:begin], dims[begin:end], dims[end:]
    ends = re.findall(r"\([^)]*\)|\S+", rule.tensor_dims)
    reads = _factors(rows)
    (inner,) = [each for each in ends if _factors([each]) <= reads]
    (outer,) = [each for each in ends if each != inner]
    if _factors(parts) & _factors([outer]):
        return None
    module = PREFIX + rule.name.removesuffix(".weight")
    a = (*layers, *rows, *parts, "rank"), f"{module}.lora_A.weight", f"rank {inner}"
    b = (*layers, "rank", *parts, *columns), f"{module}.lora_B.weight", f"{outer} rank"
    first, second = (
        dataclasses.replace(
            rule, ours=f"{linear}{INSIDE}{x}", dims=" ".join(own), name=name, tensor_dims=tensor
        )
        for x, (own, name, tensor) in zip("ab", (a, b), strict=True)
    )
    return first, second


def _factors(dims: list[str]) -> set[str]:
    return {each for dim in dims for each in dim.strip("()").split()}


# ---- ours -> PEFT's ------------------------------------------------------------------------------


def as_peft(rules: Rules, arrays: Mapping[str, np.ndarray]) -> Arrays:
    """The tensors of adapters, without those that are zero in both of their matrices.

    arrays: the adapters' parameters, canonical.

    Raises:
        UserError: PEFT has one adapter for several of ours.
    """
    tensors: Arrays = {}
    for name in rules:
        if not rules[name]:
            raise UserError(
                f"PEFT has one adapter for queries, keys and values where {name} has three; leave "
                "out --unmerged, or train without it (model.lora.targets)"
            )
        for rule in rules[name]:
            tensors |= rule.tensors(arrays[name])
    used = {_module(name) for name, x in tensors.items() if np.any(x)}
    return {name: x for name, x in tensors.items() if _module(name) in used}


def _module(tensor: str) -> str:
    """The module of the base model that a tensor of an adapter is beside."""
    return tensor.removeprefix(PREFIX).rpartition(".lora_")[0]


def config_of_adapters(
    model: Any, shapes: Shapes, tensors: Mapping[str, Any], base: str | None
) -> dict[str, Any]:
    """The content of `adapter_config.json`.

    Args:
        model: the model's config.
        shapes: of all parameters, canonical.
        tensors: of the adapters.
        base: name of the model that they are beside.
    """
    own = {name: shape for name, shape in shapes.items() if INSIDE not in name}
    rules = [rule for each in rules_of(model.family, own).values() for rule in each]
    every = {name.removesuffix(".weight") for r in rules for name in r.names(own[r.ours])}
    modules = {_module(name) for name in tensors}
    ends = {name.rpartition(".")[2] for name in modules}
    alike = {name for name in every if name.rpartition(".")[2] in ends}
    return {
        "peft_type": "LORA",
        "task_type": TASKS.get(model.family, "CAUSAL_LM"),
        "base_model_name_or_path": base,
        "r": model.lora.rank,
        "lora_alpha": model.lora.used_alpha,
        "use_rslora": model.lora.rslora,
        "target_modules": sorted(ends if alike == modules else modules),
        "fan_in_fan_out": model.family == "gpt",  # its matrices are transposed
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


# ---- PEFT's -> ours ------------------------------------------------------------------------------

# Values of keys with which adapters are what this package computes; others are refused.
_READ: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "lora_bias": (False,),
    "use_qalora": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "layer_replication": (None,),
    "megatron_config": (None,),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}


class AdapterFiles:
    """A directory with an adapter.

    Args:
        path: of the directory.

    Raises:
        UserError: it is not such a directory, or its adapter is of another kind.
    """

    def __init__(self, path: Place) -> None:
        self.path = path
        self.config = read_json(path / CONFIG)
        for key, values in _READ.items():
            if key in self.config and self.config[key] not in values:
                raise UserError(
                    f"{path / CONFIG}: {key}={quoted(self.config[key])} is not supported; merge "
                    "the adapter into its model with PEFT, and use that"
                )
        self.tensors = self._read()

    def _read(self) -> Arrays:
        try:
            from safetensors.numpy import load_file  # the optional extra
        except ImportError as error:
            raise UserError(f"{self.path} {EXTRA}") from error
        try:
            return dict(load_file(on_disk(self.path / WEIGHTS)))
        except Exception as error:  # safetensors has errors of its own
            remedy = "save it again with PEFT, as safetensors"
            raise UserError(f"cannot read {self.path / WEIGHTS}: {error}; {remedy}") from error

    def section(self) -> dict[str, Any]:
        """The fields of `model.lora`, without its targets."""
        rank, alpha = self.config.get("r", 8), self.config.get("lora_alpha", 8)
        return {"rank": rank, "alpha": alpha, "rslora": bool(self.config.get("use_rslora", False))}

    def remarks(self) -> list[str]:
        """What is not as in PEFT."""
        rate = self.config.get("lora_dropout") or 0
        return [f"{self.path}: lora_dropout={rate} has no effect here"] if rate else []

    def arrays(self, rules: Rules, shapes: Shapes) -> Arrays:
        """Our parameters, canonical; zeros where the files have no adapter.

        Args:
            rules: of adapters on every matrix that can have one.
            shapes: of all parameters, canonical.

        Returns:
            those of matrices with at least one tensor.

        Raises:
            UserError: a tensor is unknown, lacks its partner, or has another shape.
        """
        pairs = ({_module(x) for x in self.tensors if f".lora_{each}." in x} for each in "AB")
        if single := min(set.symmetric_difference(*pairs), default=None):
            raise UserError(
                f"{self.path}: {quoted(single)} has one of the two matrices of an adapter; save it "
                "again with PEFT"
            )
        found, left = Arrays(), dict(self.tensors)
        for name, each in rules.items():
            array = np.zeros(shapes[name], np.float32)
            there = [self._fill(rule, array, left) for rule in each]
            if any(there):
                found[name] = array
        if left:
            raise UserError(
                f"{self.path}: no matrix of the model can have the adapter {quoted(min(left))}; "
                "merge it into its model with PEFT, and use that"
            )
        return found

    def _fill(self, rule: Rule, array: np.ndarray, left: Arrays) -> bool:
        """Puts the tensors of a rule into their places; True if there is one."""
        there = False
        for index in np.ndindex(*array.shape[: rule.numbered]):
            key = rule.tensor_at(index)
            if key not in left:
                continue
            if rule.shape(array.shape) != left[key].shape:
                raise UserError(
                    f"{self.path}: {key} is {list(left[key].shape)}, but the model needs "
                    f"{list(rule.shape(array.shape))}; name the model that it was trained on"
                )
            there, whole = True, tuple((0, n) for n in array.shape)
            x = rule.read(left.pop(key).astype(np.float32), array.shape, rule.ranges(whole))
            place: list[Any] = [*index, *[slice(None)] * (array.ndim - len(index))]
            if rule.entry:
                place[rule.entry[0]] = rule.entry[1]
            array[tuple(place)] = x
        return there


# ---- runs ----------------------------------------------------------------------------------------


def write_adapter(saved: SavedParams, out: Path, *, dtype: str | None = None) -> list[Shard]:
    """Writes the adapters of a run, without its model.

    Args:
        saved: the run's parameters.
        out: the directory; must not exist yet.
        dtype: of the tensors. None keeps the saved precision.

    Raises:
        UserError: the directory exists or cannot be written, or the run has no adapters.
    """
    require_new(out)
    config = saved.config
    if config.model.lora is None:
        raise UserError(
            f"the run {saved.run_dir} has no adapters (model.lora); leave out --unmerged"
        )
    letters = letters_of(config)
    rules = adapter_rules(config.model.family, saved.shapes, letters)
    tensors = as_peft(rules, {name: saved.read(name) for name in letters})
    kind = DTYPES[dtype] if dtype else None
    tensors = {name: x.astype(kind or x.dtype) for name, x in tensors.items()}
    start = config.checkpoint.start
    base = None if start in (None, RANDOM) else str(start)
    settings = config_of_adapters(config.model, saved.shapes, tensors, base)
    with made_aside(out) as aside:
        write_files(aside, {CONFIG: as_json(settings)})
        save_tensors(tensors, aside / WEIGHTS, beside=aside / CONFIG)
    return [Shard(sorted(tensors), sum(x.nbytes for x in tensors.values()))]


def lora_of(files: AdapterFiles, directory: Directory) -> tuple[dict[str, Any], Arrays]:
    """The section `model.lora` of an adapter of a directory's model, and its parameters.

    Raises:
        UserError: the adapter is of another model.
    """
    section = files.section()
    program = program_of(directory, directory.path, lora=section)
    shapes = {name: info.shape for name, info in program.infos.items()}
    letters = {name: info.matrix for name, info in program.infos.items()}
    rules = adapter_rules(program.config.model.family, shapes, letters)
    arrays = files.arrays(rules, shapes)
    linears = {name.partition(INSIDE)[0].partition(".")[2] for name in arrays}
    return section | {"targets": tuple(sorted(linears))}, arrays
