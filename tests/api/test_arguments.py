"""Wrong arguments to any exported function give one line with the argument and the remedy."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import jaxptd
from jaxptd import Layout, UserError, plot
from jaxptd.comms import count
from jaxptd.data.tokenizers import ByteTokenizer
from jaxptd.fields.checks import NO_KINDS
from jaxptd.memory import counted
from jaxptd.models.gpt import GPT

FUNCTIONS = [
    *("comms", "describe_mesh", "from_hf", "generate", "grouped_matmul", "lm_eval_model", "load"),
    *("load_config", "load_tokenizer"),
    *(
        "make_mesh",
        "make_schedule",
        "memory",
        "open_data",
        "plan",
        "profile",
        "rank_groups",
        "register_family",
        "register_mlp",
        "simulate",
        "train",
    ),
    *("use_devices", "verify"),
]
METHODS = ["sample", "stream", "read", "classes"]
CALLABLE = {"comms", "generate", "memory", "plan", "profile", "train", "verify"}


class Known(NamedTuple):
    """Valid values for some or all of a row's arguments."""

    run: Any
    config: Any
    mesh: Any
    figure: Any


@pytest.fixture(scope="module")
def known(interrupted) -> Known:
    config = interrupted.run.config
    return Known(interrupted.run, config, jaxptd.make_mesh(Layout(dp=2)), plot.mesh(Layout()))


def schedule(name: Any = "gpipe", **sizes: Any) -> Any:
    return jaxptd.make_schedule(name, **{"stages": 2, "micro_batches": 2, **sizes})


def open_data(k: Known, **others: Any) -> Any:
    values = {"config": k.config.data, "tokenizer": ByteTokenizer(), "seq_length": 16}
    return jaxptd.open_data(**{**values, "vocab_size": 257, "seed": 0, **others})


FOREIGN = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
Row = tuple[Callable[[Known], Any], str]

