"""The private names of torch that the trainer needs. Only one module replaces and calls them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ddpjob_trainer
import pytest
import torch
from ddpjob_trainer import private_torch
from ddpjob_trainer.errors import TrainingError
from torch_names import replaced_names

NOTHING: Any = SimpleNamespace()


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda: private_torch.wrap_waits(lambda wait: wait), "torch.distributed.Work.wait"),
        (private_torch.shorten_unpickling_errors, "torch._weights_only_unpickler.UnpicklingError"),
        (lambda: private_torch.call_after_backward(print), "torch.autograd.Variable._execution_engine"),
    ],
)
def test_a_torch_that_lacks_a_name_to_be_replaced_is_refused(
    use: Callable[[], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(name, None)
    last = name.rpartition(".")[2]
    with pytest.raises(
        TrainingError, match=rf"torch {re.escape(torch.__version__)} has no .*{last}, which the trainer"
    ):
        use()


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (private_torch.check_all_reduced, "_check_reducer_finalized"),
        (private_torch.layout_of, "_spec"),
        (lambda scaler: private_torch.find_overflow(scaler, NOTHING), "_found_inf_per_device"),
        (lambda module: private_torch.check_dimensions(module, NOTHING), "_check_input_dim"),
    ],
)
def test_a_torch_object_without_an_attribute_that_is_needed_is_refused(use: Callable[[Any], object], name: str) -> None:
    with pytest.raises(TrainingError, match=f"has no .*{name}, which the trainer needs; install an earlier torch"):
        use(NOTHING)


def test_no_other_module_replaces_names_of_torch() -> None:
    found = replaced_names(Path(ddpjob_trainer.__file__).parent)
    assert found == [], "replace it in private_torch.py, which checks that the name exists"
