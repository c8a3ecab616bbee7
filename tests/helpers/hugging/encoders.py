"""Encoders as transformers computes them, in float64; needs torch and transformers."""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hugging import bert, swin, t5
from hugging.bert import LENGTH, VOCAB
from hugging.reference import summary

ROWS = 8
BATCH = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Reference:
    """A model of transformers.

    Args:
        config: the class of its config, and its sizes.
        model: its class.
        batch: generator -> a batch, as our model takes it.
        losses: (model, batch) -> terms of the loss by our names.
        sizes: fields of our model that the directory does not give.
        untied: whether the output layer has a separate table.
        name: name of one of its parameters in files.
    """

    config: Callable[[Any], Any]
    model: str
    batch: Callable[[np.random.Generator], BATCH]
    losses: Callable[[Any, BATCH], dict[str, Any]]
    sizes: dict[str, Any]
    untied: bool = False
    name: Callable[[str], str] = str


def make(reference: Reference, folder: Path) -> None:
    """Writes a directory of a model with random norms and biases, so that they matter."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, reference.model)(reference.config(transformers))
    if reference.untied:
        table = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) / 5)
        model.lm_head.weight = table  # transformers 5 ties it even if the config says otherwise
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)


def losses_and_gradients(
    reference: Reference, folder: Path, batch: BATCH
) -> tuple[dict[str, float], BATCH]:
    """Losses by name, and gradients of their sum by transformers' names."""
    import torch
    import transformers

    model = getattr(transformers, reference.model).from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    losses = reference.losses(in_float64(model).eval(), batch)
    assert all(loss.dtype == torch.float64 for loss in losses.values())
    sum(losses.values()).backward()
    gradients = {reference.name(name): p.grad.numpy() for name, p in model.named_parameters()}
    return {name: loss.item() for name, loss in losses.items()}, gradients


def in_float64(model: Any) -> Any:
    """The model with T5's norms in float64; transformers computes them in float32 regardless."""
    import torch

    def normalised(norm: Any, x: Any) -> Any:
        return (
            norm.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        )

    for module in model.modules():
        if type(module).__name__ == "T5LayerNorm":
            module.forward = functools.partial(normalised, module)
    return model


def write_golden(name: str, folder: Path, path: Path) -> None:
    """Writes the losses of a directory's model, and a summary of each gradient."""
    reference = ALL[name]
    batch = reference.batch(np.random.default_rng(0))
    losses, gradients = losses_and_gradients(reference, folder, batch)
    found = {
        "losses": losses,
        "gradients": {name: summary(gradient) for name, gradient in gradients.items()},
    }
    path.write_text(json.dumps(found, indent=1) + "\n")


def cross_entropy(logits: Any, targets: np.ndarray) -> Any:
    """Mean cross-entropy over targets of 0 or more."""
    import torch

    expected = torch.tensor(targets).long().flatten()
    return torch.nn.functional.cross_entropy(
        logits.reshape(expected.numel(), -1), expected, ignore_index=-1
    )


# ---- BERT --------------------------------------------------------------------------------------


def pairs(rng: np.random.Generator) -> BATCH:
    """Pairs of texts with padding, including a row without padding and one without targets."""
    length_B1 = np.linspace(LENGTH // 2, LENGTH, ROWS).astype(int)[:, None]
    position_T = np.arange(LENGTH)
    mask_BT = position_T < length_B1
    ids_BT = rng.integers(1, VOCAB, (ROWS, LENGTH))
    masked_BT = mask_BT & (rng.random((ROWS, LENGTH)) < 0.3)
    masked_BT[1] = False
    batch = {
        "tokens": np.where(mask_BT, rng.integers(1, VOCAB, (ROWS, LENGTH)), 0),
        "token_types": mask_BT & (position_T >= rng.integers(1, length_B1)),
        "mask": mask_BT,
        "targets": np.where(masked_BT, ids_BT, -1),
        "next_sentence": rng.integers(0, 2, ROWS),
    }
    return {name: x.astype(np.int32) for name, x in batch.items()}


def bert_losses(model: Any, batch: BATCH) -> dict[str, Any]:
    import torch

    inputs = {name: torch.tensor(x).long() for name, x in batch.items()}
    found = model(
        input_ids=inputs["tokens"],
        token_type_ids=inputs["token_types"],
        attention_mask=inputs["mask"],
    )
    return {
        "mlm": cross_entropy(found.prediction_logits, batch["targets"]),
        "nsp": cross_entropy(found.seq_relationship_logits, batch["next_sentence"]),
    }


def bert_config(transformers: Any) -> Any:
    return transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        num_hidden_layers=8,
        num_attention_heads=4,
        intermediate_size=40,
        max_position_embeddings=2 * LENGTH,
    )


