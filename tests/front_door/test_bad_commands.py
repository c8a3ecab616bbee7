"""Bad command lines: each gives one line that names the option or field and the remedy.

A row of the table is a command (or several, with commas), options, and words of the message;
`{long}`, `{digits}` and `{huge}` stand for `MARKS`. Nothing is written, and nothing is printed.
"""

import shlex
from collections.abc import Iterator

import pytest

from jaxptd.__main__ import main
from jaxptd.commands.table import COMMANDS
from jaxptd.errors import UserError

MARKS = {"long": "a" * 200_000, "digits": "1" * 5000, "huge": 10**30}
TABLE = """
mesh | --world-size is required; or name a config
mesh --world-size | --world-size: expected one argument
mesh --world-size four | --world-size: invalid int value: 'four'
mesh --world-size 1e3 | --world-size: invalid int value: '1e3'
mesh --world-size 0 | world size 0: use 1 to
mesh --world-size -4 | world size -4: use 1 to
mesh --world-size 1000000000000 | world size 1000000000000: use 1 to 1048576
mesh --world-size 10 --tp 4 | does not split into tp=4; use a multiple of 4
mesh --world-size 10 --layout.tp 4 | does not split into tp=4; use a multiple of 4
mesh --world-size 16 --tp 0 | layout.tp=0: an axis has at least one device
mesh --world-size 16 --cp -2 | layout.cp=-2: an axis has at least one device
mesh --world-size 16 --tp 2 --row 2 | set tp=1 or row=col=1
mesh --world-size 18 --dp 3 | use world size 3, or leave --dp out
mesh --world-size 16 --dp 1000000000000 | use a number below 2147483648
mesh --world-size 6 --ep 4 | world size 6 does not split into ep=4; use a multiple of 4
mesh --world-siz 16 | did you mean --world-size?
mesh --world-size 16 stray | unrecognized arguments: stray; see --help
mesh --config nowhere.yaml | nowhere.yaml: no such file
mesh --config quickstar | no such file or packaged config
mesh --config quickstart --run-dir run | give one of them
mesh --run-dir nowhere | nowhere/config.yaml: No such file
mesh --run-dir '' | --run-dir: '' is not a path
mesh --config quickstart --world-size 5 | world size 5 does not split
mesh --world-size 4 --picture mesh.pdf | mesh.pdf: use a name that ends in .png or .svg
mesh --world-size 4 --picture no/mesh.svg | name a file in a folder that exists
mesh --world-size 4 --picture '' | '' is not a path; name a file
mesh --world-size 65536 --picture mesh.svg | draw 4096 or fewer
mesh --world-size {long} | --world-size: invalid int value: 'aaaaaaaaaa
mesh --world-size {digits} | --world-size: invalid int value: '11111111
mesh --world-size 8 --pp 4 --split-rank 4 | split rank 4: the decoder's first stage
mesh --world-size 8 --tp 2 --dp 3 | does not split into dp=3 x tp=2; use world size 6
mesh --world-size 4 --tp {huge} | use a number below 2147483648
mesh --world-size 4 --nonsense | unrecognized arguments: --nonsense; see --help
mesh --world-size 4 --{long} | unrecognized arguments: --aaaaaaaaaa

pipeline | --stages is required; or name a config
pipeline --stages 4 | --micro-batches is required; or name a config
pipeline --stages four --micro-batches 8 | --stages/--layout.pp: invalid int value: 'four'
pipeline --stages 2.5 --micro-batches 8 | --stages/--layout.pp: invalid int value: '2.5'
pipeline --stages 0 --micro-batches 8 | stages=0: use 1 or more
pipeline --stages 4 --micro-batches -1 | micro_batches=-1: use 1 or more
pipeline --stages 4 --micro-batches 8 --schedule 2f | schedule=2f: use one of 1f1b
pipeline --stages 4 --micro-batches 8 --schedule '' | schedule=
pipeline --stages 4 --micro-batches 8 --schedule no.csv | no.csv: No such file
pipeline --stages 4 --micro-batches 8 --schedule empty.csv | empty.csv is empty
pipeline --stages 4 --micro-batches 8 --schedule words.csv | has a cell 'what'
pipeline --stages 3 --micro-batches 2 --schedule table.csv | is a table for stages=2, not 3
pipeline --stages 4 --micro-batches 8 --virtual-stages 2 | leave virtual_stages out
pipeline --stages 4 --micro-batches 8 --virtual-stages -1 | virtual_stages=-1: use 1 or more
pipeline --stages 4 --micro-batches 8 --schedule interleaved --virtual-stages 1 | use 2 or more
pipeline --stages 4 --micro-batches 8 --durations 1 2 | expected 3 arguments
pipeline --stages 4 --micro-batches 8 --durations 1 0 1 | (1.0, 0.0, 1.0)
pipeline --stages 4 --micro-batches 8 --durations 1 nan 1 | (1.0, nan, 1.0)
pipeline --stages 4 --micro-batches 8 --durations 1 1 inf | (1.0, 1.0, inf)
pipeline --stages 4 --micro-batches 8 --durations 1 1 long | invalid float value: 'long'
pipeline --stages 1000000000 --micro-batches 8 | takes minutes; use fewer
pipeline --stages 8 --micro-batches 1000000000000 | takes minutes; use fewer
pipeline --stages 1000 --micro-batches 1000 --compare | takes minutes; use fewer
pipeline --stages 64 --micro-batches 600 --schedule zb-v | takes minutes; use fewer
pipeline --stages 8 --micro-batches 32 --schedule interleaved --virtual-stages 1000000 \
    | takes minutes; use fewer
pipeline --stages 8 --micro-batches 32 --schedule interleaved --virtual-stages 200 \
    | takes minutes; use fewer
pipeline --stages 4 --micro-batches 8 --picture x.jpg | .png or .svg
pipeline --stages 4 --micro-batches 8 --picture no/x.svg | a folder that exists
pipeline --stages 4 --micro-batches 8 --csv no/x.csv | no/x.csv: No such file
pipeline --stages 4 --micro-batches 8 --trace x --csv x | give each its own
pipeline --stages 4 --micro-batches 8 --pictures x.svg | did you mean --picture?
pipeline --config quickstart --stages 0 | stages=0: use 1 or more
pipeline --config nowhere --stages 4 | no such file or packaged config
pipeline --config quickstart --run-dir run | give one of them
pipeline --stages 4 --micro-batches 8 --schedule {long} | ...; no path is so long; use
pipeline --stages 4 --micro-batches 8 --schedule {long}.csv \
    | ...; no path is so long; use at most
pipeline --stages 4 --micro-batches 8 --schedule pipe.csv | pipe.csv is not a file on disk; name
pipeline --stages 4 --micro-batches 8 --schedule folder.csv | folder.csv is not a file on disk;
pipeline --stages 4 --micro-batches 8 --durations 1 1 nan | durations F, B, W = (1.0, 1.0, nan): use
pipeline --stages 4 --micro-batches 8 --durations 1 1 | --durations: expected 3 arguments

generate | --run-dir is required: the directory of a run; or
generate --run-dir run --config quickstart | --run-dir is required: the directory of a run; or
generate --run-dir nowhere | nowhere holds no checkpoint; train with
generate --run-dir . | holds no checkpoint; train with
generate --run-dir text.txt | text.txt/checkpoints: Not a directory
generate --config nowhere.yaml | nowhere.yaml: no such file
generate --run-dir . --tokens 0 | --tokens 0: use 1 to 1000000 tokens
generate --run-dir . --tokens 1000000000000 | use 1 to 1000000 tokens
generate --run-dir . --tokens many | --tokens: invalid int value: 'many'
generate --run-dir . --temperature -1 | temperature=-1.0 must be a number, 0 or more
generate --run-dir . --temperature inf | temperature=inf must be a number, 0 or more
generate --run-dir . --temperature nan | temperature=nan must be a number, 0 or more
generate --run-dir . --temperature hot | --temperature: invalid float value: 'hot'
generate --run-dir . --top-k -1 | top_k=-1 must be 0 (all tokens) or more
generate --run-dir . --seed -1 | seed=-1 must be 0 or more, and below 2**32
generate --run-dir . --seed 4294967296 | seed=4294967296 must be 0 or more, and below
generate --run-dir . --platform tpu | --platform/--train.platform: invalid choice: 'tpu' (choose
generate --run-dir . --toknes 5 | did you mean --tokens?
generate --run-dir . stray | unrecognized arguments: stray

chat | --run-dir is required: the directory of a run; or
chat --run-dir nowhere | nowhere holds no checkpoint; train with
chat --run-dir . --temperature -1 | temperature=-1.0 must be a number, 0 or more
chat --run-dir . --system | --system: expected one argument
chat --run-dir . --tokens 0 | --tokens 0: use 1 to 1000000 tokens

data | required: --out
data --out t.bin | --source is required: text files or stdlib; or
data --source text.txt | required: --out
data --source --out t.bin | --source/--data.source: expected at least one
data --source text.txt --out tokens | --out tokens: token files are recognized by their
data --source text.txt --out taken.bin | taken.bin exists; choose another name
data --source text.txt --out paired.bin | paired.idx exists; choose another name
data --source text.txt --out no/t.bin | there is no folder no; make it first
data --source text.txt --out '' | --out: '' is not a path
data --source missing.txt --out t.bin | matches no file
data --source '*.nothing' --out t.bin | matches no file
data --source . --out t.bin | is a folder
data --source taken.bin --out t.bin | taken.bin already holds tokens
data --source text.txt text.txt --out t.bin | is named twice
data --source broken.jsonl --out t.bin | broken.jsonl line 1
data --source text.txt --tokenizer gpt2 --out t.bin | no such file; use bytes, or the path
data --source text.txt --tokenizer text.txt --out t.bin | text.txt
data --config nowhere --out t.bin | no such file or packaged config
data --source text.txt --output t.bin | --out
data --out new.bin | --source
data --source x | --out
data --source text.txt --out odd.bin | odd.bin exists; choose another
data --source pipe --out new.bin | pipe is not a regular file; name one on disk
data --source odd.bin --out new.bin | odd.bin already holds tokens; name text or
data --source x --out new.bin --tokenizer folder | it is a folder without tokenizer.json

train --config nowhere.yaml | nowhere.yaml: no such file
train --config | --config: expected one argument
train --train.steps | --train.steps: expected one argument
train --train.steps x | train.steps: expected int, got x
train --train.steps 0 | train.steps=0 must be
train --steps 5 | did you mean train.steps?
train --model.num_layer 2 | did you mean model.num_layers?
train --layout.dp 3 | does not split over layout.dp=3
train --model 3 | --model is a section; give its fields
train --config short.txt | short.txt: expected `name: value` lines
train --run-dir '' | --run-dir: '' is not a path
train --data.source missing.txt | matches no file
train --data.source text.txt --model.seq_length 9999 | one sequence takes 10000
train --config test-tiny --layout.dp 1024 --train.global_batch_size 2048 --data.source text.txt \
    | simulates at most 512 devices
train stray | unknown key stray

launch | required: -n/--processes
launch -n two -- train | -n/--processes: invalid int value: 'two'
launch -n 0 -- train | -n 0: use 1 to 512 processes
launch -n {digits} -- train | -n/--processes: invalid int value: '11111
launch -n 2 --restarts -1 -- train | --restarts -1: use 0 or more
launch -n 2 --restart 3 -- train | did you mean --restarts?
launch -n 2 | nothing to launch; end the line in -- train and its options
launch -n 2 --available text.txt -- train --config test-tiny --layout.dp 2 \
    | has no effect without processes.elastic
launch -n 2 --available nowhere -- train --config test-tiny --layout.dp 2 \
    --processes.elastic [1,2] | --available nowhere: No such file or directory; write the number
launch -n 2 --available text.txt -- train --config test-tiny --layout.dp 2 \
    --processes.elastic [1,2] | ; write the number of processes into it
launch -n 3 -- train --config test-tiny --layout.dp 2 --processes.elastic [1,2] | start 1 or 2
launch -n 2 train | unrecognized arguments: train
launch -n 2 -- verify | verify cannot be launched; end the line in -- train
launch -n 2 -- {long} | aaa... cannot be launched
launch -n 2 -- train --layout.dp x | layout.dp: expected int, got x
launch -n 2 -- train --config test-tiny | 1 devices do not split over processes.count=2
launch -n 2 -- train --config test-tiny --layout.dp 2 --processes.id 0 | leave it out under launch

verify --layout.tp x | layout.tp: expected int, got x
verify --config test-tiny --layout.tp 16 --model.num_heads 16 | needs 16 devices
verify --run-dir nowhere | --run-dir nowhere holds no run
convert | --from-hf
convert --check no-such-directory | no-such-directory
comms --model.dtype int7 | model.dtype: expected one of
comms --config test-tiny --layout.dp 2048 --train.global_batch_size 4096 | at most 512 devices
comms --config test-tiny --picture x.txt | x.txt: use a name that ends in .png or .svg
memory --layout.zero 7 | layout.zero: expected one of 0, 1, 2, 3, got 7
memory --config test-tiny --picture no/x.png | name a file in a folder that exists
memory --run-dir . | --run-dir . holds no run
memory --config test-tiny --explain --quiet | which --explain leaves out; use one
memory --config test-tiny --explain --picture= | which --explain leaves out; use one
memory --explain --layout.pp=5 | leaves some of the pipeline
profile --steps 0 | --steps=0 must be at least 1
profile --steps 1000000000000 | --steps=1000000000000 must be at least 1
profile --steps few | steps
profile --trace folder | folder: already exists; name a new directory
profile --picture x.pdf | x.pdf: use a name that ends in .png or .svg
verify,comms,memory,profile --config quickstrat | quickstrat: no such file
verify,comms,memory,profile --config /dev/zero | /dev/zero is a device or a
verify,comms,memory,profile --layout.dp=3 | does not split over layout.dp=3
verify,comms,memory,profile --layout.schedule=zb-v | leave layout.schedule out
verify,comms,memory,profile --data.tokenizer=gpt2 | 'gpt2': no such file

plan | --gpus and --gpu are required: how many
plan --gpus 8 | --gpus and --gpu
plan --gpus eight --gpu h100 | gpus: expected int, got eight
plan --gpus 0 --gpu h100 | gpus is 0; use 1 to
plan --gpus 8 --gpu h300 | no such accelerator; did you mean
plan --gpus 8 --gpu h100 --node -1 | node is -1; use 0 to
plan --gpus 8 --gpu h100 --max-memory 0 | max_memory=0.0: use a share
plan --gpus 8 --gpu h100 --max-memory nan | --max-memory: expected float, got nan
plan --gpus 8 --gpu h100 --top 0 | top is 0; use 1 to
plan --gpus 8 --gpu h100 --hardware nowhere.yaml | nowhere.yaml: No such file
plan --gpus 8 --gpu h100 --layout.tpp 2 | unknown key layout.tpp; did you mean layout.tp?
plan --gpus 8 --gpu h100 --layout.tp two | layout.tp: expected a whole number, got two
plan --gpus 8 --gpu h100 --layout.tp | --layout.tp: the value is missing
plan --gpus 8 --gpu h100 --model.remat all | model.remat: expected one of none
plan --gpus 8 --gpu h100 --out text.txt | text.txt: exists; name another file
plan --gpus 8 --gpu h100 --out nowhere/new.yaml | No such file or directory
plan --gpus 8 --gpu h100 --model.dtype float32 | model.dtype=float32: the hardware table
plan --gpus 8 --gpu h100 --tokens -1 | --tokens -1: use a number above 0
plan --gpus 8 --gpu h100 --price 2 | --price has no effect without --tokens
plan rank | unknown key rank
plan validate --rows nowhere.csv | nowhere.csv: No such file
plan validate --rows '' | '' is not a path
plan validate --rows pipe.csv | pipe.csv is not a file on disk; name
plan validate --rows table.csv | unknown column 'F0'; remove it
plan validate --rows binary.txt | is not text; name a .csv file of rows
plan validate --rows steps.csv --hardware nowhere.yaml | nowhere.yaml: No such file
plan validate --rows steps.csv --hardware pipe | pipe is not a file on disk; name a YAML
plan validate --rows steps.csv --hardware text.txt | text.txt
plan validate --rows steps.csv --hardware binary.txt | is not text; name a YAML file
plan validate --run-dir runs --rows table.csv | both are given; use one
plan validate --row | did you mean --rows?
plan validate stray | unrecognized arguments: stray
plan validate --out new.yaml | unrecognized arguments: --out
plan calibrate | --out is required: the hardware file
plan calibrate --out new.yaml --held-out | unrecognized arguments: --held-out
plan calibrate --out text.txt | text.txt: exists; name another file, or add --overwrite
plan calibrate --out folder | folder: not a regular file; name another
plan calibrate --out pipe --overwrite | pipe: not a regular file; name another
plan calibrate --out loop --overwrite | loop: not a regular file; name another
plan calibrate --out nowhere/new.yaml | No such file or directory; name a file in a
plan calibrate --out '' | '' is not a path
plan calibrate --out {long} | no path is so long
plan calibrate --out new.yaml --gpu h20 | --gpu h20: no such accelerator; did you mean h200?
plan calibrate --out new.yaml --gpu {long} | --gpu aaaaaaaaaa
plan calibrate --out new.yaml --name 'a,b' | use letters, digits
plan calibrate --out 8.yaml | --name '8': use letters, digits
plan calibrate --out new.yaml --seconds 0 | --seconds 0: use more than 0
plan calibrate --out new.yaml --seconds nan | --seconds nan: use more than 0
plan calibrate --out new.yaml --seconds long | invalid float value: 'long'
plan calibrate --out new.yaml --hardware nowhere.yaml | nowhere.yaml: No such file

doctor --config nowhere | nowhere: no such file or packaged config
doctor --wait soon | --wait: invalid float value: 'soon'
doctor --wait nan | --wait nan: use seconds above 0
doctor --overwrite | --overwrite has no effect without --out
doctor --out no/page.md | name a file in a writable folder
doctor --out text.txt | exists; name another file
doctor --link | did you mean --links?

completion | required: shell
completion tcsh | invalid choice: 'tcsh'
trian | did you mean train?
frobnicate | use one of train, launch, generate
--versoin | unknown command '--versoin'
"""


def rows() -> Iterator[tuple[str, str]]:
    for line in TABLE.replace("\\\n", "").splitlines():
        if line:
            command, _, words = line.partition("|")
            names, _, options = command.strip().partition(" ")
            for name in names.split(","):
                yield f"{name} {options}".strip(), words.strip()


ROWS = list(rows())


def test_the_table_has_bad_lines_for_every_command():
    assert len(ROWS) >= 100
    assert {line.split()[0] for line, _ in ROWS} >= {command.name for command in COMMANDS}


@pytest.mark.parametrize(("line", "words"), ROWS, ids=[line for line, _ in ROWS])
def test_a_bad_line_is_refused_in_one_line(folder, monkeypatch, capfd, line, words):
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError) as caught:
        main([word.format_map(MARKS) for word in shlex.split(line)])
    message = " ".join(str(caught.value).split())
    assert words in message
    assert len(message) < 700
    assert capfd.readouterr() == ("", "")
    assert sorted(folder.rglob("*")) == before
