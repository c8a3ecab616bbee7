"""Bad options of the training command give one line that names the field and the remedy."""

import dataclasses
import types
import typing

import pytest

from jaxptd.config import Config
from jaxptd.train import main

BASE = ("--config=test-tiny", "--train.run_dir={folder}/run", "--data.source={folder}/text.txt")
LONG = "a" * 200_000
# Nests ten ones five times in lists of ten: a million values.
BOMB = "[&a [1,1,1,1,1,1,1,1,1,1]"
for inner, outer in zip("abcde", "bcdef", strict=True):
    BOMB += f",&{outer} [{','.join([f'*{inner}'] * 10)}]"

# Options, separated by spaces, and parts of the message.
OPTIONS = [
    # --- names
    ("--model.num_layer=2", "unknown key model.num_layer; did you mean model.num_layers?"),
    ("--modle.num_layers=2", "unknown key modle.num_layers; did you mean model.num_layers?"),
    ("--tp 2", "unknown key tp; did you mean layout.tp?"),
    ("--steps=3", "unknown key steps; did you mean train.steps?"),
    ("--train.learning_rate=1", "did you mean optimizer.learning_rate?"),
    ("--nonsense", "unknown key nonsense; see jaxptd train --help-all"),
    ("nonsense", "unknown key nonsense; see jaxptd train --help-all"),
    ("quickstart", "unknown key quickstart; did you mean --config quickstart?"),
    ("layout.dp=2", "unknown key layout.dp; write --layout.dp"),
    ("-x", "unknown key -x; see jaxptd train --help-all"),
    ("--", "unknown key --; see jaxptd train --help-all"),
    ("--=3", "see jaxptd train --help-all"),
    ("--.=3", "unknown key .; see jaxptd train --help-all"),
    ("--model..num_layers=3", "did you mean model.num_layers?"),
    ("--model.num_layers.x=3", "unknown key model.num_layers.x; did you mean model.num_layers?"),
    ("--model.__class__=3", "unknown key model.__class__; see jaxptd train --help-all"),
    ("--data.source[0]=3", "did you mean data.source?"),
    ("--model.num_layers 2 3", "unknown key 3; see jaxptd train --help-all"),
    ("--model={num_layers:3}", "--model is a section; give its fields, as --model.name value"),
    ("--layout tp2", "--layout is a section; give its fields, as --layout.name value"),
    ("--model.num_layers", "--model.num_layers: expected one argument; see --help"),
    ("--print_config=x", "--print_config: ignored explicit argument"),
    (f"--{LONG}=3", "unknown key aaaaaaaaaa", "...; see jaxptd train --help-all"),
    # --- numbers
    ("--train.steps=1.5", "train.steps: expected int, got 1.5"),
    ("--train.steps=1e3", "train.steps: expected int, got 1000.0"),
    ("--train.steps=true", "train.steps: expected int, got True"),
    ("--train.steps=", "train.steps: expected int, got nothing"),
    ("--train.steps=.inf", "train.steps: expected int, got inf"),
    ("--train.steps=.nan", "train.steps: expected int, got nan"),
    ("--train.steps=0", "train.steps=0 must be a number above 0"),
    ("--train.steps=-4", "train.steps=-4 must be a number above 0"),
    ("--train.steps=[3]", "train.steps: expected int, got [3]"),
    ("--train.steps=!!int", "--train.steps has the tag !!int in line 1; use values without tags"),
    (f"--train.steps={10**30}", "train.steps=1000000000000000000", "use a number below 2147483648"),
    (f"--train.steps=-{10**30}", "train.steps=-100000000", "use a number above -2147483648"),
    (f"--train.steps={'1' * 10_000}", "--train.steps has a number of 10000 digits", "use fewer"),
    (f"--train.steps={LONG}", "train.steps: expected int, got aaaaaaaaaa", "..."),
    ("--train.seed=4294967296", "train.seed=4294967296: use a number below 4294967296"),
    ("--train.seed=-1", "train.seed=-1 must be a number, 0 or more"),
    ("--optimizer.learning_rate=0", "optimizer.learning_rate=0.0 must be a number above 0"),
    ("--optimizer.learning_rate=.nan", "optimizer.learning_rate=nan must be a number above 0"),
    ("--optimizer.learning_rate=1e5000", "optimizer.learning_rate=inf must be a number above 0"),
    ("--optimizer.learning_rate=1e30", "optimizer.learning_rate=1e+30: use a number below 2147"),
    (f"--optimizer.learning_rate={'9' * 305}", "--optimizer.learning_rate has", "use fewer"),
    ("--optimizer.beta1=1", "optimizer.beta1=1.0 must be in [0, 1)"),
    ("--optimizer.warmup_steps=-1", "optimizer.warmup_steps=-1 must be a number, 0 or more"),
    ("--processes.stuck_after=1e30", "processes.stuck_after=1e+30: use a number below 2147483648"),
    ("--layout.zero=4", "layout.zero: expected one of 0, 1, 2, 3, got 4"),
    ("--layout.zero=true", "layout.zero: expected one of 0, 1, 2, 3, got True"),
    ("--layout.stage_layers=[true,1]", "layout.stage_layers: expected tuple[int, ...] or null"),
    # --- texts
    ("--train.run_dir=", "train.run_dir is empty; leave it out for its default"),
    ("--train.run_dir=a\0b", r"train.run_dir='a\x00b': it has a null byte; remove it"),
    ("--train.run_dir=a\udcffb", r"train.run_dir='a\udcffb': it is not valid Unicode; use text"),
    (f"--train.run_dir={LONG}", "train.run_dir='aaaaaaaaaa", "no path is so long; use at most"),
    (f"--train.run_dir={'a/' * 3000}", "train.run_dir='a/a/a", "use at most 4095 bytes, 255 for"),
    ("--data.source=\0", r"data.source='\x00': it has a null byte; remove it"),
    (f"--data.source={LONG}", "data.source='aaaaaaaaaa", "no path is so long"),
    (f"--data.source={'[' * 1000}", "--data.source=[[[[[[", "too many values; use fewer"),
    (f"--data.source=[{'a,' * 5000}]", "--data.source=[a,a,a", "too many values; use fewer"),
    (f"--data.tokenizer={LONG}", "data.tokenizer='aaaaaaaaaa", "no path is so long"),
    (f"--model.dtype={LONG}", "model.dtype: expected one of float32, bfloat16", "got aaaaaaaaaa"),
    ("--model.dtype=\x1b[31mred", r"got \x1b[31mred"),
    ("--model.dtype=!!python/object/apply:os.abort", "--model.dtype has the tag", "without tags"),
    (f"--layout.pp=2 --layout.schedule={LONG}", "layout.schedule='aaaaaaa", "no path is so long"),
    (f"--layout.schedule={'a' * 200}", "layout.schedule=aaaaaaa", "...: use one of 1f1b, gpipe"),
    (f"--processes.coordinator={'a' * 200}", "processes.coordinator=aaaa", "...: use host:port"),
    ("--processes.coordinator=host", "processes.coordinator=host: use host:port, as in"),
    ("--processes.coordinator=host:99999", "processes.coordinator=host:99999: use host:port"),
    # --- files
    ("--train.run_dir={folder}/text.txt", "{folder}/text.txt is a file; name a directory"),
    ("--train.run_dir={folder}/text.txt/run", "{folder}/text.txt is a file; name a directory"),
    ("--train.run_dir={folder}/pipe", "{folder}/pipe is a file; name a directory"),
    ("--data.source={folder}/none.txt", "data.source='{folder}/none.txt' matches no file; use"),
    ("--data.source={folder}/*.none", "data.source='{folder}/*.none' matches no file; use"),
    ('--data.source={"a":x}', "matches no file; use stdlib", "or give weights as numbers, such"),
    ('--data.source={"a":1,"a":2}', "--data.source: a appears twice; remove one"),
    ('--data.source={"{folder}/text.txt":-1}', "text.txt' has the weight -1.0; use a number ab"),
    ('--data.source={"{folder}/text.txt":1,"none":1}', "data.source='none' matches no file; use"),
    ("--data.source=~/none.txt", "data.source='/nobody/none.txt' matches no file; use"),
    ("--data.source=[~/none.txt,b]", "data.source='/nobody/none.txt' matches no file; use"),
    ("--data.source=http://none/x.txt", "data.source=http://none/x.txt: no store has URLs with h"),
    ("--data.source=quux://b/c", "data.source=quux://b/c: no store has URLs with quux://; use s3"),
    ('--data.source={"file:/a/b":1.0}', "data.source={'file:/a/b': 1.0}: file:/a/b is an address"),
    ("--data.tokenizer=quux://a/b", "data.tokenizer=quux://a/b: no store has URLs with quux://"),
    ("--train.run_dir=http://b/run", "train.run_dir=http://b/run: no store has URLs with http"),
    ("--train.run_dir=s3:/b/run", "train.run_dir='s3:/b/run'", "copy it, or mount it"),
    ("--run-dir=s3:/b/run", "--run-dir: 's3:/b/run': s3:/b/run is an address, not a path"),
    ("--run-dir=quux://b/run", "--run-dir: quux://b/run: no store has URLs with quux://"),
    ("--checkpoint.start=QUUX://b/run", "checkpoint.start=QUUX://b/run: no store has URLs with q"),
    ("--checkpoint.resume=file:///a/b", "file:///a/b is an address", "write the path, /a/b"),
    ("--checkpoint.resume=file:/a/b", "file:/a/b is an address", "write the path, /a/b"),
    ("--layout.schedule=s3://a/b.csv", "layout.schedule='s3://a/b.csv'", "is an address"),
    ("--model.from=quux://a/b", "quux://a/b: no store has URLs with quux://"),
    ("--train.run_dir=me@host:/runs/a", "me@host:/runs/a is an address, not a path"),
    ("--train.run_dir=${oc.env:HOME}/x", "${oc.env:HOME} is not expanded here; write"),
    ("--train.run_dir=runs/$SLURM_JOB_ID", "$SLURM_JOB_ID is not expanded here; write"),
    ("--train.run_dir={{run}}/a", "{{run}} is not expanded here; write"),
    ("--data.prompt_field=${field}", "data.prompt_field='${field}': ${field} is not expanded"),
    ("--train.seed=0123", "--train.seed: 0123 begins with 0", "write 123, or 83 for octal"),
    ("--train.seed 1:30", "--train.seed: 1:30 is a base-60 number in YAML, 90"),
    ("--train.profile=[010,20]", "--train.profile: 010 begins with 0"),
    ("--model.num_layers={{2}}", "--model.num_layers: a key in line 1 is a mapping, not a name"),
    ("--data.source={yes:1.0}", "data.source='{yes:1.0}'"),
    ("--data.source=[no]", "--data.source: no is true or false in YAML", "write 'no'"),
    ("--data.source={folder}/folder", "is a folder; name its files with a glob, such as"),
    ("--data.source={folder}/pipe", "data.source: {folder}/pipe is not a regular file; name one"),
    ("--data.source={folder}/loop", "data.source: {folder}/loop is not a regular file; name one"),
    ("--data.source=/dev/zero", "data.source: /dev/zero is not a regular file; name one"),
    ("--data.source={folder}/empty.txt", "{folder}/empty.txt holds no text; leave it out"),
    ("--data.source={folder}/binary.txt", "{folder}/binary.txt is binary, not text", "use text"),
    ("--data.source={folder}/short.txt", "one sequence takes 17; use more data or a smaller"),
    ("--data.source={folder}/odd.bin", "{folder}/odd.bin has 3 bytes", "make it again"),
    ("--data.source={folder}/lonely.idx", "lonely.bin is missing; put it there"),
    ("--data.source={folder}/other.jsonl", "{folder}/other.jsonl line 1 is not JSON"),
    ("--data.source=[]", "data.source is empty; name stdlib, or paths or globs"),
    ("--data.source=[{folder}/text.txt,{folder}/text.txt]", "is named twice", "name it once"),
    ("--data.tokenizer=gpt2", "data.tokenizer='gpt2': no such file; use bytes, or the path"),
    ("--data.tokenizer=~/none.json", "data.tokenizer='/nobody/none.json': no such file; use bytes"),
    ("--data.tokenizer={folder}/folder", "it is a folder without tokenizer.json; use bytes"),
    ("--data.tokenizer={folder}/pipe", "it is not a file on disk; use bytes, or the path of"),
    ("--data.tokenizer=/dev/zero", "it is not a file on disk; use bytes, or the path of"),
    ("--data.tokenizer={folder}/bad.json", "{folder}/bad.json' is not a tokenizer.json"),
    # --- fields that do not fit each other
    ("--layout.tp=2 --layout.row=2", "layout.tp=2 with layout.row=2", "set tp=1 or row=col=1"),
    ("--layout.dp=3", "train.global_batch_size=8 does not split", "use a multiple of 6"),
    ("--layout.pp=0", "layout.pp=0: an axis has at least one device; use 1 or more"),
    ("--layout.schedule=1f2b", "layout.schedule=1f2b: use one of 1f1b, gpipe"),
    ("--layout.schedule=gpipe", "layout.schedule=gpipe has no effect", "layout.pp=2 or more; set"),
    ("--layout.virtual_stages=2", "layout.virtual_stages=2 has no effect", "or leave layout.virt"),
    ("--layout.stage_layers=[1,1]", "layout.stage_layers=(1, 1) has no effect", "layout.pp=2"),
    ("--layout.matmul2d=summa", "layout.matmul2d=summa has no effect", "layout.row or layout.col"),
    ("--layout.matmul2d_slices=2", "layout.matmul2d_slices=2 has no effect", "or leave layout.mat"),
    ("--layout.row=2 --layout.col=4 --layout.matmul2d=fox", "is not square", "use layout.matmul2d"),
    ("--layout.collective_matmul=true", "needs layout.sequence_parallel=true; set both"),
    ("--layout.offload=activations", "saves; use model.remat=dots"),
    ("--model.num_heads=5", "model.hidden_size=16 does not split over model.num_heads=5; use a"),
    ("--model.attention=cudnn", "has no dropout", "use model.attention=xla or model.dropout=0"),
    ("--model.remat_layers=9", "model.remat_layers=9 is more than model.num_layers=2; use fewer"),
    ("--model.vocab_size=10", "model.vocab_size=10 is below the tokenizer's 257; use 257 or more"),
    ("--model.seq_length=99999", "use more data or a smaller model.seq_length"),
    ("--train.micro_batches=3", "train.micro_batches=3; use a multiple of 3"),
    ("--data.validation_fraction=1e-4", "data.validation_fraction=0.0001 of", "use 0.002 to 0.998"),
    ("--processes.count=2", "processes.count=2 without processes.coordinator and p"),
    ("--processes.id=1", "processes.id=1 without processes.coordinator and p"),
]