# ---- T5 ----------------------------------------------------------------------------------------

SOURCE, TARGET = 16, 24  # tokens, both above the largest distance


def spans(rng: np.random.Generator) -> BATCH:
    """Sources and targets with padding; some targets in the middle are ignored."""
    source_B1, target_B1 = (
        np.linspace(n // 2, n, ROWS).astype(int)[:, None] for n in (SOURCE, TARGET)
    )
    mask_BS = np.arange(SOURCE) < source_B1
    counted_BT = (np.arange(TARGET) < target_B1[::-1]) & (rng.random((ROWS, TARGET)) < 0.9)
    batch = {
        "source": np.where(mask_BS, rng.integers(1, VOCAB, (ROWS, SOURCE)), 0),
        "source_mask": mask_BS,
        "targets": np.where(counted_BT, rng.integers(1, VOCAB, (ROWS, TARGET)), -1),
    }
    return {name: x.astype(np.int32) for name, x in batch.items()}


def t5_losses(model: Any, batch: BATCH) -> dict[str, Any]:
    """Losses with the decoder inputs that transformers derives from the labels."""
    import torch

    inputs = {name: torch.tensor(x).long() for name, x in batch.items()}
    found = model(
        input_ids=inputs["source"],
        attention_mask=inputs["source_mask"],
        labels=inputs["targets"].masked_fill(inputs["targets"] < 0, -100),
        use_cache=False,
    )
    return {"cross_entropy": cross_entropy(found.logits, batch["targets"])}


def t5_config(transformers: Any, **options: Any) -> Any:
    sizes = {"d_model": 24, "d_kv": 6, "d_ff": 40, "num_heads": 4, "num_layers": 4}
    distances = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 10}
    others = {"num_decoder_layers": 8, "vocab_size": VOCAB, "decoder_start_token_id": 0}
    return transformers.T5Config(**sizes, **distances, **others, **options)


GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}  # as release 1.1
LENGTHS = {"seq_length": SOURCE, "encoder_decoder.seq_length": TARGET}
REFERENCES = {
    "bert": Reference(
        bert_config, "BertForPreTraining", pairs, bert_losses, {"seq_length": LENGTH}
    ),
    "t5": Reference(t5_config, "T5ForConditionalGeneration", spans, t5_losses, LENGTHS),
    "t5-1.1": Reference(
        functools.partial(t5_config, **GATED),
        *("T5ForConditionalGeneration", spans, t5_losses, LENGTHS),
        untied=True,
    ),
}


def swin_losses(model: Any, batch: BATCH) -> dict[str, Any]:
    return {"cross_entropy": cross_entropy(swin.swin_logits(model, batch), batch["label"])}


# Models of images, which support fewer layouts.
IMAGES = {
    "swin": Reference(
        *(swin.swin_config, "SwinForImageClassification", swin.images, swin_losses, {}),
        name=swin.name_in_files,
    )
}
ALL = REFERENCES | IMAGES
# Tiny directories of the same models, written without transformers: their tensors and config.
TINY: dict[str, tuple[Callable[[], BATCH], Mapping[str, Any]]] = {
    "bert": (bert.bert_tensors, bert.CONFIG),
    "t5": (t5.t5_tensors, t5.CONFIG),
    "t5-1.1": (functools.partial(t5.t5_tensors, t5.RELEASE_11), t5.RELEASE_11),
    "swin": (swin.swin_tensors, swin.CONFIG),
}
