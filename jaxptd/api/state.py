"""A state that prints as a line instead of as megabytes of numbers."""

from collections.abc import Hashable, Iterable
from typing import Any, NoReturn, Self

import jax

from jaxptd.display import bytes_text, count_text
from jaxptd.errors import UserError

Keys = tuple[str, ...]


@jax.tree_util.register_pytree_with_keys_class
class ShownState(dict[str, Any]):
    """A dict of arrays, or of dicts of them, with a short text. A pytree, as a dict is.

    It is a view of a run's state, so its entries cannot be set.

    >>> import jax.numpy as jnp
    >>> ShownState(params={"w": jnp.ones((2, 3))}, step=jnp.int32(4))
    params, step: 2 arrays, 7 numbers, 28 bytes
    """

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        return ShownState(value) if type(value) is dict else value

    def __repr__(self) -> str:
        leaves = [x for x in jax.tree.leaves(self) if hasattr(x, "nbytes")]
        names = ", ".join(list(self)[:4]) + (f" and {len(self) - 4} more" if len(self) > 4 else "")
        numbers, size = sum(x.size for x in leaves), sum(x.nbytes for x in leaves)
        return f"{names}: {len(leaves)} arrays, {count_text(numbers)} numbers, {bytes_text(size)}"

    def tree_flatten_with_keys(self) -> tuple[Iterable[tuple[Any, Any]], Hashable]:
        keys = tuple(sorted(self))
        return [(jax.tree_util.DictKey(key), self.get(key)) for key in keys], keys

    @classmethod
    def tree_unflatten(cls, keys: Any, values: Iterable[Any]) -> Self:
        return cls(zip(keys, values, strict=True))

    def __reduce__(self) -> tuple[type[Self], tuple[dict[str, Any]]]:
        return type(self), (dict(self),)  # copies are made without setting entries

    # ---- refused --------------------------------------------------------------------------------

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UserError(
            "an entry of run.state cannot be set, as the run would not see it; replace the state: "
            'run.state = {**run.state, "params": params}'
        )

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse
