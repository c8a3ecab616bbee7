"""Files that users get wrong: each gives one line and exit code 2, and nothing is written.

`tests/checkpoint/test_manifests.py` covers the manifests of checkpoints.
"""

import pytest
from bad_files import TABLE, base, changed, ids, put

from jaxptd.run.folder import RunDir


def test_there_are_many():
    assert len(TABLE) >= 120


@pytest.mark.parametrize("case", TABLE, ids=str)
def test_a_bad_file_is_one_line_and_nothing_is_written(case, tmp_path, refused):
    put(tmp_path, case.files)
    assert case.words in refused(case.fields)


def test_a_larger_vocabulary_is_no_other_run_if_the_first_was_refused(tmp_path, refused):
    put(tmp_path, {"a.bin": ids(300)})
    fields = {"data.source": "a.bin", "train.run_dir": "run", "model.vocab_size": 257}
    assert "/a.bin has id 300, outside the model's 257" in refused(fields)
    RunDir("run").check(changed(base(), fields | {"model.vocab_size": 301}))
