"""Transformers and their training in numpy, with an independent backward pass.

Nothing here imports jaxptd or JAX. The formulas come from the papers and from the pages in `docs/`,
to catch mistakes that all layouts of jaxptd share. Parameters have jaxptd's canonical names.

    tape.py        values that know their gradients: a small vjp for each operation
    draws.py       the random words of dropout: threefry and pcg4d
    rope.py        rotary positions and their scalings
    layers.py      norms, attention, MLP, losses
    moe.py         routers and experts
    families.py    GPT and its descendants, BERT, T5: losses as sums of operations
    optimizers.py  AdamW, Lion, SGD, Muon, Adafactor, and the learning rate
    training.py    clipping, steps
"""
