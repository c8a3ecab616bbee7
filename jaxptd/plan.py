"""`jaxptd plan`: finds the fastest layouts for a number of GPUs, by prediction."""

import functools
import itertools
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxptd import plot
from jaxptd.atomic_files import explained, write_whole
from jaxptd.commands.command_line import ConfigParser
from jaxptd.commands.run_options import read_all, run_parser
from jaxptd.commands.table import later
from jaxptd.common_options import add_words, as_path, check_out, picture_path
from jaxptd.config import Config, ModelConfig
from jaxptd.config.written import as_yaml
from jaxptd.display import Table, callable_module
from jaxptd.errors import UserError, run_command
from jaxptd.fields import check_range, checked
from jaxptd.hardware import Cluster, find_accelerator
from jaxptd.models.families import with_vocabulary
from jaxptd.planner.cost import StepTime
from jaxptd.planner.frameworks.planning import FRAMEWORKS, FrameworkPlan, plan_for
from jaxptd.planner.planning import MAX_MEMORY, RANGES, Compiling, Measure, Plan, expected_error
from jaxptd.planner.search.best import Search
from jaxptd.planner.search.space import PINNED, Space, checked_pins

ACTIONS = ("validate", "calibrate")
USUAL = ("--model.num_layers", "--model.hidden_size", "--model.seq_length", "--layout.tp")
DTYPE, PLANNED = "model.dtype", "bfloat16"  # where nothing sets it
NAMING = ("--config", "--run-dir", "--from")  # options that name what to train
HOURS = 24
BALANCED = (1.0,)  # experts
HALVINGS = 6  # how often to double the number of devices when nothing fits


