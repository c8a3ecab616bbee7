"""The documentation: code prints what the page shows; quotes and tables are current.

A page's ```python blocks run in order in one namespace. A block must print the ```text block that
follows it, or nothing if none follows.
"""

import ast
import copy
import dataclasses
import inspect
import itertools
import re
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import jax
import pytest
import yaml
from command_lines import accept, command_lines
from turns import slow

import jaxptd
from jaxptd.commands.command_line import describe_type
from jaxptd.commands.table import COMMANDS
from jaxptd.config import Config, ModelConfig, from_dict
from jaxptd.config.block import FAMILIES
from jaxptd.config.written import sections
from jaxptd.run.folder import difference

ROOT = Path(jaxptd.__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)
# Pages whose code takes many seconds.
LONG = ("comms.md", "context_parallel.md", "data_parallel.md", "debug_nans.md", "experts.md")
LONG += ("grid.md", "memory.md", "papers.md", "pipeline.md", "precision.md", "python.md")
LONG += (
    "quickstart.md",
    "randomness.md",
    "resume_other_layout.md",
    "sequence_parallel.md",
    "tensor_parallel.md",
)
LONG += ("verify.md", "zero.md")


class Block(NamedTuple):
    """A fenced block: ```kind argument, its text, and the text between it and the next block."""

    kind: str
    argument: str
    text: str
    line: int
    after: str


def blocks(source: str) -> list[Block]:
    parts = re.split(r"^```(\S+)[ \t]*(.*)\n((?:(?!```).*\n)*)```[ \t]*$", source, flags=re.M)
    found, line = [], parts[0].count("\n") + 1
    for kind, argument, text, after in zip(
        parts[1::4], parts[2::4], parts[3::4], parts[4::4], strict=True
    ):
        found.append(Block(kind, argument, text, line, after))
        line += text.count("\n") + 1 + after.count("\n")
    return found


def run(source: str, name: str, printed: Any) -> list[str]:
    """Runs a page, returns wrong outputs; `printed()` is the text printed since its last call."""
    found, wrong, namespace = blocks(source), [], {"__name__": "__main__"}
    for block, follower in itertools.zip_longest(found, found[1:]):
        if block.kind != "python":
            continue
        code = compile("\n" * block.line + block.text, name, "exec")
        exec(code, namespace)
        says = follower.text if follower and follower.kind == "text" and _touch(block) else ""
        if (prints := printed()) != says:
            wrong.append(f"{name}:{block.line} prints\n{prints}and the page says\n{says}")
    return wrong


def _touch(block: Block) -> bool:
    return not block.after.strip()


@pytest.mark.parametrize(
    "page",
    [slow(page) if page.name in LONG else page for page in PAGES],
    ids=lambda page: page.relative_to(DOCS).as_posix(),
)
def test_the_code_of_a_page_prints_what_the_page_says(page, capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)  # a page may write files
    wrong = run(page.read_text(encoding="utf-8"), page.name, lambda: capsys.readouterr().out)
    assert not wrong, "\n".join(wrong)
    assert not jax.config.read("jax_enable_x64")


def test_a_page_that_is_out_of_date_is_found(capsys) -> None:
    page = "```python\nprint(2)\n```\n\n```text\n3\n```\n\n```python\nprint(4)\n```\n"
    wrong = run(page, "page", lambda: capsys.readouterr().out)
    assert [line.partition(" ")[0] for line in wrong] == ["page:1", "page:9"]


def quotes() -> list[Any]:
    return [
        pytest.param(page.parent / block.argument, block.text, id=f"{page.name}:{block.line}")
        for page in PAGES
        for block in blocks(page.read_text(encoding="utf-8"))
        if block.kind == "{literalinclude}"
    ]


