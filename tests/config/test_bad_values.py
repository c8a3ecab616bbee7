"""Bad values passed in Python: constructing the config names the field and the remedy."""

import dataclasses
import math
import types
import typing
from pathlib import Path

import numpy as np
import pytest

from jaxptd.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ProcessesConfig,
    TrainConfig,
    from_dict,
)
from jaxptd.errors import UserError
from jaxptd.layout import Layout

LONG = "a" * 200_000
HUGE = 10**10_000  # more digits than Python converts to text

# A section, the values of its fields, and parts of the message.
VALUES = [
    (ModelConfig, {"family": "ul2"}, "model.family=ul2: use one of gpt"),
    (ModelConfig, {"attention": "flash"}, "model.attention=flash: use one of auto, xla, cudnn"),
    (ModelConfig, {"products": "int8"}, "model.products=int8: use one of native, fp8"),
    (ModelConfig, {"remat": True}, "model.remat=True: use one of none, dots, attention, full"),
    (ModelConfig, {"remat": None}, "model.remat=None: use one of none, dots"),
    (ModelConfig, {"dtype": np.float32}, "model.dtype=<class 'numpy.float32'>: use one of float32"),
    (ModelConfig, {"dtype": LONG}, "model.dtype=aaaaaaaa", "...: use one of float32, bfloat16"),
    (ModelConfig, {"tie_embeddings": "no"}, "model.tie_embeddings='no': use true or false"),
    (ModelConfig, {"tie_embeddings": 0}, "model.tie_embeddings=0: use true or false"),
    (ModelConfig, {"scan_layers": None}, "model.scan_layers=None: use true or false"),
    (ModelConfig, {"num_layers": "4"}, "model.num_layers='4': use a whole number"),
    (ModelConfig, {"num_layers": 4.0}, "model.num_layers=4.0: use a whole number"),
    (ModelConfig, {"num_layers": True}, "model.num_layers=True: use a whole number"),
    (ModelConfig, {"num_layers": None}, "model.num_layers=None: use a whole number"),
    (ModelConfig, {"num_layers": math.nan}, "model.num_layers=nan: use a whole number"),
    (ModelConfig, {"num_layers": math.inf}, "model.num_layers=inf: use a whole number"),
    (ModelConfig, {"num_layers": [4]}, "model.num_layers=[4]: use a whole number"),
    (ModelConfig, {"num_layers": 4 + 0j}, "model.num_layers=(4+0j): use a whole number"),
    (ModelConfig, {"num_layers": b"4"}, "model.num_layers=b'4': use a whole number"),
    (ModelConfig, {"num_layers": np.array(4)}, "model.num_layers=array(4): use a whole number"),
    (ModelConfig, {"num_layers": np.bool_(True)}, "model.num_layers=np.True_: use a whole number"),
    (ModelConfig, {"num_layers": np.float32(4)}, "model.num_layers=np.float32(4.0): use a whole"),
    (ModelConfig, {"num_layers": HUGE}, "model.num_layers=<int>: use a number below 2147483648"),
    (ModelConfig, {"num_layers": -HUGE}, "model.num_layers=<int>: use a number above -2147483648"),
    (ModelConfig, {"num_layers": LONG}, "model.num_layers='aaaaaaa", "...: use a whole number"),
    (ModelConfig, {"num_layers": list(range(9999))}, "model.num_layers=[0, 1, 2", "...: use a wh"),
    (ModelConfig, {"num_layers": 0}, "model.num_layers=0 must be a number above 0"),
    (ModelConfig, {"vocab_size": "257"}, "model.vocab_size='257': use a whole number or null"),
    (ModelConfig, {"vocab_size": False}, "model.vocab_size=False: use a whole number or null"),
    (ModelConfig, {"vocab_size": 2**31}, "model.vocab_size=2147483648: use a number below 214"),
    (ModelConfig, {"dropout": "0.1"}, "model.dropout='0.1': use a number"),
    (ModelConfig, {"dropout": True}, "model.dropout=True: use a number"),
    (ModelConfig, {"dropout": 1}, "model.dropout=1.0 must be in [0, 1)"),
    (ModelConfig, {"dropout": 1 - 1e-10}, "model.dropout=0.9999999999 drops everything", "or less"),
    (ModelConfig, {"hidden_size": 1, "num_heads": 1}, "model.hidden_size=1 with model.norm=layer"),
    (ModelConfig, {"dropout": np.float32("nan")}, "model.dropout=nan must be in [0, 1)"),
    (ModelConfig, {"num_heads": 7}, "model.hidden_size=256 does not split over model.num_heads=7"),
    (Layout, {"tp": "2"}, "layout.tp='2': use a whole number"),
    (Layout, {"tp": 2.0}, "layout.tp=2.0: use a whole number"),
    (Layout, {"dp": True}, "layout.dp=True: use a whole number"),
    (Layout, {"pp": None}, "layout.pp=None: use a whole number"),
    (Layout, {"cp": HUGE}, "layout.cp=<int>: use a number below 2147483648"),
    (Layout, {"row": (2, 2)}, "layout.row=(2, 2): use a whole number"),
    (Layout, {"col": 0}, "layout.col=0: an axis has at least one device; use 1 or more"),
    (Layout, {"sequence_parallel": "false"}, "layout.sequence_parallel='false': use true or false"),
    (Layout, {"collective_matmul": 1}, "layout.collective_matmul=1: use true or false"),
    (Layout, {"ring": "foo"}, "layout.ring=foo: use one of zigzag, blockwise, rsa, gather"),
    (Layout, {"ring": True}, "layout.ring=True: use one of zigzag, blockwise, rsa, gather"),
    (Layout, {"matmul2d": "cannnon"}, "layout.matmul2d=cannnon: use one of gather, summa, fox"),
    (Layout, {"matmul2d_slices": "2"}, "layout.matmul2d_slices='2': use a whole number"),
    (Layout, {"attention2d": None}, "layout.attention2d=None: use one of heads, blocks"),
    (Layout, {"schedule": 1}, "layout.schedule=1: use a text"),
    (Layout, {"schedule": "1f2b"}, "layout.schedule=1f2b: use one of 1f1b, gpipe"),
    (Layout, {"schedule": "a\0.csv"}, r"layout.schedule='a\x00.csv': it has a null byte; remove"),
    (Layout, {"virtual_stages": "2"}, "layout.virtual_stages='2': use a whole number or null"),
    (Layout, {"stage_layers": 3}, "layout.stage_layers=3: use a list, each item a whole number"),
    (Layout, {"stage_layers": "12"}, "layout.stage_layers='12': use a list, each item a whole"),
    (Layout, {"stage_layers": (1, 2.0)}, "layout.stage_layers=(1, 2.0): use a list, each"),
    (Layout, {"stage_layers": {1: 2}}, "layout.stage_layers={1: 2}: use a list"),
    (Layout, {"zero": True}, "layout.zero=True: use one of 0, 1, 2, 3"),
    (Layout, {"zero": "1"}, "layout.zero=1: use one of 0, 1, 2, 3"),
    (Layout, {"zero": 1.0}, "layout.zero=1.0: use one of 0, 1, 2, 3"),
    (Layout, {"zero": 4}, "layout.zero=4: use one of 0, 1, 2, 3"),
    (
        Layout,
        {"offload": "all"},
        "layout.offload='all': use one of none, optimizer, parameters, activations or ",
    ),
    (Layout, {"offload": ["none"]}, "layout.offload=['none']: use one of none, optimizer, param"),
    (Layout, {"offload": ["optimizer"] * 2}, "names one twice; name it once"),
    (DataConfig, {"documents": "split"}, "data.documents=split: use one of joined, apart"),
    (DataConfig, {"source": 3}, "data.source=3: use a text or a list, each item a text"),
    (DataConfig, {"source": None}, "data.source=None: use a text or a list"),
    (DataConfig, {"source": ["a", 3]}, "data.source=['a', 3]: use a text or a list"),
    (DataConfig, {"source": {"a"}}, "data.source={'a'}: use a text or a list"),
    (DataConfig, {"source": b"a"}, "data.source=b'a': use a text or a list"),
    (DataConfig, {"source": ["a", "b\0"]}, "data.source=['a', 'b", "it has a null byte; remove it"),
    (DataConfig, {"source": []}, "data.source is empty; name stdlib, or paths or globs"),
    (DataConfig, {"source": {}}, "data.source={}; name stdlib, or paths or globs"),
    (DataConfig, {"source": {"a": 0}}, "data.source: 'a' has the weight 0.0; use a number above 0"),
    (DataConfig, {"source": {"b": 1, "a": -1}}, "data.source: 'a' has the weight -1.0; use a numb"),
    (DataConfig, {"source": {"a": math.nan}}, "data.source: 'a' has the weight nan; use a number"),
    (DataConfig, {"source": {"a": math.inf}}, "data.source: 'a' has the weight inf; use a number"),
    (DataConfig, {"source": {"a": 1, "b": 1e-7}}, "'b' has the weight 1e-07, less than a million"),
    (DataConfig, {"source": {"a": 1e30}}, "data.source={'a': 1e+30}: use a number below"),
    (DataConfig, {"source": {"a": "1"}}, "or a dict from a text to a number"),
    (DataConfig, {"source": {"a": True}}, "or a dict from a text to a number"),
    (DataConfig, {"source": {1: 0.5}}, "data.source={1: 0.5}: use a text or a list"),
    (DataConfig, {"source": {"a\0": 1}}, "data.source={'a", "it has a null byte; remove it"),
    (DataConfig, {"source": {"a": 1, Path("a"): 2}}, "data.source={'a': 1", "a is given twice; gi"),
    (DataConfig, {"source": LONG}, "data.source='aaaaaa", "no path is so long; use at most"),
    (DataConfig, {"validation": {}}, "data.validation={}; name a set, as {law: law.jsonl}, or"),
    (DataConfig, {"prompt_field": 3}, "data.prompt_field=3: use a text or null"),
    (DataConfig, {"prompt_field": ""}, "data.prompt_field is empty; name the prompts' field, or"),
    (DataConfig, {"prompt_field": "text"}, "data.prompt_field is the field of the answers; name"),
    (DataConfig, {"tokenizer": None}, "data.tokenizer=None: use a text"),
    (
        DataConfig,
        {"tokenizer": "\udcff"},
        r"data.tokenizer='\udcff': it is not valid Unicode; use text",
    ),
    (DataConfig, {"validation_fraction": "5%"}, "data.validation_fraction='5%': use a number"),
    (DataConfig, {"validation_fraction": 1.5}, "data.validation_fraction=1.5 must be in [0, 1)"),
    (OptimizerConfig, {"decay": "step"}, "optimizer.decay=step: use one of cosine, linear, wsd"),
    (OptimizerConfig, {"learning_rate": "1e-3"}, "optimizer.learning_rate='1e-3': use a number"),
    (OptimizerConfig, {"learning_rate": None}, "optimizer.learning_rate=None: use a number"),
    (OptimizerConfig, {"learning_rate": HUGE}, "optimizer.learning_rate=<int>: use a number below"),
    (OptimizerConfig, {"learning_rate": 1e30}, "optimizer.learning_rate=1e+30: use a number below"),
    (OptimizerConfig, {"grad_clip": -(10**30)}, "optimizer.grad_clip=-1000", "above -2147483648"),
    (OptimizerConfig, {"grad_clip": math.inf}, "optimizer.grad_clip=inf must be a number, 0 or"),
    (OptimizerConfig, {"warmup_steps": 0.5}, "optimizer.warmup_steps=0.5: use a whole number"),
    (TrainConfig, {"steps": "100"}, "train.steps='100': use a whole number"),
    (TrainConfig, {"steps": 1e3}, "train.steps=1000.0: use a whole number"),
    (TrainConfig, {"steps": 2**31}, "train.steps=2147483648: use a number below 2147483648"),
    (TrainConfig, {"seed": 2**32}, "train.seed=4294967296: use a number below 4294967296"),
    (TrainConfig, {"seed": -1}, "train.seed=-1 must be a number, 0 or more"),
    (TrainConfig, {"run_dir": 3}, "train.run_dir=3: use a text"),
    (TrainConfig, {"run_dir": b"runs"}, "train.run_dir=b'runs': use a text"),
    (TrainConfig, {"run_dir": "a\0b"}, r"train.run_dir='a\x00b': it has a null byte; remove it"),
    (TrainConfig, {"run_dir": "a/" * 3000}, "train.run_dir='a/a/", "use at most 4095 bytes, 255"),
    (TrainConfig, {"run_dir": ""}, "train.run_dir is empty; leave it out for its default"),
    (
        TrainConfig,
        {"loggers": ["excel"]},
        "train.loggers=['excel']: use a list, each item one of",
    ),
    (TrainConfig, {"loggers": "csv"}, "train.loggers='csv': use a list, each item one of"),
    (TrainConfig, {"loggers": ["csv", "csv"]}, "train.loggers names csv twice; name it once"),
    (TrainConfig, {"profile": [5]}, "train.profile=[5]: use its first and last step, as in"),
    (TrainConfig, {"profile": []}, "train.profile=[]: use its first and last step, as in"),
    (TrainConfig, {"profile": [1, 2, 3]}, "train.profile=[1, 2, 3]: use its first and last step"),
    (TrainConfig, {"profile": [0, 2]}, "train.profile=[0, 2]: steps count from 1, and the last is"),
    (TrainConfig, {"profile": [3, 2]}, "train.profile=[3, 2]: steps count from 1, and the last is"),
    (TrainConfig, {"profile": [3, 1001]}, "train.profile=[3, 1001] ends after train.steps=1000;"),
    (TrainConfig, {"profile": [1.0, 2.0]}, "train.profile=[1.0, 2.0]: use a list, each item a"),
    (TrainConfig, {"platform": "gpu"}, "train.platform=gpu: use one of auto, cpu"),
    (CheckpointConfig, {"asynchronous": "yes"}, "checkpoint.asynchronous='yes': use true or false"),
    (CheckpointConfig, {"keep": 1.5}, "checkpoint.keep=1.5: use a whole number"),
    (CheckpointConfig, {"every": None}, "checkpoint.every=None: use a whole number"),
    (CheckpointConfig, {"resume": False}, "checkpoint.resume=False: use a text"),
    (CheckpointConfig, {"resume": 100}, "checkpoint.resume=100: use a text"),
    (ProcessesConfig, {"count": "2"}, "processes.count='2': use a whole number or null"),
    (ProcessesConfig, {"coordinator": 3}, "processes.coordinator=3: use a text or null"),
    (ProcessesConfig, {"coordinator": LONG[:250]}, "processes.coordinator=aaaa", "...: use host:p"),
    (ProcessesConfig, {"stuck_after": 1e30}, "processes.stuck_after=1e+30: use a number below 2"),
    (ProcessesConfig, {"slow_factor": 0.5}, "processes.slow_factor=0.5: use 1 or more, or 0 for"),
    (ProcessesConfig, {"wait": "5m"}, "processes.wait='5m': use a number"),
    (Config, {"model": {}}, "model={}: use a ModelConfig"),
    (Config, {"model": ModelConfig}, "model=<class", "use a ModelConfig"),
    (Config, {"layout": "tp2"}, "layout='tp2': use a Layout"),
    (Config, {"layout": None}, "layout=None: use a Layout"),
    (Config, {"train": ModelConfig()}, "train=ModelConfig(", ": use a TrainConfig"),
    (Config, {"layout": Layout(schedule="gpipe")}, "layout.schedule=gpipe has no effect without"),
    (Config, {"layout": Layout(virtual_stages=2)}, "or leave layout.virtual_stages out"),
    (Config, {"layout": Layout(matmul2d="fox")}, "layout.matmul2d=fox has no effect without a gri"),
]

