"""Terms outside the layers: embedding, logits and loss, the optimizer."""

from jaxptd.models.inventory import Head
from jaxptd.planner.cost import kernels
from jaxptd.planner.cost.setting import Setting
from jaxptd.planner.cost.terms import Term


def first_terms(setting: Setting) -> list[Term]:
    """Looks up the tokens of a micro-batch and adds their gradients up: five passes of 16 bits."""
    a = setting.cluster.accelerator
    moves = 5 * 2 * sum(setting.stream(stack) for stack in setting.model.stacks)
    return [_named(kernels.moved(a, moves, 4), "embedding")]


def last_terms(setting: Setting) -> list[Term]:
    """Logits, the loss over the sharded vocabulary, and their gradients, of a micro-batch."""
    return [term for head in setting.model.heads for term in _head(setting, head)]


def _head(setting: Setting, head: Head) -> list[Term]:
    a, T = setting.cluster.accelerator, setting.tokens(setting.model.stacks[-1])
    D, V = head.hidden, head.columns // setting.spread.inner
    sizes = {"logits forward": (T, V, D), "logits dx": (T, D, V), "logits dw": (D, V, T)}
    products = [_named(kernels.product(a, *size), name) for name, size in sizes.items()]
    square = [_named(kernels.product(a, T, D, D).times(3), "head's square")] * head.squares
    loss = kernels.moved(a, setting.program.logit * float(T) * V, 8)
    return [*products, *square, _named(loss, "loss")]


def update_terms(setting: Setting) -> list[Term]:
    """The optimizer's pass over its shard of the state, once a step."""
    own = setting.updated
    elements = setting.stage_parameters / setting.spread.shards if own is None else own
    term = kernels.moved(setting.cluster.accelerator, setting.program.update * elements, 40)
    return [term.named("optimizer", "optimizer")]


def _named(term: Term, name: str) -> Term:
    return term.named(name, "embedding and loss")
