"""Transformers and their training in numpy, with a backward pass of their own.

Nothing here imports jaxptd or JAX: formulas are those of the papers and of the pages in `docs/`, so
that a mistake that all layouts of jaxptd share is seen. Parameters have jaxptd's canonical names.

    tape.py        values that know their gradients: a small vjp for each operation
    draws.py       the random words of dropout: threefry and pcg4d
    rope.py        rotary positions, and their scalings
    layers.py      norms, attention, MLP, losses
    moe.py         routers and experts
    families.py    GPT and its descendants, BERT, T5: losses as sums of operations
    optimizers.py  AdamW, Lion, SGD, Muon, Adafactor, and the learning rate
    training.py    clipping, steps
"""