MESHES: list[Row] = [
    (lambda k: jaxptd.simulate("8"), "simulate: devices is '8'; expected a whole number"),
    (lambda k: jaxptd.simulate(None), "devices is None; expected a whole number"),
    (lambda k: jaxptd.simulate([8]), "devices is a list; expected a whole number"),
    (lambda k: jaxptd.simulate(2.5), "devices is 2.5; expected a whole number"),
    (lambda k: jaxptd.simulate(True), "devices is True; expected a whole number"),
    (lambda k: jaxptd.make_mesh(k.config), "layout is a Config; expected a Layout: pass config."),
    (lambda k: jaxptd.make_mesh(None), "layout is None; expected a Layout: jaxptd.Layout(tp=2)"),
    (lambda k: jaxptd.make_mesh("x"), "layout is 'x'; expected a Layout"),
    (lambda k: jaxptd.make_mesh(k.mesh), "expected a Layout: pass the layout that"),
    (lambda k: jaxptd.make_mesh(Layout(dp=2), 3), "devices is 3; expected a list, each item a"),
    (lambda k: jaxptd.make_mesh(Layout(), [3]), "devices is a list; expected a list, each it"),
    (lambda k: jaxptd.make_mesh(Layout(), "xy"), "devices is 'xy'; expected a list"),
    (lambda k: jaxptd.describe_mesh(k.config), "mesh is a Config; expected a Layout or a Mesh"),
    (lambda k: jaxptd.describe_mesh(3), "describe_mesh: mesh is 3; expected a Layout or a Mesh"),
    (
        lambda k: jaxptd.describe_mesh(FOREIGN),
        "axis x, but a layout has only pp, replicas, dp, ep, cp, ulys",
    ),
    (lambda k: jaxptd.describe_mesh(Layout(dp=2**30)), "use 1 to 1048576 devices"),
    (lambda k: jaxptd.rank_groups(k.config), "layout is a Config; expected a Layout: pass config"),
    (lambda k: jaxptd.rank_groups(k.mesh), "layout is a Mesh; expected a Layout"),
    (lambda k: jaxptd.rank_groups(Layout(dp=2**30)), "world size 1073741824: use 1 to"),
    (lambda k: jaxptd.rank_groups(Layout(pp=2), split_rank=2), "split rank 2: the decoder's first"),
    (lambda k: jaxptd.rank_groups(Layout(pp=2), split_rank="1"), "rank_groups: split_rank is '1';"),
    (lambda k: jaxptd.Program(None, k.mesh), "jaxptd.Program: config is None; expected a Config"),
    (lambda k: jaxptd.Program(k.config, None), "jaxptd.Program: mesh is None; expected a Mesh"),
    (lambda k: jaxptd.Program(k.config, k.config.layout), "pass jaxptd.make_mesh(layout)"),
    (lambda k: jaxptd.Program(k.config, FOREIGN), "the mesh (x=2) is not that of config.layout"),
    (lambda k: count(k.run), "comms.count: program is a Run; expected a Program: pass run.program"),
    (lambda k: counted(k.config), "memory.counted: program is a Config; expected a Program"),
    (lambda k: ByteTokenizer().encode(3), "a tokenizer encodes texts, not int; use a str"),
    (
        lambda k: k.run.program.canonical({"x": 1}),
        "the model has no parameter x; see Program.infos",
    ),
    (lambda k: k.run.program.eval_step(k.run.state["params"], 3), "a batch is a int; use a dict"),
    (
        lambda k: GPT(None, tensor_parallel=None, rngs=None),
        "jaxptd.GPT: config is None; expected a Model",
    ),
]
TABLE = np.zeros((4, 2, 3), np.int32)
SCHEDULES: list[Row] = [
    (lambda k: jaxptd.Schedule("x", "2", 1, 1, "loop", TABLE), "schedule.stages='2': use a whole"),
    (lambda k: plot.schedule(jaxptd.Schedule("x", 2, 1, 1, "loop", TABLE)), "F0 of stage 0, chunk"),
    (lambda k: schedule(stages="4"), "make_schedule: stages is '4'; expected a whole number"),
    (lambda k: schedule(stages=4.0), "stages is 4.0; expected a whole number"),
    (lambda k: schedule(stages=True), "stages is True; expected a whole number"),
    (lambda k: schedule(micro_batches=None), "micro_batches is None; expected a whole number"),
    (lambda k: schedule(virtual_stages="2"), "expected a whole number or None"),
    (lambda k: schedule(None), "name is None; expected a path"),
    (lambda k: schedule(3), "name is 3; expected a path"),
    (lambda k: schedule(["gpipe"]), "name is a list; expected a path"),
    (lambda k: schedule("a\0.csv"), "it has a null byte; remove it"),
]
DATA: list[Row] = [
    (lambda k: open_data(k, config="tiny.txt"), "config is 'tiny.txt'; expected a DataConfig"),
    (lambda k: open_data(k, config=k.config), "expected a DataConfig: pass config.data"),
    (lambda k: open_data(k, tokenizer=None), "tokenizer is None; expected a Tokenizer: jaxptd.lo"),
    (lambda k: open_data(k, tokenizer="bytes"), "tokenizer is 'bytes'; expected a Tokenizer"),
    (lambda k: open_data(k, vocab_size=None), "vocab_size is None; expected a whole number"),
    (lambda k: open_data(k, vocab_size=0), "vocab_size is 0; use 1 or more"),
    (lambda k: open_data(k, seq_length="16"), "seq_length is '16'; expected a whole number"),
    (lambda k: open_data(k, seq_length=0), "seq_length is 0; use 1 or more"),
    (lambda k: open_data(k, seed=-1), "seed is -1; use 0 or more"),
    (lambda k: open_data(k, seed=2**64), "use a number below 9223372036854775808"),
    (lambda k: open_data(k, objective="mlm"), "objective is 'mlm'; expected an Objective or None"),
    (lambda k: jaxptd.load_tokenizer("bytes", "[MASK]"), "special is '[MASK]'; expected a list"),
    (lambda k: jaxptd.load_tokenizer(None), "load_tokenizer: name is None; expected a path"),
    (lambda k: jaxptd.load_tokenizer(b"bytes"), "name is b'bytes'; expected a path"),
    (lambda k: jaxptd.load_config(None), "load_config: path is None; expected a path"),
    (lambda k: jaxptd.load_config("test-tiny", "--layout.tp=2"), "overrides is '--layout.tp=2'"),
    (lambda k: jaxptd.load_config("test-tiny", [2]), "overrides[0] is 2; expected a text"),
]
RUNS: list[Row] = [
    (lambda k: jaxptd.load(None), "jaxptd.load: run_dir is None; expected a path"),
    (lambda k: jaxptd.load(3), "run_dir is 3; expected a path"),
    (
        lambda k: jaxptd.load("~no-such-user/x"),
        "there is no home directory ~no-such-user; write the path out",
    ),
    (lambda k: jaxptd.load(Path("~no-such-user")), "there is no home directory ~no-such-user"),
    (lambda k: jaxptd.load("a\0b"), r"run_dir is 'a\x00b'; it has a null byte"),
    (lambda k: jaxptd.load(k.config), "expected a path or a URL: pass config.train.run_dir"),
    (lambda k: jaxptd.load(k.run.path, k.config), "or None: pass config.layout"),
    (lambda k: jaxptd.load(k.run.path, platform="tpu"), "expected one of auto, cpu or None"),
    (lambda k: jaxptd.generate(k.run), "run_dir is a Run; expected a path or a URL: pass run.path"),
    (lambda k: jaxptd.generate(None), "generate: run_dir is None; expected a path"),
    (lambda k: jaxptd.generate("x", tokens=-1), "tokens -1: use 0 to 1000000 tokens"),
    (lambda k: jaxptd.generate("x", tp="2"), "tp is '2'; expected a whole number"),
    (lambda k: k.run.sample(3), "jaxptd.Run.sample: prompt is 3; expected a text"),
    (lambda k: k.run.sample(b"x"), "prompt is b'x'; expected a text"),
    (lambda k: k.run.sample(tokens=-1), "tokens -1: use 0 to 1000000 tokens"),
    (lambda k: k.run.sample(tokens="5"), "tokens is '5'; expected a whole number"),
    (lambda k: k.run.sample(tokens=2.5), "tokens is 2.5; expected a whole number"),
    (lambda k: k.run.sample(tokens=10**9), "use 0 to 1000000 tokens"),
    (lambda k: k.run.sample(temperature="0"), "temperature is '0'; expected a number"),
    (lambda k: k.run.sample(temperature=float("nan")), "temperature=nan must be a number"),
    (lambda k: k.run.sample(temperature=10**400), "use a number below 9223372036854775808"),
    (lambda k: k.run.sample(top_k=2.5), "top_k is 2.5; expected a whole number"),
    (lambda k: k.run.sample(top_k=None), "top_k is None; expected a whole number"),
    (lambda k: k.run.sample(seed=1.5), "seed is 1.5; expected a whole number"),
    (lambda k: k.run.sample(seed="a"), "seed is 'a'; expected a whole number"),
    (lambda k: k.run.read(k.run.data.train, -1), "first is -1; use 0 to 4611686018427387904"),
    (lambda k: k.run.read(k.run.data.train, "0"), "first is '0'; expected a whole number"),
    (lambda k: k.run.read(k.run.data.train, 2.5), "first is 2.5; expected a whole number"),
    (lambda k: k.run.read(None, 0), "windows is None; expected a Samples: pass run.data.train"),
    (lambda k: jaxptd.train(k.config, on_log=3), "on_log is 3; expected a function or None"),
    (lambda k: jaxptd.train(k.config, quiet="no"), "quiet is 'no'; expected True or False"),
    (lambda k: jaxptd.train(k.run), "config is a Run; expected a Config: pass run.config"),
    (lambda k: jaxptd.profile(k.config, steps=10**6), "steps=1000000 must be at least 1 and at"),
    (lambda k: jaxptd.profile(k.config, steps=0), "steps=0 must be at least 1 and at most 1000"),
    (lambda k: jaxptd.profile(k.config, steps="5"), "steps is '5'; expected a whole number"),
    (lambda k: jaxptd.profile(k.config, trace=3), "trace is 3; expected a path or None"),
    (lambda k: jaxptd.verify(k.config, dtype="int8"), "dtype is 'int8'; expected one of float64"),
]
OWN: list[Row] = [
    (lambda k: jaxptd.register_mlp("own", 3), "register_mlp: make is 3; expected a function"),
    (
        lambda k: jaxptd.register_family("own", like="gpt", maek=print),
        "register_family: Family has no field maek; did you mean make?",
    ),
]
PLOTS: list[Row] = [
    (lambda k: plot.loss([k.run]), 'pass a run, or several by name: {"first": run}'),
    (lambda k: plot.loss(None), "jaxptd.plot.loss: runs is None; expected a Run or a dict"),
    (lambda k: plot.loss({"a": 3}), "plot.loss: a is of type int; expected a run, or its metrics"),
    (lambda k: plot.loss({"loss": [1.0], "step": [1, 2]}), "columns have {'step': 2, 'loss': 1}"),
    (lambda k: plot.expert_load(None), "plot.expert_load: run is None; expected a Run or a dict"),
    (lambda k: plot.expert_load(k.run), "no loads of experts were logged"),
    (lambda k: plot.mesh(k.config), "plot.mesh: layout is a Config; expected a Layout: pass conf"),
    (lambda k: plot.mesh(k.mesh), "layout is a Mesh; expected a Layout"),
    (lambda k: plot.memory(k.config), "expected a MemoryReport: jaxptd.memory(config) makes one"),
    (lambda k: plot.bytes_by_axis(k.config), "a CommsReport: jaxptd.comms(config) makes one"),
    (lambda k: plot.schedule("1f1b"), "plot.schedule: schedule is '1f1b'; expected a Schedule"),
    (lambda k: plot.step_time(3), "report is 3; expected a ProfileReport: jaxptd.profile(config)"),
    (lambda k: plot.save(k.figure, None), "plot.save: path is None; expected a path"),
    (lambda k: plot.save("x.svg", k.figure), "figure is 'x.svg'; expected a Figure"),
    (
        lambda k: plot.save(k.figure, "~no-such-user/x.svg"),
        "there is no home directory ~no-such-user",
    ),
    (lambda k: plot.save(k.figure, "a\0.svg"), "it has a null byte; remove it"),
]
ROWS = [*MESHES, *SCHEDULES, *DATA, *RUNS, *OWN, *PLOTS]


