"""`jaxptd convert`: turns Hugging Face directories into runs and back, and checks them."""

import argparse
import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from jaxptd.checkpoint.canonical import params_from_canonical
from jaxptd.common_options import add_words, path_option, place_option
from jaxptd.config import ProcessesConfig
from jaxptd.distributed import launchers
from jaxptd.errors import Parser, UserError, quoted, run_command
from jaxptd.hf.adapters import AdapterFiles, lora_of, write_adapter
from jaxptd.hf.base import keep_base
from jaxptd.hf.directory import Directory
from jaxptd.hf.load import program_of
from jaxptd.hf.mapping import Arrays
from jaxptd.hf.read import read_params
from jaxptd.hf.verdict import check, lines, table
from jaxptd.hf.write import DTYPES, write_directory
from jaxptd.run.adapters import MergedParams
from jaxptd.run.checkpoints import RunCheckpoints
from jaxptd.run.folder import RunDir
from jaxptd.run.saved import SavedParams

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def main(argv: Sequence[str] | None = None) -> None:
    """Converts models to and from Hugging Face directories, or checks what is in a directory."""
    args = parser().parse_args(argv)
    chosen = [name for name in ("from_hf", "to_hf", "check") if getattr(args, name) is not None]
    if len(chosen) != 1:
        raise UserError("give one of --from-hf DIR, --to-hf RUN_DIR or --check DIR")
    if (args.out is None) != (args.check is not None):
        raise UserError(
            "--out is required with --from-hf and --to-hf, and not allowed with --check"
        )
    if args.to_hf is None and (args.dtype or args.shard_size or args.unmerged or args.ema):
        raise UserError("--dtype, --shard-size, --unmerged and --ema need --to-hf; leave them out")
    if args.from_hf is None and args.adapter is not None:
        raise UserError("--adapter needs --from-hf; leave it out")
    if not launchers.find(ProcessesConfig(), os.environ).alone:
        raise UserError("convert runs in one process; start it without srun, mpirun or torchrun")
    if args.check is not None:
        result = check(args.check)
    else:
        result = _from_hf(args) if args.to_hf is None else _to_hf(args)
    if args.json:
        print(json.dumps(result))
    elif not args.quiet:
        print(_text(result))
    if problems := result.get("problems"):
        raise UserError(next(iter(problems.values())))


def parser() -> Parser:
    """Makes the parser of this command."""
    examples = (
        "jaxptd convert --check models/gpt2",
        "jaxptd convert --from-hf models/gpt2 --out runs/gpt2",
        "jaxptd convert --to-hf runs/gpt2 --out exported --dtype bfloat16 --shard-size 5GB",
    )
    command = Parser(prog="jaxptd convert", description=main.__doc__, examples=examples)
    help_text = "model directory to turn into a run at step 0"
    command.add_argument("--from-hf", type=path_option, metavar="DIR", help=help_text)
    help_text = "run whose newest checkpoint to export as a Hugging Face directory"
    command.add_argument("--to-hf", type=place_option, metavar="RUN_DIR", help=help_text)
    help_text = "with --from-hf: directory of a PEFT adapter for this model"
    command.add_argument("--adapter", type=path_option, metavar="DIR", help=help_text)
    help_text = "with --to-hf: write only the run's adapters, as PEFT does; else they are merged"
    command.add_argument("--unmerged", action="store_true", help=help_text)
    help_text = (
        "model directory to check, from its headers: can jaxptd train it and generate with it?"
    )
    command.add_argument("--check", type=path_option, metavar="DIR", help=help_text)
    help_text = "directory to write; must not exist yet"
    command.add_argument("--out", type=path_option, metavar="D", help=help_text)
    help_text = "precision of the tensors; default: the checkpoint's"
    command.add_argument("--dtype", choices=list(DTYPES), help=help_text)
    help_text = "export the moving average (optimizer.ema_decay)"
    command.add_argument("--ema", action="store_true", help=help_text)
    help_text = "maximum size of a file, such as 500MB; default: 5GB"
    command.add_argument("--shard-size", type=_bytes, metavar="SIZE", help=help_text)
    add_words(command, json="what was done", quiet="print nothing")
    return command


def _bytes(text: str) -> int:
    """Reads a number of bytes for argparse."""
    match = re.fullmatch(r"(\d{1,12})([KMG]B|)", text.upper())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(
            f"{quoted(text)} is not a size; use one such as 5GB or 500MB"
        )
    return int(match[1]) * UNITS[match[2]]


def _from_hf(args: Any) -> dict[str, Any]:
    if os.path.lexists(args.out):
        raise UserError(f"--out {args.out} exists; choose another name, or remove it")
    directory, model, adapters = Directory(args.from_hf), dict[str, Any](), Arrays()
    if args.adapter is not None:
        files = AdapterFiles(args.adapter)
        model["lora"], adapters = lora_of(files, directory)
        for line in files.remarks():
            print(line, file=sys.stderr)
    program, run_dir = program_of(directory, args.out, **model), RunDir(args.out)
    begun = params_from_canonical(program, {"params": adapters}) if adapters else {}
    state = program.states.new(read_params(program, directory) | begun)
    checkpoints = RunCheckpoints(program, run_dir, print)
    checkpoints.save(state, 0, None)
    checkpoints.store.wait()
    train = dataclasses.replace(program.config.train, platform="auto")
    run_dir.open(dataclasses.replace(program.config, train=train), step=0)
    keep_base(run_dir, program.config, say=partial(print, file=sys.stderr))
    parameters = sum(math.prod(info.shape) for info in program.infos.values())
    return {"out": str(args.out), "parameters": parameters}


def _to_hf(args: Any) -> dict[str, Any]:
    if args.unmerged:
        saved = SavedParams(args.to_hf, ema=args.ema)
        shards = write_adapter(saved, args.out, dtype=args.dtype)
    else:
        saved = MergedParams(args.to_hf, ema=args.ema)
        sizes = {"shard_size": args.shard_size} if args.shard_size else {}
        shards = write_directory(saved, args.out, dtype=args.dtype, **sizes)
    return {
        "out": str(args.out),
        "step": saved.step,
        "tensors": sum(len(shard.names) for shard in shards),
        "bytes": sum(shard.size for shard in shards),
        "files": len(shards),
    }


def _text(result: dict[str, Any]) -> str:
    """Says in a line what was done."""
    if "verdict" in result:
        return "\n".join([*([table(result)] if "mapping" in result else []), *lines(result)])
    facts = [f"{name} {value}" for name, value in result.items() if name != "out"]
    return f"{result['out']}: {', '.join(facts)}"


if __name__ == "__main__":
    run_command(main)
