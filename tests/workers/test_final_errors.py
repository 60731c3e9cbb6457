"""Which errors of building a model are met again by any later try."""

import pytest
import torch

from pearl.runtime.errors import FinalError
from pearl.workers.final_errors import final_errors


def fail_for(error: Exception, cause: Exception) -> None:
    with final_errors():
        raise error from cause


def test_the_text_and_the_first_cause_are_quoted() -> None:
    with pytest.raises(FinalError, match=r"^AttributeError: no weight \(first cause: KeyError: 'norm'\)$"):
        fail_for(AttributeError("no weight"), KeyError("norm"))


def test_a_cause_that_is_in_the_text_is_not_repeated() -> None:
    with pytest.raises(FinalError, match=r"^cannot be loaded: size mismatch$"):
        fail_for(ValueError("cannot be loaded: size mismatch"), RuntimeError("size mismatch"))


MAY_PASS = [torch.OutOfMemoryError("8 GiB"), TimeoutError(), ConnectionError(), OSError(5, "io")]


@pytest.mark.parametrize("error", MAY_PASS, ids=repr)
def test_what_may_pass_is_not_final(error: Exception) -> None:
    with pytest.raises(type(error)), final_errors():
        raise error
