import torch

from fxpipe.ir.values import has_tensor, tensors_in


def test_tensors_are_found_inside_containers():
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    assert [t.numel() for t in tensors_in({"x": [a, 1], "y": (b, {"z": c})})] == [1, 2, 3]
    assert has_tensor([None, {"x": a}])
    assert not has_tensor([None, {"x": torch.Size([1])}])
