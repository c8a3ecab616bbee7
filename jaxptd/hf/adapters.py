"""Adapters in the files that PEFT reads and writes.

    DIR/adapter_config.json, adapter_model.safetensors

The names and dims of the tensors follow from the rules of the matrices that they are beside.
Source: PEFT 0.21, `LoraConfig`, `LoraModel` and `get_peft_model_state_dict`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxptd.config.lora import INSIDE
from jaxptd.config.training import RANDOM
from jaxptd.errors import UserError, quoted
from jaxptd.hf.adapter_rules import PREFIX, is_transposed
from jaxptd.hf.base import as_json, write_files
from jaxptd.hf.dims import Rule
from jaxptd.hf.directory import EXTRA, Directory, read_json
from jaxptd.hf.load import program_of
from jaxptd.hf.mapping import Arrays, Shapes, rules_of
from jaxptd.hf.write import DTYPES, Shard, made_aside, require_new, save_tensors
from jaxptd.run.saved import SavedParams, check_finite
from jaxptd.stores import Place, on_disk

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Rules = Mapping[str, Sequence[Rule]]


def of_adapters(rules: Rules) -> Rules:
    """The rules of adapters among all."""
    return {name: each for name, each in rules.items() if INSIDE in name}


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
    rules = rules_of(model.family, shapes)
    every = {
        tensor.removesuffix(".weight")
        for name, each in rules.items()
        for rule in each
        for tensor in rule.names(shapes[name])
        if INSIDE not in name
    }
    decoder = "CAUSAL_LM" if model.block.causal else None  # PEFT has no name for masked tokens
    task = "SEQ_2_SEQ_LM" if model.encoder_decoder else decoder
    modules = {_module(name) for name in tensors}
    ends = {name.rpartition(".")[2] for name in modules}
    alike = {name for name in every if name.rpartition(".")[2] in ends}
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "r": model.lora.rank,
        "lora_alpha": model.lora.used_alpha,
        "use_rslora": model.lora.rslora,
        "target_modules": sorted(ends if alike == modules else modules),
        "fan_in_fan_out": any(is_transposed(rules, name) for name in of_adapters(rules)),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


# ---- PEFT's -> ours ------------------------------------------------------------------------------

# Values of keys with which adapters are what this package computes; others are refused.
_READ: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
# Keys that are read elsewhere, or say nothing of what a trained adapter computes.
_OTHERS = {
    *("r", "lora_alpha", "use_rslora", "lora_dropout", "fan_in_fan_out", "target_modules"),
    *(
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "eva_config",
        "qalora_group_size",
    ),
    *("base_model_name_or_path", "revision", "task_type", "auto_mapping", "peft_version"),
    *("inference_mode", "megatron_core", "runtime_config", "ensure_weight_tying"),
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
        for key, value in self.config.items():
            known = value in _READ[key] if key in _READ else key in _OTHERS or not value
            if not known:
                raise UserError(
                    f"{path / CONFIG}: {key}={quoted(value)} is not supported; merge the adapter "
                    "into its model with PEFT, and use that"
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
        """Remarks on what differs from PEFT."""
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
            bad = np.count_nonzero(~np.isfinite(left[key].astype(np.float32)))
            check_finite(f"{self.path}: {key}", int(bad))
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
        UserError: the directory exists or cannot be written, or the run has no adapters, or trained
            other parameters.
    """
    require_new(out)
    config = saved.config
    if config.model.lora is None:
        raise UserError(
            f"the run {saved.run_dir} has no adapters (model.lora); leave out --unmerged"
        )
    if config.optimizer.frozen is not None:
        raise UserError(
            f"the run {saved.run_dir} may have trained more than its adapters (optimizer.frozen); "
            "leave out --unmerged"
        )
    rules = of_adapters(rules_of(config.model.family, saved.shapes))
    tensors = as_peft(rules, {name: saved.read(name) for name in rules})
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
    rules = of_adapters(rules_of(program.config.model.family, shapes))
    arrays = files.arrays(rules, shapes)
    linears = {name.partition(INSIDE)[0].partition(".")[2] for name in arrays}
    return section | {"targets": tuple(sorted(linears))}, arrays