@pytest.mark.parametrize(("path", "text"), quotes())
def test_what_a_page_quotes_is_there(path: Path, text: str) -> None:
    source = path.read_text(encoding="utf-8")
    options = dict(re.findall(r"^:(\S+): (.*)$", text, flags=re.M))
    if set(options) == {"language"}:  # a whole file in another language
        return
    assert set(options) == {"pyobject"}
    nodes: Any = ast.parse(source)
    for name in options["pyobject"].split("."):
        named = [node for node in nodes.body if getattr(node, "name", None) == name]
        assert named, f"{path} has no {options['pyobject']}"
        nodes = named[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_are_there(page) -> None:
    source = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)[^):]*\)", source)
    links += [b.argument for b in blocks(source) if b.kind in ("{figure}", "{literalinclude}")]
    assert [link for link in links if not (page.parent / link).is_file()] == []
    pages = [(page.parent / link).resolve() for link in links if link.endswith(".md")]
    assert [link for link in pages if DOCS not in link.parents] == []  # Sphinx knows only these


def test_every_picture_is_a_drawing_that_a_page_shows() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for picture in (DOCS / "pictures").iterdir():
        assert ElementTree.parse(picture).getroot().tag == "{http://www.w3.org/2000/svg}svg"
        assert f"{{figure}} pictures/{picture.name}" in text


def test_every_page_is_in_the_table_of_contents() -> None:
    index = blocks((DOCS / "index.md").read_text(encoding="utf-8"))
    trees = [b.text.splitlines() for b in index if b.kind == "{toctree}"]
    listed = [f"{line}.md" for tree in trees for line in tree if line and not line.startswith(":")]
    pages = {page.relative_to(DOCS).as_posix() for page in PAGES} - {"index.md"}
    assert sorted(listed) == sorted(pages)


def test_fields_that_how_to_pages_name_are_there() -> None:
    fields = {
        f"{section.name}.{field.name}"
        for section in dataclasses.fields(Config)
        for field in dataclasses.fields(section.type)
    }
    sections = "|".join(section.name for section in dataclasses.fields(Config))
    found = set()
    for page in (DOCS / "howto").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        # tables of other programs' flags list ours in the second column
        cells = [line.split(" | ", 2)[1:] for line in text.splitlines() if line.startswith("| ")]
        ours = "\n".join(str(cell) for row in cells for cell in row)
        ours = ours if page.name.startswith("from_") else text
        found |= set(re.findall(rf"`((?:{sections})\.\w+)(?=[`:])", ours))
    assert found - fields == set()
    assert len(found) > 60


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The cells of the table below a row of headings."""
    text = (DOCS / page).read_text(encoding="utf-8").partition(heading)[2].partition("\n\n")[0]
    return [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]


def test_the_table_of_families_has_all_of_them() -> None:
    for cells in (rows := rows_of("models.md", "| family | ")):
        for name in re.findall(r"`([\w-]+)`", cells[0]):
            family = FAMILIES[name]
            norm, shown = cells[1].partition(",")[0], cells[5]
            assert (norm, float(cells[2])) == (family["norm"], family["norm_eps"]), name
            assert shown == family["positions"], name
            if shown == "rope":
                assert float(cells[6].replace(",", "")) == family["rope"].theta, name
    listed = {name for cells in rows for name in re.findall(r"`([\w-]+)`", cells[0])}
    assert listed == {*FAMILIES}


def test_the_layout_to_choose_has_the_figures_of_its_plan() -> None:
    """Both pages agree on a layout's predicted seconds, compiled seconds and memory."""
    compiled_rows = rows_of("planning.md", "| layout | micro-batch | s/step predicted")
    of_plan = {row[0]: row for row in compiled_rows}
    for layout, predicted, compiled, held, _ in rows_of("howto/choose_layout.md", "| layout | s/s"):
        (row,) = (each for name, each in of_plan.items() if name.startswith(layout.rstrip("`")))
        assert [predicted, compiled] == row[2:4], layout
        assert float(held) == round(float(row[4])), layout


def test_the_reference_has_all_that_is_exported() -> None:
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    objects = re.findall(r"^\.\. auto\w+:: jaxptd\.([\w.]+)$", text, flags=re.M)
    assert {name.partition(".")[0] for name in objects} == set(jaxptd.__all__) - {"__version__"}