@pytest.mark.parametrize(("call", "words"), ROWS, ids=[words[:40] for _, words in ROWS])
def test_it_is_refused_in_a_line(call, words: str, known: Known) -> None:
    with pytest.raises(UserError) as caught:
        call(known)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def exported() -> dict[str, Any]:
    """Every exported function, and the methods of a run that take arguments."""
    functions = {name: getattr(jaxptd, name) for name in FUNCTIONS}
    inner = {name: getattr(f, name) if name in CALLABLE else f for name, f in functions.items()}
    methods = {f"Run.{name}": getattr(jaxptd.Run, name) for name in METHODS}
    return inner | methods | {f"plot.{name}": getattr(plot, name) for name in plot.__all__}


def test_every_exported_function_is_listed() -> None:
    objects = {name: getattr(jaxptd, name) for name in jaxptd.__all__}
    plain = {name for name, found in objects.items() if inspect.isfunction(found)}
    assert plain | CALLABLE == set(FUNCTIONS)
    public = {name: f for name, f in vars(jaxptd.Run).items() if not name.startswith("_")}
    functions = {name for name, found in public.items() if inspect.isfunction(found)}
    of_training = {"checkpoint", "keep", "read_batch"}
    of_batches = {"loss_and_gradients", "logits"}  # tests/hf/test_golden.py tests their batches
    assert functions - of_training - of_batches - {"evaluate", "save"} == set(METHODS)


