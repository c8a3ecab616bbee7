"""Runs lm-evaluation-harness itself on a run: tasks of all three kinds, from a file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toys.scored import logs, run

import jaxptd

lm_eval = pytest.importorskip("lm_eval")
pytestmark = pytest.mark.slow

DOCS = (
    {"text": "ab", "choices": ["a", "c", "bb"], "answer": 0},
    {"text": "bc ", "choices": ["d", "a b", "c"], "answer": 2},
    {"text": "d", "choices": ["c", "b", "aa"], "answer": 1},
)
COMMON = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{text}}"}
COMMON |= {"target_delimiter": ""}  # the default puts a space before each choice
TASKS: tuple[dict[str, Any], ...] = (
    {
        "task": "chosen",
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    },
    {
        "task": "read",
        "output_type": "loglikelihood_rolling",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    {
        "task": "told",
        "output_type": "generate_until",
        "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 3, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
)


def evaluated(layout: str, folder: Path) -> dict[str, Any]:
    file = folder / "docs.jsonl"
    file.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    where = {"data_files": {"test": str(file)}, "cache_dir": str(folder / "cache")}
    model = jaxptd.lm_eval_model(run(layout))
    tasks = [COMMON | {"dataset_kwargs": where} | task for task in TASKS]
    found: dict[str, Any] = lm_eval.simple_evaluate(model, tasks=tasks, bootstrap_iters=0)
    return found


def sums_of_logs(doc: dict[str, Any]) -> list[float]:
    """Log-likelihood of each choice, computed in numpy."""
    begin = len(doc["text"].rstrip().encode())
    texts = [list((doc["text"] + choice).encode()) for choice in doc["choices"]]
    return [
        sum(found[at - 1, text[at]] for at in range(begin, len(text)))
        for text in texts
        for found in [logs(text)]
    ]


def test_the_harness_scores_a_run_on_a_layout_as_on_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    one, two = evaluated("", tmp_path), evaluated("dp=2 tp=2", tmp_path)
    for found in (one, two):
        for sample in found["samples"]["chosen"]:
            scores = [score for score, _ in sample["filtered_resps"]]
            assert scores == pytest.approx(sums_of_logs(sample["doc"]), rel=1e-5)
    bits = [found["results"]["read"]["bits_per_byte,none"] for found in (one, two)]
    np.testing.assert_allclose(bits[1], bits[0], rtol=1e-6, atol=0)
    told = [[each["filtered_resps"] for each in found["samples"]["told"]] for found in (one, two)]
    assert told[0] == told[1]
    assert len(told[0]) == len(DOCS)
