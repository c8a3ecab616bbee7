"""Training steps whose peak memory is compiled for H200s: every engine and family, gigabytes each.

A step is the text of its settings, `SECTION.FIELD=VALUE` each, so that a row of a table has it all.
"""

from typing import Any

import yaml

from jaxptd.config import Config, ModelConfig, TrainConfig
from jaxptd.mesh import Layout

_GPT = "vocab_size=50257 vocab_multiple=128 seq_length=1024"
_LLAMA = "family=llama tie_embeddings=false vocab_size=128256"
MODELS = {
    "124m": f"num_layers=12 hidden_size=768 num_heads=12 {_GPT}",
    "350m": f"num_layers=24 hidden_size=1024 num_heads=16 {_GPT}",
    "1.5b": f"num_layers=48 hidden_size=1536 num_heads=24 {_GPT}",
    "2.6b": f"num_layers=32 hidden_size=2560 num_heads=32 {_GPT}",
    "long": f"num_layers=24 hidden_size=2048 num_heads=16 {_GPT} max_positions=8192",
    "8b": f"num_layers=32 hidden_size=4096 num_heads=32 num_kv_heads=8 ffn_hidden_size=14336 "
    f"{_LLAMA} seq_length=4096",
    "1b": f"num_layers=16 hidden_size=2048 num_heads=32 num_kv_heads=8 ffn_hidden_size=8192 "
    f"{_LLAMA} seq_length=4096",
    "bert": "family=bert num_layers=24 hidden_size=1024 num_heads=16 vocab_size=30522 "
    "vocab_multiple=128 seq_length=512",
    "6.7b": "num_layers=32 hidden_size=4096 num_heads=32 vocab_size=51200 seq_length=2048",
    "70b": "num_layers=80 hidden_size=8192 num_heads=64 num_kv_heads=8 ffn_hidden_size=28672 "
    f"{_LLAMA} seq_length=8192",
    "qwen": "family=qwen3 num_layers=28 hidden_size=1024 num_heads=16 num_kv_heads=8 head_size=128 "
    "ffn_hidden_size=3072 vocab_size=151936 seq_length=2048",
    "t5": "family=t5 num_layers=24 hidden_size=1024 num_heads=16 ffn_hidden_size=4096 "
    "vocab_size=32128 seq_length=512 decoder_seq_length=128",
}
# Of each step the name, its model, sequences, micro-batches, model and layout.
_STEPS = """
plain none            1.5b   16  1  remat=none
plain dots            1.5b   16  1  remat=dots
plain full            1.5b   16  1  remat=full
plain attention       1.5b   16  1  remat=attention
plain mixed           1.5b   16  1  remat=full remat_layers=24
plain accumulates     1.5b   32  4  remat=dots
plain full many       1.5b   64  4  remat=full
plain 350m            350m   32  1  remat=none
plain 124m            124m   32  1  remat=none
plain 2.6b            2.6b    8  2  remat=none
tp4 none              2.6b   16  1  remat=none : tp=4
tp4 dots              2.6b   32  2  remat=dots : tp=4
sp4 none              2.6b   16  1  remat=none : tp=4 sequence_parallel=true keep_gathered=true
sp4 dots              2.6b   16  1  remat=dots : tp=4 sequence_parallel=true
sp8 full              2.6b   64  2  remat=full : tp=8 sequence_parallel=true
sp8 none              1.5b   32  1  remat=none : tp=8 sequence_parallel=true keep_gathered=true
collective none       2.6b   16  1  remat=none : tp=4 sequence_parallel=true collective_matmul=true
collective dots       2.6b   32  2  remat=dots : tp=8 sequence_parallel=true collective_matmul=true
ring cp4 dots         long    4  1  remat=dots seq_length=8192 : cp=4
ring cp4 none         long    2  1  remat=none seq_length=8192 : cp=4
ring cp2 sp4          long    4  2  remat=full seq_length=8192 : cp=2 tp=4 sequence_parallel=true
heads dots            2.6b   32  1  remat=dots : row=2 col=2
heads none            2.6b   32  2  remat=none : row=2 col=4
blocks none           2.6b    8  1  remat=none : row=2 col=2 attention2d=blocks
blocks dots           2.6b   16  1  remat=dots : row=2 col=2 attention2d=blocks
heads full            2.6b   32  1  remat=full : row=4 col=2
blocks longer dots    1.5b    4  1  remat=dots seq_length=2048 : row=2 col=2 attention2d=blocks
blocks longer full    1.5b    4  1  remat=full seq_length=2048 : row=2 col=2 attention2d=blocks
blocks longer cp2     1.5b    8  1  remat=dots seq_length=2048 : cp=2 row=2 col=2 attention2d=blocks
pp4 none              2.6b   32 16  remat=none : pp=4
pp4 dots              2.6b   64 16  remat=dots : pp=4
pp4 full              2.6b   64  8  remat=full : pp=4
interleaved dots      2.6b   64 16  remat=dots : pp=4 schedule=interleaved virtual_stages=2
zb-h1 none            2.6b   32 16  remat=none : pp=4 schedule=zb-h1
zb-v dots             2.6b   32 16  remat=dots : pp=4 schedule=zb-v
pp4 sp4 dots          8b     16 16  remat=dots : pp=4 tp=4 sequence_parallel=true
pp8 sp8 full          8b     64 16  remat=full : pp=8 tp=8 dp=2 zero=1 sequence_parallel=true
dp8 zero0             350m  256  1  remat=dots : dp=8
dp8 zero1             1.5b  128  2  remat=dots : dp=8 zero=1
dp8 zero2             1.5b  128  1  remat=dots : dp=8 zero=2
dp8 zero2 many        1.5b  128  4  remat=full : dp=8 zero=2
dp8 zero3             1.5b  128  1  remat=dots : dp=8 zero=3
dp4 sp2 zero3         1.5b   64  2  remat=none : dp=4 tp=2 \
sequence_parallel=true zero=3 keep_gathered=true
fp8 dots              1.5b   16  1  remat=dots products=fp8
fp8 none              1.5b   16  2  remat=none products=fp8
fp8 sp4 full          2.6b   32  1  remat=full products=fp8 : tp=4 sequence_parallel=true
offload optimizer     1.5b   16  1  remat=full : offload=optimizer
offload zero1         2.6b   64  2  remat=dots : dp=8 zero=1 offload=optimizer
offload kept          1.5b   16  1  remat=dots : offload=activations
offload kept sp4      2.6b   32  2  remat=dots : tp=4 sequence_parallel=true offload=activations
offload layers        1.5b   16  1  remat=full : offload=parameters
offload layers many   1.5b   32  4  remat=full : offload=[optimizer,parameters]
offload layers zero1  1.5b  128  1  remat=dots : dp=8 zero=1 offload=[optimizer,parameters]
offload layers pp4    2.6b   32 16  remat=dots : pp=4 offload=parameters
offload every sp4     2.6b   32  2  remat=dots : tp=4 sequence_parallel=true \
offload=[optimizer,parameters,activations]
llama zero3           8b     32  2  remat=full : dp=8 zero=3
llama sp8 dots        8b      8  1  remat=dots : tp=8 sequence_parallel=true
llama cp4             1b      4  1  remat=dots seq_length=16384 : cp=4
llama plain           1b      4  1  remat=none
llama pp4 tp2         8b     16 16  remat=dots : pp=4 tp=2
llama heads           1b      8  1  remat=dots : row=2 col=2
llama zero1           1b     64  4  remat=dots : dp=8 zero=1
llama fp8 sp2         1b      8  1  remat=dots products=fp8 : tp=2 sequence_parallel=true
bert plain            bert   64  1  remat=none
bert sp4              bert  256  2  remat=dots : tp=4 sequence_parallel=true
bert heads            bert  128  1  remat=dots : row=2 col=2
bert zero2            bert  512  1  remat=full : dp=8 zero=2
bert pp4              bert  256  8  remat=dots : pp=4
t5 plain              t5     64  1  remat=none
t5 sp4                t5    128  2  remat=dots : tp=4 sequence_parallel=true
t5 heads              t5    128  1  remat=dots : row=2 col=2
t5 zero3              t5    512  1  remat=full : dp=8 zero=3
t5 pp4                t5    128  8  remat=dots : pp=4
plain unrolled        350m   32  1  remat=dots scan_layers=false
zero3 unrolled        350m  256  1  remat=dots scan_layers=false : dp=8 zero=3
dropout full          350m   16  1  remat=full dropout=0.1
offload tp2           1.5b   16  1  remat=full : tp=2 offload=optimizer
offload many          1.5b   32  4  remat=full : offload=optimizer
dp8 small             350m   16  1  remat=full : dp=8
dp8 zero1 once        1.5b   64  1  remat=dots : dp=8 zero=1
fp8 pp4               2.6b   32 16  remat=dots products=fp8 : pp=4
llama dp4 sp2         1b     16  1  remat=dots : dp=4 tp=2 sequence_parallel=true
bert dp8              bert  512  1  remat=dots : dp=8
dp8 unrolled          350m  256  1  remat=dots scan_layers=false : dp=8
zero2 unrolled        124m  256  1  remat=none scan_layers=false : dp=8 zero=2
offload zero1 once    1.5b  128  1  remat=full : dp=8 zero=1 offload=optimizer
sp4 again             2.6b   16  1  remat=none : tp=4 sequence_parallel=true
sp8 again attention   1.5b   32  2  remat=attention : tp=8 sequence_parallel=true
dp4 sp2 zero3 again   1.5b   64  2  remat=none : dp=4 tp=2 sequence_parallel=true zero=3
zb-h1 sp4 again       2.6b   32 16  remat=none : pp=2 tp=4 schedule=zb-h1 sequence_parallel=true
mixed sp again        2.6b   32  2  remat=full remat_layers=16 : tp=4 sequence_parallel=true
fp8 sp2 again         1.5b   16  1  remat=none products=fp8 : tp=2 sequence_parallel=true
"""
# Compiled after the model was written, and not used to write it.
_HELD_OUT = """
new 6.7b zero1        6.7b   64  4  remat=full : dp=8 zero=1
new 6.7b sp4 none     6.7b    4  1  remat=none : tp=4 sequence_parallel=true keep_gathered=true
new 6.7b dp2 sp4      6.7b   64  8  remat=attention : dp=2 tp=4 \
sequence_parallel=true keep_gathered=true
new 6.7b grid         6.7b   32  2  remat=dots : row=2 col=4
new 6.7b pp8          6.7b   64 32  remat=dots : pp=8 schedule=interleaved virtual_stages=2
new 6.7b zb           6.7b   32 16  remat=none : pp=4 tp=2 schedule=zb-h2
new 6.7b zb rings     6.7b   32 16  remat=none : pp=4 tp=4 schedule=zb-v \
sequence_parallel=true collective_matmul=true
new 6.7b zb sp        6.7b   32 16  remat=dots : pp=4 tp=4 schedule=zb-h1 sequence_parallel=true
new 70b pp8 sp8       70b    32 32  remat=dots : pp=8 tp=8 sequence_parallel=true
new 70b ring          70b     8  4  remat=full : cp=4 tp=8 dp=2 zero=3 sequence_parallel=true
new qwen dots         qwen    8  1  remat=dots
new qwen dp8          qwen  128  2  remat=none : dp=8 zero=2
new qwen grid         qwen   16  1  remat=full : row=2 col=2
new bert sp2          bert  128  1  remat=attention : tp=2 sequence_parallel=true keep_gathered=true
new t5 zero1          t5    256  2  remat=dots : dp=4 zero=1
new gpt fp8           1.5b   32  2  remat=attention products=fp8 : tp=2 \
sequence_parallel=true keep_gathered=true
new gpt mixed sp      2.6b   32  2  remat=dots remat_layers=16 : tp=4 \
sequence_parallel=true keep_gathered=true
new gpt offload       6.7b   32  2  remat=full : tp=4 sequence_parallel=true offload=optimizer
"""


def _steps(text: str) -> dict[str, str]:
    """The settings of each step, by its name."""
    found = {}
    for line in text.strip().splitlines():
        name, (model, batch, micro_batches, *options) = line[:22].strip(), line[22:].split()
        cut = options.index(":") if ":" in options else len(options)
        of_model = [*MODELS[model].split(), "dtype=bfloat16", *options[:cut]]
        train = [f"global_batch_size={batch}", f"micro_batches={micro_batches}"]
        sections = {"model": of_model, "layout": options[cut + 1 :], "train": train}
        found[name] = " ".join(f"{s}.{each}" for s, those in sections.items() for each in those)
    return found


HELD_OUT = _steps(_HELD_OUT)
STEPS = _steps(_STEPS) | HELD_OUT


def config_of(settings: str) -> Config:
    """Makes a config from the text of its settings; a later one replaces an earlier one."""
    sections: dict[str, dict[str, Any]] = {"model": {}, "layout": {}, "train": {}}
    for setting in settings.split():
        name, _, value = setting.partition("=")
        section, _, field = name.partition(".")
        sections[section][field] = yaml.safe_load(value)
    train = TrainConfig(**sections["train"])
    return Config(ModelConfig(**sections["model"]), Layout(**sections["layout"]), train=train)
