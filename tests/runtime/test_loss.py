import dataclasses

import pytest
import torch
from torch import nn

from fxpipe import tree
from fxpipe.errors import InputError
from fxpipe.runtime.loss import WithLoss, output_is_loss


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    found: torch.Tensor


class Compute(nn.Module):
    def forward(self, x):
        return x.sum(), x


def test_the_loss_sees_the_users_own_structure_and_comes_last():
    structure = tree.flatten({"a": 1, "b": (2,)})[1]
    seen = []

    def loss(output, target):
        seen.append((output, target))
        return output["b"][0].sum() * target

    module = WithLoss(Compute(), structure, loss)
    x = torch.ones(3)
    total, found, value = module(x, 2.0)
    assert (float(total), float(value)) == (3.0, 6.0)
    assert found is x
    assert seen[0][0]["a"] is total
    assert seen[0][1] == 2.0


def test_a_loss_that_is_a_module_is_no_part_of_the_stage():
    module = WithLoss(nn.Linear(2, 2), tree.flatten(1)[1], nn.MSELoss())
    assert [name for name, _ in module.named_modules()] == ["", "compute"]


@pytest.mark.parametrize(
    ("value", "kind"), [(torch.ones(2, 3), r"\[2, 3\]"), (1.5, "float"), (None, "NoneType")]
)
def test_a_loss_that_is_no_0_dim_tensor_is_refused(value, kind):
    def my_loss(output, target):
        return value

    module = WithLoss(Compute(), tree.flatten((1, 2))[1], my_loss)
    with pytest.raises(InputError, match=f"the loss is {kind}, not a 0-dim tensor") as caught:
        module(torch.ones(1), None)
    assert caught.value.at == "loss = my_loss"


def test_the_loss_of_a_model_that_computes_it_is_found_in_its_output():
    loss = torch.tensor(1.0)
    assert output_is_loss(loss, None) is loss
    assert output_is_loss({"loss": loss, "x": 1}, None) is loss
    assert output_is_loss(Output(loss, torch.ones(2)), None) is loss
    assert output_is_loss((loss, 1), None) == (loss, 1)
