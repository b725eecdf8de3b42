"""State that an optimizer has loaded out of a slot has memory of its own in any form."""

from __future__ import annotations

import pytest
import torch

from pacekeeper.checkpointing.training_state import _load_in_place, _uses_torch_load


def shares_memory(slot: torch.Tensor, tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == slot.untyped_storage().data_ptr()


@pytest.mark.parametrize("again", [False, True], ids=["a new one", "one with moments"])
def test_moments_and_step_counts_of_an_optimizer_do_not_share_the_slot(again: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    if again:
        parameter.grad = torch.ones(2)
        optimizer.step()
    before = list(optimizer.state[parameter].values()) if again else []
    slot = torch.arange(1.0, 6.0)
    moments = {"step": slot[0], "exp_avg": slot[1:3], "exp_avg_sq": slot[3:5]}
    with _load_in_place(optimizer, slot):
        optimizer.load_state_dict({"state": {0: moments}, "param_groups": optimizer.state_dict()["param_groups"]})
    after = optimizer.state[parameter]
    assert {name: its.tolist() for name, its in after.items()} == {"step": 1, "exp_avg": [2, 3], "exp_avg_sq": [4, 5]}
    assert not any(shares_memory(slot, its) for its in after.values())
    assert all(one is other for one, other in zip(before, after.values(), strict=False))


def test_lists_of_an_optimizer_do_not_share_the_slot() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.LBFGS([parameter])
    slot = torch.arange(1.0, 7.0)
    state = {"old_dirs": [slot[:2], slot[2:4]], "d": slot[4:6], "func_evals": 3}
    with _load_in_place(optimizer, slot):
        optimizer.load_state_dict({"state": {0: state}, "param_groups": optimizer.state_dict()["param_groups"]})
    after = optimizer.state[parameter]
    assert [its.tolist() for its in (*after["old_dirs"], after["d"])] == [[1, 2], [3, 4], [5, 6]]
    assert not any(shares_memory(slot, its) for its in (*after["old_dirs"], after["d"]))
    assert after["func_evals"] == 3


def test_an_optimizer_with_its_own_loading_may_store_its_state_anywhere() -> None:
    class OwnOptimizer(torch.optim.SGD):
        def load_state_dict(self, state_dict: dict[str, object]) -> None:
            self.given = state_dict

    parameters = [torch.nn.Parameter(torch.ones(2))]
    assert _uses_torch_load(torch.optim.SGD(parameters))
    assert not _uses_torch_load(OwnOptimizer(parameters))
    wrapped = torch.optim.SGD(parameters)
    vars(wrapped)["load_state_dict"] = wrapped.load_state_dict
    assert not _uses_torch_load(wrapped)