def bad_value(kind: object) -> str:
    """Returns a value of the wrong type for a field; for texts, one that no path can have."""
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    return "a" * 300 if str in kinds else "nonsense"


FIELDS = [
    (f"--{section.name}.{field.name}={bad_value(field.type)}", f"{section.name}.{field.name}")
    for section in dataclasses.fields(Config)
    for field in dataclasses.fields(section.type)  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("argv", "words"), [(argv, words) for argv, *words in OPTIONS])
def test_an_option_is_refused(argv, words, refused) -> None:
    message = refused(main, [*BASE, *argv.split(" ")])
    assert all(word in message for word in words), message


@pytest.mark.slow
@pytest.mark.parametrize(("argv", "name"), FIELDS)
def test_every_field_refuses_a_value_of_another_type(argv, name, refused) -> None:
    message = refused(main, [*BASE, argv])
    a_section = f"--{name} is a section; give its fields, as --{name}.name value"
    assert message == a_section or message.startswith((f"{name}: expected ", f"{name}='aaaa"))


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("", "one of the arguments is empty; remove it"),
        ("--model.num_layers 3", "unknown key model.num_layers; write --model.num_layers"),
        ("--train.steps=a\nb", r"train.steps: expected int, got a b"),
        (f"--data.source={BOMB}]", "--data.source: with its aliases it has more than 2000 values"),
        ("--train.steps=!!int x", "--train.steps has the tag !!int in line 1; use values without"),
        ("--train.steps=!mine 3", "--train.steps has the tag !mine in line 1; use values without"),
    ],
)
def test_an_argument_with_spaces_is_refused(argument, words, refused) -> None:
    assert words in refused(main, [*BASE, argument])
