"""Non-finite steps, parameters and evaluations end a run with an error that names them."""

import math

import jax.numpy as jnp
import pytest
import tiny

from jaxptd.errors import UserError
from jaxptd.run.health import Health

HEALTH = Health(3, list)


def values(loss=2.0, norm=1.0, in_row=3) -> dict[str, float]:
    return {"loss": loss, "grad_norm": norm, "skipped_in_row": in_row}


@pytest.mark.parametrize(
    ("row", "saved", "words"),
    [
        (
            values(norm=math.nan),
            [2, 5],
            "grad_norm is nan at step 9, the last of 3 skipped steps in a row",
        ),
        (
            values(loss=math.inf),
            [5],
            "loss is inf at step 9, .* the last good checkpoint is step 5",
        ),
        (values(norm=7.5), [5], "grad_norm is 7.5, above optimizer.skip_above, at step 9"),
        (values(norm=7.5), [5], r"\(train.max_skipped=3\).*resume from it with another optimizer"),
        (values(norm=7.5), [], "there is no checkpoint; start again in another train.run_dir"),
    ],
)
def test_too_many_in_a_row_are_named_with_the_reason_and_a_way_on(row, saved, words):
    with pytest.raises(UserError, match=words):
        Health(3, lambda: saved).check_step(9, row)
    Health(4, lambda: saved).check_step(9, row)


def test_parameters_that_are_not_finite_are_found():
    params = tiny.program(tiny.SEQUENCE_PARALLEL).init_state()["params"]
    HEALTH.check_params(3, params)
    bad = {**params, "norm.b": params["norm.b"].at[5].set(jnp.inf)}
    with pytest.raises(UserError, match=r"parameter norm\.b is not finite after step 3"):
        HEALTH.check_params(3, bad)


def test_a_parameter_that_is_no_number_is_named():
    HEALTH.check_params(2, {"w": jnp.ones(3)})
    with pytest.raises(UserError, match="parameter b is not finite after step 2, which is not"):
        HEALTH.check_params(2, {"w": jnp.ones(3), "b": jnp.array([1.0, jnp.nan])})


def test_finite_numbers_pass():
    HEALTH.check_evaluation(1, {"loss": 1e30, "grad_norm": 0.0})
    with pytest.raises(UserError, match="validation_loss is inf at step 7"):
        HEALTH.check_evaluation(7, {"loss": 1.0, "validation_loss": float("inf")})
