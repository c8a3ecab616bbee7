"""Bad options of the other commands: one line that names the option or file, and the remedy."""

import importlib

import pytest

LONG = "a" * 200_000
MESH, PIPELINE, DATA, GENERATE = (
    "jaxptd.mesh",
    "jaxptd.pipeline.__main__",
    "jaxptd.data.__main__",
    "jaxptd.generate",
)
WITH_CONFIG = ("jaxptd.comms", "jaxptd.memory", "jaxptd.verify", "jaxptd.profile")
SIZES = "--stages 4 --micro-batches 8"
OUT = "--out {folder}/new.bin"
RUN = "--run-dir {folder}/folder"

# A command, what is passed, and a piece of the message.
COMMANDS = [
    (MESH, "", "--world-size"),
    (MESH, "--world-size", "--world-size: expected one argument"),
    (MESH, "--world-size x", "--world-size: invalid int value: 'x'"),
    (MESH, "--world-size 1.5", "--world-size: invalid int value: '1.5'"),
    (MESH, f"--world-size {LONG}", "--world-size: invalid int value: 'aaaaaaaaaa"),
    (MESH, f"--world-size {'1' * 5000}", "--world-size: invalid int value: '11111111"),
    (MESH, "--world-size 0", "world size 0: use 1 to 1048576 devices"),
    (MESH, "--world-size 9999999", "world size 9999999: use 1 to 1048576 devices"),
    (MESH, "--world-size 12 --tp 5", "does not split into tp=5; use a multiple of 5"),
    (MESH, "--world-size 8 --tp 2 --dp 3", "does not split into dp=3 x tp=2; use world size 6"),
    (MESH, "--world-size 4 --tp 0", "layout.tp=0: an axis has at least one device; use 1 or more"),
    (MESH, "--world-size 4 --tp -2", "layout.tp=-2: an axis has at least one device; use 1"),
    (MESH, f"--world-size 4 --tp {10**30}", "use a number below 2147483648"),
    (MESH, "--world-size 4 --tp 2 --row 2", "set tp=1 or row=col=1"),
    (MESH, "--world-size 4 --nonsense", "unrecognized arguments: --nonsense; see --help"),
    (MESH, f"--world-size 4 --{LONG}", "unrecognized arguments: --aaaaaaaaaa"),
    (PIPELINE, "--micro-batches 4", "--stages"),
    (PIPELINE, "--stages 4", "--micro-batches"),
    (PIPELINE, "--stages x --micro-batches 4", "--stages: invalid int value: 'x'"),
    (PIPELINE, f"{SIZES} --schedule 1f2b", "schedule=1f2b: use one of 1f1b, gpipe"),
    (PIPELINE, f"{SIZES} --schedule {LONG}", "...: use one of 1f1b, gpipe"),
    (PIPELINE, f"{SIZES} --schedule {LONG}.csv", "...: File name too long; name a .csv file"),
    (PIPELINE, f"{SIZES} --schedule {{folder}}/none.csv", "none.csv: No such file or directory"),
    (PIPELINE, f"{SIZES} --schedule {{folder}}/bad.csv", "bad.csv: stage 0 has a cell 'what'; wri"),
    (PIPELINE, f"{SIZES} --schedule {{folder}}/pipe.csv", "pipe.csv is no file on disk; name a"),
    (PIPELINE, f"{SIZES} --schedule {{folder}}/folder.csv", "folder.csv is no file on disk; name"),
    (PIPELINE, f"{SIZES} --virtual-stages 2", "leave virtual_stages out, or use schedule=interl"),
    (PIPELINE, f"{SIZES} --schedule interleaved --virtual-stages 1", "use 2 or more"),
    (PIPELINE, f"{SIZES} --durations 1 1 nan", "durations F, B, W = (1.0, 1.0, nan): use"),
    (PIPELINE, f"{SIZES} --durations 1 1", "--durations: expected 3 arguments"),
    (DATA, OUT, "--source"),
    (DATA, "--source x", "--out"),
    (DATA, "--source {folder}/text.txt --out {folder}/x.txt", "end it in .bin"),
    (DATA, "--source {folder}/text.txt --out {folder}/odd.bin", "odd.bin exists; choose another"),
    (DATA, f"--source {{folder}}/none.txt {OUT}", "none.txt' matches no file; use stdlib, or"),
    (DATA, f"--source {{folder}}/folder {OUT}", "is a folder; name its files with a glob"),
    (DATA, f"--source {{folder}}/pipe {OUT}", "pipe is not a regular file; name one on disk"),
    (DATA, f"--source {{folder}}/odd.bin {OUT}", "odd.bin holds tokens already; name text or"),
    (DATA, f"--source x {OUT} --tokenizer {{folder}}/folder", "it is no file on disk; use bytes"),
    (DATA, f"--source x {OUT} --tokenizer gpt2", "'gpt2': no such file; use bytes, or the path"),
    (GENERATE, RUN, "{folder}/folder holds no checkpoint; train with --train.run_dir"),
    (GENERATE, f"{RUN} --tokens 0", "--tokens 0: write 1 token or more"),
    (GENERATE, f"{RUN} --tokens x", "--tokens: invalid int value: 'x'"),
    (GENERATE, f"{RUN} --temperature nan", "temperature=nan must be a number, 0 or more"),
    (GENERATE, f"{RUN} --temperature -1", "temperature=-1.0 must be a number, 0 or more"),
    (GENERATE, f"{RUN} --top-k -1", "top_k=-1 must be 0 (all tokens) or more"),
    (GENERATE, f"{RUN} --platform tpu", "--platform: invalid choice: 'tpu' (choose from"),
    ("jaxptd.profile", "--config test-tiny --steps 0", "--steps=0 must be at least 1"),
    ("jaxptd.profile", "--config test-tiny --steps x", "--steps: expected int, got x"),
    *((command, "--config quickstrat", "quickstrat: no such file") for command in WITH_CONFIG),
    *((command, "--config /dev/zero", "/dev/zero is a device or a") for command in WITH_CONFIG),
    *((command, "--layout.tp=3", "use a size that divides 8") for command in WITH_CONFIG),
    *((command, "--layout.schedule=zb-v", "leave layout.schedule out") for command in WITH_CONFIG),
    *((command, "--data.tokenizer=gpt2", "'gpt2': no such file") for command in WITH_CONFIG),
]


@pytest.mark.parametrize(("command", "argv", "words"), COMMANDS)
def test_an_option_is_refused(command, argv, words, refused) -> None:
    message = refused(importlib.import_module(command).main, argv.split())
    assert words in message