@checked("jaxptd.plan")
def plan(
    config: Config,
    *,
    gpus: int,
    gpu: str,
    node: int = 0,
    hardware: str | Path | None = None,
    pins: Mapping[str, Any] | None = None,
    max_memory: float = MAX_MEMORY,
    top: int = 5,
    compile: int = 0,
    imbalance: Sequence[float] = BALANCED,
    say: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Finds the fastest layouts of a config on this many GPUs, by prediction. Runs nothing.

    Args:
        config: model, batch and optimizer; its own layout, remat and micro-batches are not used.
        gpus: devices.
        gpu: name of an accelerator, such as `h200`.
        node: devices of a node; 0: as many as NVLink joins.
        hardware: YAML file of accelerators beside the packaged ones; None: none.
        pins: fields with the only value that is tried, such as `{"layout.tp": 4}`.
        max_memory: share of a device's memory that a step may use, 0 to 1.
        top: layouts to return, each with other sizes of the axes.
        compile: layouts to compile and rank again, instead of `top`; see `Compiling`. 0: none.
        imbalance: pairs of a token and an expert on the busiest device over the mean, 1 or more.
            Layouts are ranked by the first; seconds at the others are added. Without experts: 1.
        say: takes a line for each that was compiled.

    Raises:
        UserError: a value is impossible, or no layout fits; then the line says what would.

    >>> import jaxptd
    >>> config = jaxptd.load_config("test-tiny", ["--model.dtype=bfloat16"])
    >>> made = jaxptd.plan(config, gpus=2, gpu="h200", top=1, pins={"layout.tp": 2})
    >>> made.best[0].config.layout
    Layout(tp=2)
    """
    _check_numbers({"gpus": gpus, "top": top, "compile": compile, "node": node}, max_memory)
    if config.freezes_some:
        name = "model.lora" if config.model.lora else "optimizer.frozen"
        raise UserError(
            f"`plan` prices steps in which all parameters train, not those with {name}; leave it "
            "out here, and count a layout that you chose with `jaxptd memory`"
        )
    cluster = Cluster(find_accelerator(gpu, hardware), node)
    space = Space(with_vocabulary(config), gpus, checked_pins(pins or {}, config))
    limit = max_memory * cluster.accelerator.hbm_bytes
    loads = _checked_imbalance(imbalance, config)
    search = Search(space, cluster, limit, loads[0])
    if compile:
        best = Compiling(_compiler(), cluster, limit, say).best(search, compile)
    else:
        best = tuple(itertools.islice(search, top))
    if not best:
        raise _nothing_fits(search, compiled=compile > 0)
    error = expected_error(gpu, hardware)
    return Plan(space.config, cluster, gpus, limit, best, search.counted, error, loads)


def _checked_imbalance(imbalance: Sequence[float], config: Config) -> tuple[float, ...]:
    """Raises UserError for loads that cannot be, or that have no effect."""
    moe, loads = config.model.moe, tuple(imbalance) or BALANCED
    if moe is None and loads != BALANCED:
        raise UserError("imbalance: the model has no experts, so it has no effect; leave it out")
    for load in loads:
        if moe is not None and not 1 <= load <= moe.num_experts:
            raise UserError(
                f"imbalance={load:g}: use 1 (balanced) to {moe.num_experts} (all tokens choose the "
                "experts of one device)"
            )
    return loads


def _compiler() -> Measure:
    """The function that compiles layouts; its module imports JAX, so it is loaded only here.

    Raises:
        UserError: the compiler for GPUs is not installed.
    """
    compiling = later("compiler")
    compiling.check_compiler()
    measure: Measure = compiling.measure
    return measure


def _check_numbers(numbers: Mapping[str, int], max_memory: float) -> None:
    """Raises UserError for a number out of range."""
    for name, value in numbers.items():
        least, most = RANGES[name]
        check_range("jaxptd.plan", name, value, least=least, most=most)
    if not 0 < max_memory <= 1:
        raise UserError(f"max_memory={max_memory}: use a share of the memory, above 0 and up to 1")


def _nothing_fits(search: Search, *, compiled: bool) -> UserError:
    """The error when no layout fits."""
    space = search.space
    if compiled and any(True for _ in search):
        remedy = " once it is compiled; use more GPUs, or a larger share of their memory"
    else:
        remedy = f"; {_change(space, search.cluster, search.limit)}"
    return UserError(f"no layout of {space.gpus} GPU{'s' * (space.gpus > 1)} fits{remedy}")


def _change(space: Space, cluster: Cluster, limit: float) -> str:
    """The remedy: a pin to drop so that a layout fits, or a number of GPUs that is enough."""
    for name in space.pins:
        others = {pin: value for pin, value in space.pins.items() if pin != name}
        if any(True for _ in Search(Space(space.config, space.gpus, others), cluster, limit)):
            return f"without --{name} {space.pins[name]} one does"
    batch = space.config.train.global_batch_size
    for doubled in range(1, HALVINGS + 1):
        gpus = space.gpus * 2**doubled
        if any(True for _ in Search(Space(space.config, gpus, space.pins), cluster, limit)):
            return f"{gpus} do"
    if math.gcd(batch, space.gpus) == 1:
        return f"train.global_batch_size={batch} splits over few devices; use a larger one"
    return "use a smaller model or batch, or GPUs with more memory"


def main(argv: Sequence[str] | None = None) -> int:
    """Finds the fastest layouts of a model on GPUs you need not have; predicts time and memory.

    `jaxptd plan validate` compares such predictions with measured steps, and `jaxptd plan
    calibrate` measures what this machine reaches.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in ACTIONS:
        code: int = later(f"plan {argv[0]}").main(argv[1:])
        return code
    pins, others = _pins(argv)
    config, options, unset = _read(others)
    given = {name: options[name] for name in ("out", "hardware") if options[name]}
    options |= {name: as_path(path, f"--{name}") for name, path in given.items()}
    _check(options)
    picture = picture_path(options["picture"])
    if options["print"]:
        return _print(config, options, pins, unset)
    if options["compile"]:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # planning runs nothing
    names = ("gpus", "gpu", "node", "hardware", "max_memory", "top", "compile", "imbalance")
    planned = plan(
        config,
        **{name: options[name] for name in names},
        pins=pins,
        say=lambda line: None if options["quiet"] else print(line, file=sys.stderr, flush=True),
    )
    _check_row(options["explain"], len(planned.best))
    _say_unset(unset, quiet=options["quiet"])
    if options["out"]:
        _write(options["out"], as_yaml(planned.best[0].config))
    if picture:
        plot.save(plot.plan(planned), picture)
    if options["json"]:
        print(json.dumps(_with_unset(planned.as_dict(), unset)))
    else:
        print("\n".join(_lines(planned, options, [*_given(others), *unset])))
    return 0


def _read(argv: Sequence[str]) -> tuple[Config, dict[str, Any], list[str]]:
    """Reads a command line: the config, other options, and options for fields that nothing set.

    GPUs train in 16 bits, so that is what is planned unless the config has a precision.
    """
    parsed = read_all(parser(), argv, defaults={DTYPE: PLANNED})
    unset = [] if DTYPE in parsed.given else [f"--{DTYPE} {PLANNED}"]
    return parsed.config, parsed.options, unset


def _say_unset(unset: Sequence[str], *, quiet: bool) -> None:
    """Says, once there is a plan, for which precision it is if nothing sets one."""
    if unset and not quiet:
        usual = ModelConfig().dtype
        print(f"{DTYPE} is not set: planned for {PLANNED}, not for {usual}", file=sys.stderr)


def _with_unset(found: dict[str, Any], unset: Sequence[str]) -> dict[str, Any]:
    """A plan as in JSON, whose options train what was planned if nothing else sets a field."""
    return found | {"best": [row | {"options": [*unset, *row["options"]]} for row in found["best"]]}


def _check_row(number: int | None, rows: int) -> None:
    """Raises UserError for a row that the table lacks."""
    if number is not None and not 1 <= number <= rows:
        raise UserError(f"--explain {number}: use a row's number, 1 to {rows}")


# ---- layouts in the words of another framework ---------------------------------------------------


def _print(
    config: Config, options: dict[str, Any], pins: Mapping[str, Any], unset: Sequence[str]
) -> int:
    """Prints, or writes, the layouts of another framework."""
    own = {"compile": 0, "picture": None, "imbalance": list(BALANCED)}
    for name, default in own.items():
        if options[name] not in (default, None):
            raise UserError(
                f"--{name} covers jaxptd's own steps; leave it out, or leave out --print"
            )
    names = ("gpus", "gpu", "node", "hardware", "max_memory", "top")
    _check_numbers({name: options[name] for name in ("gpus", "top", "node")}, options["max_memory"])
    planned = plan_for(
        options["print"], config, **{name: options[name] for name in names}, pins=pins
    )
    _check_row(options["explain"], len(planned.best))
    _say_unset(unset, quiet=options["quiet"])
    chosen = planned.best[(options["explain"] or 1) - 1]
    written = planned.written(chosen)
    if options["out"]:
        _write(options["out"], written.text)
    if options["json"]:
        print(json.dumps(planned.as_dict()))
    elif options["quiet"]:
        print(written.text, end="")
    else:
        print("\n".join(_framework_lines(planned, options)))
    return 0


def _framework_lines(planned: FrameworkPlan, options: dict[str, Any]) -> list[str]:
    """The table of layouts, one itemized if asked for, and the config of that one or the best."""
    chosen = planned.best[(options["explain"] or 1) - 1]
    text, notes = planned.written(chosen)
    lines = [repr(planned)]
    if options["explain"]:
        lines += _itemized(chosen.step, chosen.memory)
    if options["tokens"]:
        lines += ["", _budget(planned, options)]
    return [*lines, "", *(() if planned.framework.comment else notes), text.removesuffix("\n")]


def _itemized(step: StepTime, memory: Mapping[str, float]) -> list[str]:
    """The parts of a layout's time and memory."""
    parts = [(name, f"{size / 2**30:.2f}") for name, size in memory.items()]
    return ["", str(step.table()), "", str(Table("memory", ("part", "GiB"), parts))]


def _check(options: dict[str, Any]) -> None:
    """Raises UserError for missing or impossible options, before the search."""
    if options["gpus"] is None or options["gpu"] is None:
        raise UserError(
            "--gpus and --gpu are required: how many GPUs and which, such as --gpus 64 --gpu h200"
        )
    for name in ("tokens", "price"):
        if options[name] is not None and options[name] <= 0:
            raise UserError(f"--{name} {options[name]:g}: use a number above 0")
    if options["price"] and not options["tokens"]:
        raise UserError("--price has no effect without --tokens; add it")
    if options["overwrite"] and not options["out"]:
        raise UserError("--overwrite has no effect without --out; add it")
    if options["out"]:
        check_out(options["out"], overwrite=options["overwrite"])


@functools.cache
def parser() -> ConfigParser:
    """Makes the parser of this command."""
    examples = (
        "--config gpt2-1.5b --gpus 64 --gpu h200",
        "--config llama3-70b --gpus 512 --gpu h100 --layout.tp 8 --explain 1",
        "--config llama3-70b --gpus 512 --gpu h100 --tokens 2e12 --out plan.yaml",
        "--config llama3-70b --gpus 512 --gpu h100 --print megatron",
    )
    parser = run_parser("plan", main.__doc__ or "", examples=examples, usual=USUAL)
    _add(parser, "gpus", int, None, "N", "devices")
    _add(
        parser,
        "gpu",
        str,
        None,
        "NAME",
        "accelerator: a100, h100, h200, b200, gb200, b300, gb300, mi300x, mi355x, v100",
    )
    _add(parser, "node", int, 0, "N", "devices per node; default: as many as NVLink joins")
    help_text = "a YAML file of accelerators, in addition to the packaged ones"
    parser.add_argument("--hardware", metavar="F", help=help_text)
    _add(
        parser,
        "max_memory",
        float,
        MAX_MEMORY,
        "SHARE",
        "share of a device's memory that a step may use",
    )
    _add(parser, "top", int, 5, "N", "layouts to print, each with different axis sizes")
    _add(parser, "compile", int, 0, "K", "compile the best K layouts and rank them again")
    parser.add_argument(
        "--imbalance",
        type=float,
        nargs="+",
        default=list(BALANCED),
        metavar="X",
        help="with experts: tokens on the busiest device over the mean; ranks by the first",
    )
    _add(parser, "explain", int, None, "K", "itemize the time and memory of the K-th layout")
    _add(parser, "tokens", float, None, "N", "print how many days training on N tokens takes")
    _add(parser, "price", float, None, "P", "price per GPU hour: also print the cost of --tokens")
    help_text = f"plan for another framework and print its config: {', '.join(FRAMEWORKS)}"
    parser.add_argument("--print", metavar="NAME", help=help_text)
    help_text = "write a config with the best layout"
    parser.add_argument("--out", metavar="F", help=help_text)
    parser.add_argument("--overwrite", action="store_true", help="replace that file if it exists")
    quiet = "print only the train command, or the config, of the best layout"
    add_words(parser, json="the layouts", quiet=quiet, picture="time, memory and a roofline")
    return parser


def _add(parser: Any, name: str, kind: type, default: Any, metavar: str, text: str) -> None:
    option = f"--{name.replace('_', '-')}"
    parser.add_argument(option, dest=name, type=kind, default=default, metavar=metavar, help=text)


def _pins(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Fields that options pin, and the remaining options.

    Raises:
        UserError: a value is missing or not YAML.
    """
    pins, others, words = {}, [], iter(argv)
    for word in words:
        name, equals, text = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in PINNED:
            others.append(word)
            continue
        if not equals and (text := next(words, "")) == "":
            raise UserError(f"{word}: the value is missing; give one")
        try:
            pins[name] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UserError(f"{name}: {text!r} is not valid YAML; see --help-all") from error
    return pins, others


def _lines(planned: Plan, options: dict[str, Any], given: Sequence[str]) -> list[str]:
    """The table of layouts, one itemized if asked for, and the command to train the best."""
    chosen = planned.best[(options["explain"] or 1) - 1]
    command = " ".join(["jaxptd train", *given, *planned.options(chosen)])
    if options["quiet"]:
        return [command]
    lines = [repr(planned)]
    if options["explain"]:
        lines += _itemized((chosen.compiled or chosen).step, chosen.memory.parts)
    if options["tokens"]:
        lines += ["", _budget(planned, options)]
    return [*lines, "", command]


def _write(path: Path, text: str) -> None:
    remedy = "name a file in a folder that exists and is writable"
    write_whole({path: text.encode()}, lambda file: explained(f"cannot write {file}", remedy))


def _given(argv: Sequence[str]) -> list[str]:
    """The options that name the config and override its fields, quoted for a shell."""
    given, words = [], iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if name.startswith("--") and (name in NAMING or "." in name):
            given.append(shlex.join([word] if equals else [word, next(words, "")]))
    return given


def _budget(planned: Plan | FrameworkPlan, options: dict[str, Any]) -> str:
    """Time and cost of training on this many tokens."""
    days = planned.days_of_best(options["tokens"])
    hours = days * HOURS * planned.gpus
    cost = (
        f", cost {hours * options['price']:,.0f} at {options['price']:g} per GPU hour"
        if options["price"]
        else ""
    )
    return f"{options['tokens']:,.0f} tokens: {days:.1f} days, {hours:,.0f} GPU hours{cost}"


callable_module(__name__)
if __name__ == "__main__":
    run_command(main)