@pytest.mark.parametrize("name", exported())
def test_no_argument_of_an_exported_function_is_taken_unchecked(name: str) -> None:
    function = exported()[name]
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    parameters = [p for p in parameters if p.kind != p.VAR_KEYWORD]  # fields of a config
    assert not [p.name for p in parameters if p.annotation in NO_KINDS]
    others = {p.name: object() for p in parameters if p.default is p.empty}
    self = (None,) if name.startswith("Run.") else ()
    with pytest.raises(UserError, match=f"^jaxptd.{name}: {parameters[0].name} is an object; "):
        function(*self, **{parameters[0].name: object(), **others})


def test_numbers_of_numpy_and_paths_are_welcome(known: Known, tmp_path) -> None:
    jaxptd.simulate(np.int64(4))
    assert schedule(stages=np.int64(4), micro_batches=np.uint8(8)).stages == 4
    assert schedule(Path("gpipe")).name == "gpipe"
    assert known.run.sample("~/", tokens=np.int32(2), temperature=np.float32(0), seed=2**32 - 1)
    assert len(jaxptd.make_mesh(Layout(), np.array(jax.devices())).devices) == 1
    plot.save(known.figure, str(tmp_path / "x.svg"))
    assert (tmp_path / "x.svg").is_file()


def test_the_signature_and_a_missing_argument_are_python_s() -> None:
    assert list(inspect.signature(jaxptd.make_mesh).parameters) == ["layout", "devices"]
    with pytest.raises(TypeError, match="make_mesh: missing a required argument: 'layout';"):
        jaxptd.make_mesh()