def test_pages_load_nothing_from_a_network() -> None:
    configuration = (DOCS / "conf.py").read_text(encoding="utf-8")
    assert "mathjax" not in configuration.lower()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert "$$" not in text, page.name
        assert "{math}" not in text, page.name


# ---- commands and configs ---------------------------------------------------------------------


def test_commands_are_accepted(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    checked = set()
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8")):
            for name, options in command_lines(block.text) if block.kind == "sh" else ():
                accept(name, options)
                checked.add(name)
    assert checked == {command.name for command in COMMANDS}


def test_configs_are_accepted() -> None:
    configs = [
        yaml.safe_load(block.text)
        for page in PAGES
        for block in blocks(page.read_text(encoding="utf-8"))
        if block.kind == "yaml"
    ]
    assert [isinstance(from_dict(config), Config) for config in configs] == [True] * len(configs)
    assert configs


# ---- the tables of docs/training.md -----------------------------------------------------------


def described(section: type) -> dict[str, str]:
    """The fields of a section and their meaning, from the `Args:` of its docstring."""
    text = inspect.cleandoc(section.__doc__ or "").partition("Args:\n")[2]
    fields = re.findall(r"^ {4}(\w+): ((?:.+\n?(?: {8}.*\n?)*))", text, flags=re.M)
    return {name: " ".join(meaning.split()).rstrip(".") for name, meaning in fields}


def may_change(section: str, field: str) -> bool:
    """True if a run may be resumed with another value of this field."""
    config = Config(ModelConfig(family="llama"))
    saved = copy.deepcopy(config)
    fields = getattr(saved, section)
    of_layers = field in ("window_layers", "softcap_layers")
    # the value that null stands for
    null = (2, 6) if field == "head_sizes" else (False, True) if of_layers else 3
    other = null if getattr(fields, field) is None else "something else"
    object.__setattr__(fields, field, other)
    return difference(config, saved) is None


def table(section: dataclasses.Field) -> str:
    """The table of a section, as it must appear on the page."""
    cls: Any = section.type
    meanings = described(cls)
    assert list(meanings) == [field.name for field in dataclasses.fields(cls)]
    rows = ["| field | default | values | resuming | meaning |", "|---|---|---|---|---|"]
    for field in dataclasses.fields(cls):
        if f"{section.name}.{field.name}" in sections():
            continue  # it has a separate table
        default = yaml.safe_dump(field.default).splitlines()[0]
        resuming = "may change" if may_change(section.name, field.name) else "same"
        values = describe_type(field.type)
        meaning = meanings[field.name]
        rows.append(f"| `{field.name}` | `{default}` | {values} | {resuming} | {meaning} |")
    return "\n".join(rows)


@pytest.mark.parametrize("name", [name for name in sections() if "." in name])
def test_the_table_of_a_section_of_the_model_is_current(name: str) -> None:
    cls, rows = sections()[name], ["| field | values | meaning |", "|---|---|---|"]
    meanings = described(cls)
    assert list(meanings) == [field.name for field in dataclasses.fields(cls)]
    for field in dataclasses.fields(cls):
        values = describe_type(field.type)
        rows.append(f"| `{field.name}` | {values} | {meanings[field.name]} |")
    page = (DOCS / "training.md").read_text(encoding="utf-8")
    found = page.partition(f"#### `{name}`\n")[2].partition("\n###")[0]
    table = "\n".join(rows)
    assert table in found, f"put into docs/training.md:\n\n{table}"


@pytest.mark.parametrize("section", dataclasses.fields(Config), ids=lambda section: section.name)
def test_the_table_of_a_section_is_current(section: dataclasses.Field) -> None:
    page = (DOCS / "training.md").read_text(encoding="utf-8")
    found = page.partition(f"### `{section.name}`\n")[2].partition("\n\n### ")[0]
    assert table(section) in found, f"put into docs/training.md:\n\n{table(section)}"
