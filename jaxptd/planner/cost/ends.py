"""Terms outside the layers: embedding, logits and loss, the optimizer."""

from jaxptd.planner.cost import kernels
from jaxptd.planner.cost.setting import Setting
from jaxptd.planner.cost.terms import Term


def first_terms(setting: Setting) -> list[Term]:
    """Looks up the tokens of a micro-batch and adds their gradients up: five passes of 16 bits."""
    moves = 5 * 2 * setting.stream_tokens * setting.shape.hidden_size
    return [_named(kernels.moved(setting.cluster.accelerator, moves, 4), "embedding")]


def last_terms(setting: Setting) -> list[Term]:
    """Logits, the loss over the sharded vocabulary, and their gradients, of a micro-batch."""
    a, T = setting.cluster.accelerator, setting.tokens
    D, V = setting.shape.hidden_size, setting.shape.vocab_size // setting.spread.tp
    sizes = {"logits forward": (T, V, D), "logits dx": (T, D, V), "logits dw": (D, V, T)}
    products = [_named(kernels.product(a, *size), name) for name, size in sizes.items()]
    loss = kernels.moved(a, setting.program.logit * float(T) * V, 8)
    return [*products, _named(loss, "loss")]


def update_terms(setting: Setting) -> list[Term]:
    """The optimizer's pass over its shard of the state, once a step."""
    moves = setting.program.update * setting.stage_parameters / setting.spread.shards
    term = kernels.moved(setting.cluster.accelerator, moves, 40)
    return [term.named("optimizer", "optimizer")]


def _named(term: Term, name: str) -> Term:
    return term.named(name, "embedding and loss")
