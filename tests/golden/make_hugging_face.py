"""Writes gpt2.json: what transformers computes with the tiny GPT-2 of tests/helpers/hugging.

    PYTHONPATH=tests/helpers python tests/golden/make_hugging_face.py

Needs torch and transformers; made with transformers 5.23.0 and torch 2.15.0.
"""

import tempfile
from pathlib import Path

from hugging import gpt2_tensors, write_directory
from hugging.reference import write_golden

LENGTH = 11  # below the 16 positions, and odd

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        directory = write_directory(Path(folder) / "gpt2", gpt2_tensors())
        path = Path(__file__).with_name("gpt2.json")
        write_golden(directory, path, length=LENGTH, vocab_size=13)
