"""Names of layouts and options that several mutations are looked for in."""

TP = "layout.tp=4"
SP = f"{TP} layout.sequence_parallel=true"
CP = "layout.cp=4"
BLOCKWISE = f"{CP} layout.ring=blockwise"
GRID = "layout.row=2 layout.col=2"
BLOCKS = f"{GRID} layout.attention2d=blocks"
DP = "layout.dp=4"
PP = "layout.pp=2 model.num_layers=4 train.micro_batches=4"

CASES = {
    "TP": TP,
    "SP": SP,
    "STEPS": f"{SP} layout.collective_matmul=true",
    "DP": DP,
    "ZERO_1": f"{DP} layout.zero=1",
    "ZERO_2": f"{DP} layout.zero=2",
    "ZERO_3": f"{DP} layout.zero=3",
    "CP": CP,
    "BLOCKWISE": BLOCKWISE,
    "RSA": f"{CP} layout.ring=rsa",
    "WINDOW": f"{BLOCKWISE} model.window=4",
    "GRID": GRID,
    "SLICES": "layout.row=2 layout.col=4 layout.matmul2d_slices=2",
    "SUMMA": f"{GRID} layout.matmul2d=summa",
    "CANNON": f"{GRID} layout.matmul2d=cannon",
    "FOX": f"{GRID} layout.matmul2d=fox",
    "BLOCKS": BLOCKS,
    "UNEVEN": f"{BLOCKS} model.hidden_size=15 model.num_heads=3 model.ffn_hidden_size=23",
    "PP": PP,
    "STAGES": "layout.pp=4 model.num_layers=4 train.micro_batches=4",
    "THREE": "layout.pp=3 model.num_layers=3 train.micro_batches=4",
    "CHUNKS": f"{PP} layout.schedule=interleaved layout.virtual_stages=2",
    "SPLIT": f"{PP} layout.schedule=zb-h1",
    "RECOMPUTED": f"{PP} model.remat=full",
    "QWEN": "model.family=qwen3 model.num_kv_heads=2",
    "LLAMA": "model.family=llama model.num_kv_heads=2",
    "BERT": "model.family=bert",
    "T5": "model.family=t5 model.decoder_seq_length=8 model.num_decoder_layers=2 "
    "model.relative_buckets=8 model.relative_distance=7",
    "APART": "data.documents=apart",
}


def options(case: str) -> str:
    """The options of a case, beside those of `probe.TINY`; names stand for theirs."""
    return " ".join(CASES.get(word, word) for word in case.split())
