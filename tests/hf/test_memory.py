"""Host memory while reading a large directory of sparse files: headers and holes."""

import json
import math
import tracemalloc
from pathlib import Path

import jax
import pytest

from jaxptd import Config, Layout, ModelConfig, Program, make_mesh
from jaxptd.checkpoint.canonical import abstract_canonical
from jaxptd.config import nested
from jaxptd.hf import read as reading
from jaxptd.hf.directory import Directory
from jaxptd.hf.read import sizes_of

# Llama 3 70B with sizes divided by eight, and 4 of its 80 layers.
SIZES = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 16032,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def write_holes(folder: Path) -> Path:
    """A directory with the right shapes in bfloat16, whose tensors take no disk space."""
    D, F, V = SIZES["hidden_size"], SIZES["intermediate_size"], SIZES["vocab_size"]
    kv = D * SIZES["num_key_value_heads"] // SIZES["num_attention_heads"]
    layer = {
        **{f"self_attn.{name}_proj": (D, D) for name in "qo"},
        **{f"self_attn.{name}_proj": (kv, D) for name in "kv"},
        **{f"mlp.{name}_proj": (F, D) for name in ("gate", "up")},
        "mlp.down_proj": (D, F),
        **{f"{name}_layernorm": (D,) for name in ("input", "post_attention")},
    }
    shapes = {
        f"model.layers.{i}.{name}.weight": shape
        for i in range(SIZES["num_hidden_layers"])
        for name, shape in layer.items()
    }
    ends = {"model.embed_tokens": (V, D), "model.norm": (D,), "lm_head": (V, D)}
    shapes |= {f"{name}.weight": shape for name, shape in ends.items()}
    header, begin = {}, 0
    for name, shape in shapes.items():
        end = begin + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SIZES))
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + begin)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [Layout(tp=8), Layout(dp=2, row=2, col=2, zero=1), Layout(pp=2, tp=4)], ids=str
)
def test_the_host_holds_no_more_than_two_slices_of_a_device(tmp_path, monkeypatch, layout) -> None:
    """Covers reading only; simulated devices then keep that memory without a copy."""
    directory = Directory(write_holes(tmp_path / "holes"))
    model = ModelConfig(**nested(sizes_of(directory)))
    program = Program(Config(model, layout), make_mesh(layout))
    targets = abstract_canonical(program)["params"].values()
    largest = max(4 * math.prod(t.sharding.shard_shape(t.shape)) for t in targets)
    whole = sum(4 * math.prod(t.shape) for t in targets)
    peaks, read = [], reading._read

    def measured(*args, **options):
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        found = read(*args, **options)
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
        return found

    monkeypatch.setattr(reading, "_read", measured)
    tracemalloc.start()
    jax.block_until_ready(reading.read_params(program, directory))
    tracemalloc.stop()
    most = max(peaks)
    print(f"{layout}: {most / 1e6:.1f} MB, slice {largest / 1e6:.1f}, all {whole / 1e6:.0f}")
    assert most <= 2 * largest
