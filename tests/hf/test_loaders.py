"""vLLM and SGLang have a class for every export that writes text, or the page says not."""

import csv
import json
from pathlib import Path

import pytest
from hugging import random_directory

from jaxptd.hf.convert import main as convert
from jaxptd.hf.families import FAMILIES
from jaxptd.models.families import FAMILIES as OURS

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "hugging_face.md"
LINES = [x for x in (HERE / "loaders.csv").read_text().splitlines() if not x.startswith("#")]
ROWS = list(csv.DictReader(LINES))
TENSORS = [row for row in ROWS if row["kind"] != "architecture"]
# What a loader has no class for.
WITHOUT = {
    "vllm": {"T5ForConditionalGeneration"},
    "sglang": {"T5ForConditionalGeneration", "Olmo3ForCausalLM"},
}


@pytest.mark.parametrize("loader", WITHOUT)
def test_a_loader_has_the_class_of_every_export_that_writes_text(loader: str) -> None:
    writers = [each for each in FAMILIES.values() if OURS[each.name].writing is not None]
    known = {
        row["name"] for row in ROWS if (row["loader"], row["kind"]) == (loader, "architecture")
    }
    assert len(writers) > 15
    assert {each.architecture for each in writers} - known == WITHOUT[loader]
    section = PAGE.read_text().partition("### vLLM and SGLang")[2].partition("\n## ")[0]
    assert all(f"`{name}`" in section for name in WITHOUT[loader])


@pytest.mark.parametrize("row", TENSORS, ids=lambda row: f"{row['loader']} {row['name']}")
def test_an_export_has_the_names_that_a_loader_reads(row: dict[str, str]) -> None:
    rules = FAMILIES[row["kind"]].tensors.rules
    assert any(rule.name.endswith(row["name"]) for rule in rules)


def test_an_export_names_its_class(tmp_path: Path) -> None:
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 8, "vocab_size": 300}
    there, run, back = (tmp_path / name for name in ("there", "run", "back"))
    random_directory(there, {"model_type": "gpt2", **sizes})
    convert(["--from-hf", str(there), "--out", str(run), "--quiet"])
    convert(["--to-hf", str(run), "--out", str(back), "--quiet"])
    assert json.loads((back / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
