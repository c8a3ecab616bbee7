"""Table of accelerators: its numbers have sources, and bad files give one line."""

from pathlib import Path

import pytest
import yaml

from jaxptd.analysis.hardware import BANDWIDTH, PEAK_FLOPS
from jaxptd.errors import UserError
from jaxptd.hardware import accelerators, find_accelerator
from jaxptd.hardware.table import KINDS, NUMBERS, PACKAGED, read_figures

FIGURE = {"value": 1.0, "kind": "estimate", "source": "a guess"}


def file(folder: Path, document: object) -> Path:
    path = folder / "mine.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    return path


def mine(**changes: object) -> dict[str, object]:
    """Accelerator with some numbers changed; None leaves a number out."""
    row = {name: {**FIGURE} for name in NUMBERS} | changes
    return {"mine": {name: cell for name, cell in row.items() if cell is not None}}


def test_every_number_has_a_kind_and_a_source() -> None:
    found = read_figures(PACKAGED)
    nvidia = ["a100", "h100", "h200", "gb200", "b200", "b300", "gb300"]
    assert list(found) == [*nvidia, "mi300x", "mi355x", "v100"]
    for row in found.values():
        assert tuple(row) == NUMBERS
        assert all(figure.kind in KINDS and len(figure.source) > 5 for figure in row.values())


def test_shares_are_taken_over_from_the_accelerator_that_is_named() -> None:
    figures = read_figures(PACKAGED)
    named = {"the A100's": "a100", "the H100's": "h100"}
    checked = 0
    for row in figures.values():
        for number, figure in row.items():
            if figure.source in named:
                assert figure.value == figures[named[figure.source]][number].value
                assert figure.kind == "estimate"
                checked += 1
    assert checked > 10


def test_the_rest_of_the_package_has_the_same_numbers() -> None:
    table = accelerators()
    assert {name: table[name.lower()].bf16_flops for name in PEAK_FLOPS} == PEAK_FLOPS
    h200 = table["h200"]  # its kernels move bytes more slowly than its copies
    assert h200.hbm_bandwidth * h200.hbm_share < BANDWIDTH < h200.hbm_bandwidth


def test_a_file_of_ones_own_comes_beside_the_table(tmp_path: Path) -> None:
    path = file(tmp_path, mine(nvlink_domain={**FIGURE, "value": 4}))
    assert find_accelerator("mine", path).nvlink_domain == 4
    assert find_accelerator("h100", path) == find_accelerator("h100")
    with pytest.raises(UserError, match=r"hardware=h10: no such accelerator; did you mean h100\?"):
        find_accelerator("h10")


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("", "expected accelerators by name"),
        ("- a\n", "expected accelerators by name"),
        ("a: [", "is not YAML"),
        ("a: !!python/name:os.system x\n", "is not YAML"),
        ("a: &x [1]\nb: *x\n", "it has an alias; write the values out"),
        ("a: {}\na: {}\n", "a is given twice; give it once"),
        ("? [1]\n: 2\n", "is not YAML"),
        ("[" * 400, "is not YAML"),
        ({3: {}}, "3 cannot be an accelerator's name; use text"),
        ({"mine": 3}, "mine has no numbers; give it bf16_flops"),
        ({"mine": {}}, "mine lacks bf16_flops; give every number of the accelerator"),
        (mine(hbm_share=None), "mine lacks hbm_share"),
        (mine(hbm_shar=FIGURE), "unknown number hbm_shar; did you mean hbm_share?"),
        (mine(hbm_share=0.8), "mine.hbm_share: expected {value: ..., kind: ..., source: ...}"),
        (mine(hbm_share={"value": 1}), "mine.hbm_share: expected {value"),
        (mine(hbm_share={**FIGURE, "kind": "felt"}), "kind=felt; use one of data sheet, measured"),
        (mine(hbm_share={**FIGURE, "kind": ["x"]}), "kind=['x']; use one of data sheet, measured"),
        (mine(hbm_share={**FIGURE, "source": " "}), "no source; say where the number comes from"),
        (mine(hbm_share={**FIGURE, "value": "1e3"}), "value=1e3 is not a number; write it"),
        (mine(hbm_share={**FIGURE, "value": True}), "value=True is not a number"),
        (mine(hbm_share={**FIGURE, "value": float("nan")}), "value=nan is not a number"),
        (mine(hbm_share={**FIGURE, "value": 0}), "value=0; use a number above 0"),
        (mine(hbm_share={**FIGURE, "value": 10**30}), "below 1e18"),
        (mine(hbm_share={**FIGURE, "value": 1.2}), "value=1.2; use at most 1 for a share"),
        (mine(nvlink_domain={**FIGURE, "value": 7.5}), "value=7.5; use a whole number"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, document: object, words: str) -> None:
    with pytest.raises(UserError) as caught:
        accelerators(file(tmp_path, document))
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert "mine.yaml" in message


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "large.yaml").write_bytes(b"# " + b"a" * 10**6)
    for name, words in (
        ("no.yaml", "No such file or directory; name a YAML file"),
        (".", "is not a file on disk"),
        ("binary.yaml", "is not text"),
        ("large.yaml", "has more than 1000000 bytes"),
    ):
        with pytest.raises(UserError, match=words):
            accelerators(tmp_path / name)
