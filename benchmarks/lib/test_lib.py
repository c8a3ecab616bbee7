"""Pages keep their text, options are parsed, nothing is assembled."""

import subprocess
from pathlib import Path

import pytest

from benchmarks.lib.compiler import UNTRIED, compiler_options
from benchmarks.lib.pages import RESULTS, TABLE, VERSIONS, joined, renew
from jaxptd.analysis.report import table, versions
from jaxptd.errors import UserError


def test_a_page_keeps_its_words_and_gets_new_tables(tmp_path: Path) -> None:
    path, new = tmp_path / "page.md", table([["a", "b"], ["3", "4"]])
    renew(path, joined("# A page", "2026-01-02; Python 3.1, jax 0.1; 2 CPU cores, x. More.", new))
    words = path.read_text().replace("| 3 | 4 |", "| 1 | 2 |") + "\nWords.\n"
    path.write_text(words)
    renew(path, joined("# Another", versions(), new))
    assert path.read_text() == VERSIONS.sub(versions(), words).replace("| 1 | 2 |", "| 3 | 4 |")
    with pytest.raises(UserError, match="has 1 tables, not 2; write to another folder"):
        renew(path, joined(new, new))


@pytest.mark.parametrize("page", sorted(RESULTS.glob("*.md")), ids=lambda path: path.stem)
def test_tables_of_a_page_are_found(page: Path, tmp_path: Path) -> None:
    """A page rewritten with its own tables stays the same."""
    text, copy = page.read_text(encoding="utf-8"), tmp_path / page.name
    copy.write_text(text, encoding="utf-8")
    renew(copy, joined(*TABLE.findall(text)))
    assert copy.read_text(encoding="utf-8") == text


def test_compiler_option_without_a_value_is_refused() -> None:
    assert compiler_options(["a=b=c", "d=1"]) == {"a": "b=c", "d": "1"}
    with pytest.raises(UserError, match="--compiler fast: write it as name=value"):
        compiler_options(["fast"])


def test_the_stand_in_for_an_assembler_writes_the_file_that_is_asked_for(tmp_path: Path) -> None:
    ptxas = Path(UNTRIED["xla_gpu_cuda_data_dir"]) / "bin" / "ptxas"
    asked = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True)
    assert "release 13" in asked.stdout
    made = tmp_path / "code"
    subprocess.run([ptxas, tmp_path / "kernel.ptx", "-o", made, "-arch=sm_90a"], check=True)
    assert made.exists()