SECTIONS = [
    ([], "a config: expected a section of fields, got []"),
    (None, "a config: expected a section of fields, got None"),
    ({"model": [1]}, "model: expected a section of fields, got [1]"),
    ({"model": LONG}, "model: expected a section of fields, got aaaaaaaaaa"),
    ({1: {}}, "unknown section 1; the sections are model, layout"),
    ({LONG: {}}, "...; the sections are model, layout"),
    ({"model": {1: 2}}, "unknown key model.1; see jaxptd train --help-all"),
    ({"model": {LONG: 2}}, "...; see jaxptd train --help-all"),
    ({"model": {"num_layers": "4"}}, "model.num_layers='4': use a whole number"),
    ({"model": {"rope": {"thet": 1.0}}}, "unknown key model.rope.thet; did you mean theta?"),
    ({"model": {"rope": [1.0]}}, "model.rope: expected a section of fields, got [1.0]"),
    ({"layout": {"ring": "foo"}}, "layout.ring=foo: use one of zigzag, blockwise, rsa, gather"),
]


def refusal(make, *values, **fields) -> str:
    with pytest.raises(UserError) as caught:
        make(*values, **fields)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) <= 250
    return message


@pytest.mark.parametrize(("section", "fields", "words"), [(s, f, w) for s, f, *w in VALUES])
def test_a_value_is_refused(section, fields, words) -> None:
    message = refusal(section, **fields)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(("sections", "words"), SECTIONS)
