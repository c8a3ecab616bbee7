"""A matmul of rows in groups, each with a matrix of its own.

Letters: R rows, G groups, D columns of x, F columns of the result.
"""

from jax import Array, lax


def grouped_matmul(x_RD: Array, w_GDF: Array, sizes_G: Array) -> Array:
    """x[R, D] -> y[R, F]: the first sizes[0] rows times w[0], the next sizes[1] times w[1], ...

    Rows after the last group are zero in y and in x's gradient, and add nothing to the gradients of
    matrices, even where they are NaN in x or in y's gradient: `lax.ragged_dot` masks them. A group
    without rows gives its matrix the gradient zero. A NaN in a matrix may reach rows of all groups.

    Args:
        x_RD: rows, sorted by group.
        w_GDF: a matrix for each group, of x's type.
        sizes_G: rows of each group, int32; at most R together.
    """
    return lax.ragged_dot(x_RD, w_GDF, sizes_G)
