"""Bad config files give one line that names the file and the remedy before anything else runs."""

import pytest

from jaxptd.train import main

SECTIONS = "model, layout, data, optimizer, train, checkpoint, processes"
KEYS = "expected `name: value` lines"
LONG = "a" * 200_000
# Each line repeats the previous one nine times.
BOMB = "  - &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"  - &{outer} [{', '.join([f'*{inner}'] * 9)}]\n"
    for inner, outer in zip("abcdefgh", "bcdefghi", strict=True)
)

# Content of a file, and parts of the message after its name.
CONTENTS = [
    ("", KEYS, "found nothing; see --print_config"),
    ("\n\n", KEYS, "found nothing"),
    ("# only a comment\n", KEYS, "found nothing"),
    ("---\n", KEYS, "found null"),
    ("{}", KEYS, "found map"),
    ("just words", KEYS, "found str"),
    ("3", KEYS, "found int"),
    ("[1, 2]", KEYS, "found seq"),
    ("- model: {num_layers: 3}", KEYS, "found seq"),
    ("model:", "section model", KEYS, "found null; see --print_config"),
    ("model: 3", "section model", KEYS, "found int"),
    ("model: [num_layers, 3]", "section model", KEYS, "found seq"),
    ("modle: {num_layers: 2}", f"unknown section modle; use {SECTIONS}"),
    ("num_layers: 2", f"unknown section num_layers; use {SECTIONS}"),
    ("model.num_layers: 2", f"unknown section model.num_layers; use {SECTIONS}"),
    ("config: quickstart", f"unknown section config; use {SECTIONS}"),
    ("~: 3", f"unknown section ~; use {SECTIONS}"),
    (
        "? [a, b]\n: 3",
        "a key in line 1 is a sequence, not a name; ${...} and {{...}} are not expanded",
    ),
    (f"? {LONG}\n: 3", "unknown section aaaaaaaa", f"...; use {SECTIONS}"),
    ("model: {num_layer: 2}", "unknown key model.num_layer; did you mean model.num_layers?"),
    ("model: {zz: 2}", "unknown key model.zz; see jaxptd train --help-all"),
    ("model: {1: 2}", "unknown key model.1; see jaxptd train --help-all"),
    ("model: {? {a: b} : 3}", "a key in line 1 is a mapping, not a name"),
    ("model: {num_layers: {{ 2 }}}", "a key in line 1 is a mapping, not a name"),
    ("data:\n  source: {? [a, b] : 1.0}", "a key in line 2 is a sequence, not a name"),
    ("data: {source: {<<: 3}}", "expected a mapping or list of mappings for merging"),
    ("train:\n  run_dir: {{ a }}/x", "is not YAML", "${...} and {{...}} are not expanded"),
    ("train: {run_dir: ${HOME}/x}", "is not YAML", "${...} and {{...}} are not expanded"),
    ("data: {source: 3}", "data.source: 3 is a number in YAML", "write '3'"),
    ("train: {seed: 0123}", "train.seed: 0123 begins with 0", "write 123, or 83 for octal"),
    ("train: {seed: '0123'}", "train.seed: 0123 begins with 0", "write 123, or 83 for octal"),
    ("train: {seed: -010}", "train.seed: -010 begins with 0", "write -10, or -8 for octal"),
    ("train: {seed: 08}", "train.seed: 08 begins with 0", "; write 8"),
    ("train: {steps: 1:30}", "train.steps: 1:30 is a base-60 number in YAML, 90; write it"),
    ("optimizer: {learning_rate: 1:30.5}", "1:30.5 is a base-60 number in YAML, 90.5"),
    ("train: {profile: [010, 20]}", "train.profile: 010 begins with 0"),
    ("data: {source: {a: 1:30}}", "data.source: 1:30 is a base-60 number"),
    ("data: {source: {yes: 1.0}}", "data.source: yes is true or false in YAML", "write 'yes'"),
    ("data: {source: [a, 07]}", "data.source: 07 is a number in YAML", "write '07'"),
    ("train: {run_dir: 2024}", "train.run_dir: 2024 is a number in YAML", "write '2024'"),
    ("train: {run_dir: 1e3}", "train.run_dir: 1e3 is a number in YAML", "write '1e3'"),
    ("data: {prompt_field: on}", "data.prompt_field: on is true or false in YAML"),
    ("optimizer: {decay: off}", "optimizer.decay: expected one of cosine", "got off"),
    ("layout: {offload: [no]}", "layout.offload: expected one of optimizer", "got no"),
    (f"model: {{? {LONG} : 3}}", "unknown key model.aaaaaaa", "...; see jaxptd train --help-all"),
    ("model: &a {num_layers: 2}\ntrain: {<<: *a}", "unknown key train.<<; see jaxptd train"),
    ("model: {num_layers: 2, num_layers: 3}", "section model: num_layers appears twice; remove"),
    ("train: {steps: 1}\ntrain: {steps: 2}", "train appears twice; remove one"),
    ("data: {source: {a: 1, a: 2}}", "data.source: a appears twice; remove one"),
    ("model: [1", "is not YAML", "line 1"),
    ("model: {num_layers: 2", "is not YAML", "line 1"),
    ("model:\n\tnum_layers: 3", "is not YAML", "'\\t'", "line 2"),
    ("model: 'x", "is not YAML"),
    ("model: *nowhere", "is not YAML: found undefined alias 'nowhere'"),
    ("model: %x", "is not YAML"),
    ("a: 1\n---\nb: 2\n", "is not YAML", "single document"),
    ("%YAML 9.9\n---\nmodel: 3", "is not YAML", "incompatible YAML document"),
    ("model: {dropout: \x07}", "is not YAML", "special characters are not allowed"),
    ("model: {dropout: \0}", "is not YAML", "special characters are not allowed"),
    (f"train: *{LONG}", "is not YAML: found undefined alias 'aaaaaaa", "..."),
    ("[" * 900, "too many brackets; name a YAML config file"),
    ("data: {source: " + "[" * 700 + "]" * 700 + "}", "too many brackets; name a YAML config"),
    ("- " * 900, "too many brackets; name a YAML config file"),
    ("data:\n  source:\n" + BOMB, "with its aliases it has more than 2000 values; write the"),
    ("model:\n" + BOMB, "with its aliases it has more than 2000 values; write the values out"),
    ("data: {source: &a [*a]}", "with its aliases it has more than 2000 values; write the"),
    ("&a model: *a\ndata: &b {source: *b}", "with its aliases it has more than 2000 values"),
    (f"data: {{source: [{'a, ' * 3000}]}}", "it has more than 2000 values", "with globs"),
    (
        "train: {run_dir: !!python/object/apply:os.abort []}",
        "tag !!python/object/apply:os.abort",
    ),
    ("train: !!python/object:os.abort\n  a: 3", "has the tag !!python/object:os.abort in line 1"),
    ("train:\n  steps: !!python/name:os.abort", "os.abort in line 2; use values without tags"),
    ("train: {run_dir: !mine x}", "has the tag !mine in line 1; use values without tags"),
    (f"train: {{steps: !{LONG} x}}", "has the tag !aaaaaaa", "... in line 1; use values without"),
    ("train: {steps: !!int x}", "has the tag !!int in line 1; use values without tags"),
    ("train: {run_dir: !!binary aGk=}", "has the tag !!binary in line 1; use values without"),
    ("data: {source: !!set {a, b}}", "has the tag !!set in line 1; use values without tags"),
    ("train:\n  steps: " + "1" * 5000, "has a number of 5000 digits in line 2; use fewer"),
    (b"\xff\xfe\x00\x01", "is not text; name a YAML config file"),
    ("model: {num_layers: 2}".encode("utf-16"), "is not text; name a YAML config file"),
    (b"model: {num_layers: \xe9}", "is not text; name a YAML config file"),
]

# Values in readable files: the message names the field.
VALUES = [
    ("model: {num_layers: x}", "model.num_layers: expected int, got x"),
    ("model: {num_layers: .nan}", "model.num_layers: expected int, got nan"),
    ("model: {num_layers: [2]}", "model.num_layers: expected int, got [2]"),
    ("model: {num_layers: null}", "model.num_layers=None: use a whole number"),
    (f"model: {{num_layers: {LONG}}}", "model.num_layers: expected int, got aaaa", "..."),
    ("model: {tie_embeddings: 1}", "model.tie_embeddings: expected bool, got 1"),
    ("train: {steps: 1e3}", "train.steps: expected int, got 1000.0"),
    (f"train: {{steps: {10**30}}}", "train.steps=1000000000", "use a number below 2147483648"),
    ("train: {run_dir: '${oc.env:HOME}/x'}", "train.run_dir='${oc.env:HOME}/x': ${oc.env:HOME} is"),
    ("train: {run_dir: quux://bucket/run}", "train.run_dir=quux://bucket/run: no store has"),
    ("data: {source: {a: 1, b: x}}", "data.source: expected str or list[str] or dict[str, float]"),
    ("data: {source: {a: 1, b: 0}}", "data.source: 'b' has the weight 0.0; use a number above 0"),
    (f"data: {{source: '{LONG}'}}", "data.source='aaaaaaaaa", "no path is so long; use at most"),
    (f"train: {{run_dir: '{'[' * 500}'}}", "train.run_dir='[[[[[[", "no path is so long; use at"),
    ('data: {source: "a\\0b"}', r"data.source='a\x00b': it has a null byte; remove it"),
    ("optimizer: {learning_rate: .inf}", "optimizer.learning_rate=inf must be a number above 0"),
    (
        "model: {num_heads: 7}",
        "model.hidden_size=256 does not split",
        "use a model.num_heads that divides",
    ),
    ("layout: {stage_layers: {a: 1}}", "layout.stage_layers: expected tuple[int, ...] or null"),
    ("checkpoint: {every: yes}", "checkpoint.every: expected int, got True"),
]

# Value of --config, and parts of the message.
PATHS = [
    ("", "--config is empty", "or one of", "quickstart"),
    (
        "quickstrat",
        "quickstrat: no such file or packaged config; did you mean quickstart?",
    ),
    (
        "quickstart.yml",
        "no such file or packaged config; did you mean quickstart?",
    ),
    ("{folder}/none.yaml", "{folder}/none.yaml: No such file or directory; name a YAML config"),
    ("{folder}/text.txt/run.yaml", "Not a directory; name a YAML config file"),
    ("{folder}/loop", "{folder}/loop: Too many levels of symbolic links; name a YAML config"),
    ("{folder}", "{folder} is a directory; name a YAML config file"),
    (
        "{folder}/pipe",
        "{folder}/pipe is a device or a pipe, not a file on disk; name a YAML config",
    ),
    ("/dev/zero", "/dev/zero is a device or a pipe, not a file on disk; name a YAML config"),
    ("/dev/null", "/dev/null is a device or a pipe, not a file on disk; name a YAML config"),
    ("{folder}/binary.txt", "{folder}/binary.txt is not text; name a YAML config file"),
    (
        "{folder}/large.yaml",
        "large.yaml has 1000002 bytes, but a config at most 1000000; name a YAML",
    ),
    ("~/none.yaml", "/nobody/none.yaml: No such file or directory; name a YAML config"),
    ("a\0b", r"--config=a\x00b: it has a null byte; remove it"),
    ("./a\0b", r"--config=./a\x00b: it has a null byte; remove it"),
    ("a\udcffb", r"--config=a\udcffb: it is not valid Unicode; use text or a path that is"),
    (LONG, "--config=aaaaaaaaaa", "no path is so long; use at most 4095 bytes, 255 for each name"),
    ("model: {num_layers: 3}", "no such file or packaged config; use a path"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("config") / "run.yaml"


@pytest.mark.parametrize(("content", "words"), [(first, rest) for first, *rest in CONTENTS])
def test_a_file_that_is_no_config_is_named(content, words, path, refused) -> None:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refused(main, ["--config", str(path)])
    assert message.startswith(str(path))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(("content", "words"), [(first, rest) for first, *rest in VALUES])
def test_a_value_in_a_file_names_its_field(content, words, path, refused) -> None:
    path.write_text(content)
    message = refused(main, ["--config", str(path)])
    assert message.startswith(words[0])
    assert all(word in message for word in words), message


@pytest.mark.parametrize(("name", "words"), [(first, rest) for first, *rest in PATHS])
def test_what_is_no_file_is_refused_unread(name, words, refused) -> None:
    message = refused(main, ["--config", name])
    assert all(word in message for word in words), message