def test_a_dict_that_is_no_config_is_refused(sections, words) -> None:
    assert words in refusal(from_dict, sections)


# --- Every field of every section, including future ones


def fields(*kinds: type) -> list:
    """Fields that accept one of these types, with their sections."""
    found = []
    for section in dataclasses.fields(Config):
        for field in dataclasses.fields(section.type):  # type: ignore[arg-type]
            union = isinstance(field.type, types.UnionType)
            members = typing.get_args(field.type) if union else (field.type,)
            if set(kinds) & set(members):
                found.append((section.type, f"{section.name}.{field.name}"))
    return found


@pytest.mark.parametrize("value", [object, {}, 2j, b"", [[]]], ids=str)
def test_no_field_takes_a_value_of_another_type(value) -> None:
    for section in dataclasses.fields(Config):
        for field in dataclasses.fields(section.type):  # type: ignore[arg-type]
            if "sections" in field.metadata and value == {}:
                continue  # an empty section means the family's default
            message = refusal(section.type, **{field.name: value})
            assert message.startswith(f"{section.name}.{field.name}=")


@pytest.mark.parametrize(("section", "name"), fields(int, float))
def test_no_number_is_nan_infinite_or_huge(section, name) -> None:
    for value in (math.nan, math.inf, -math.inf, 10**30, -(10**30), HUGE):
        assert refusal(section, **{name.partition(".")[2]: value}).startswith(f"{name}=")


@pytest.mark.parametrize(("section", "name"), fields(str))
def test_no_text_has_a_null_byte_or_is_endless(section, name) -> None:
    for value in ("a\0b", LONG):
        assert refusal(section, **{name.partition(".")[2]: value}).startswith(f"{name}='a")
