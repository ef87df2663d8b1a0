"""Whole models: the graph gives the numbers of the model, also for other sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import Tensor, nn

from fxpipe.trace import trace
from tests.trace.models import GPT, assert_same

VISION: dict[str, Callable[[], nn.Module]] = {
    "resnet18": torchvision.models.resnet18,
    "densenet": lambda: torchvision.models.DenseNet(8, (2, 2, 2, 2), num_init_features=16),
    "mobilenet_v3_small": torchvision.models.mobilenet_v3_small,
    "vit": lambda: torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32
    ),
}


@pytest.mark.parametrize(
    ("name", "training"), [*((name, True) for name in VISION), ("resnet18", False)]
)
def test_a_vision_model_gives_the_same_numbers_for_another_batch_size(
    name: str, training: bool
) -> None:
    torch.manual_seed(0)
    model = VISION[name]().train(training)
    traced = trace(model, (torch.randn(2, 3, 32, 32),), {})
    traced.module.graph.lint()
    assert_same(traced, model, (torch.randn(3, 3, 32, 32),))


def test_a_decoder_gives_the_same_numbers_for_another_batch_and_sequence_length() -> None:
    torch.manual_seed(0)
    model = GPT()
    traced = trace(model, (torch.randint(31, (2, 8)),), {})
    assert traced.guards == ()
    assert_same(traced, model, (torch.randint(31, (2, 8)),))
    assert_same(traced, model, (torch.randint(31, (3, 13)),))


def test_a_decoder_on_meta_is_traced_like_one_on_the_cpu() -> None:
    tokens = torch.randint(31, (2, 8))
    with torch.device("meta"):
        model = GPT()
    on_meta = trace(model, (tokens,), {})
    assert str(on_meta.module.graph) == str(trace(GPT(), (tokens,), {}).module.graph)
    assert all(p.is_meta for p in on_meta.module.parameters())


def test_parameters_keep_their_names_order_and_identity() -> None:
    model = GPT()
    traced = trace(model, (torch.randint(31, (2, 8)),), {})
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in traced.module.named_parameters()] == names
    assert traced.module.embed is model.embed
    for name, parameter in traced.module.named_parameters():
        assert model.get_parameter(name) is parameter


def test_a_tied_tensor_keeps_the_name_it_has_first_in_the_model() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(4))
            self.lin = nn.Linear(4, 4)
            self.lin.bias = self.bias

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(x)

    model = Tied()
    traced = trace(model, (torch.randn(2, 4),), {})
    assert [n for n, _ in traced.module.named_parameters()] == ["bias", "lin.weight"]


def test_a_buffer_that_is_not_saved_is_not_saved_by_the_graph_either() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(4), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    traced = trace(Scaled(), (torch.randn(2, 4),), {})
    assert "scale" in dict(traced.module.named_buffers())
    assert "scale" not in traced.module.state_dict()


def test_a_container_of_torch_is_opened_and_its_layers_are_kept() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    traced = trace(model, (torch.randn(2, 5, 8),), {})
    called = [n.target for n in traced.module.graph.nodes if n.op == "call_module"]
    assert called == ["layers.0", "layers.1"]
    assert_same(traced, model, (torch.randn(3, 5, 8),))


def test_a_recurrent_layer_is_one_node_and_stays_as_it_was() -> None:
    model = nn.Sequential(nn.LSTM(4, 8, batch_first=True))
    weights = list(model[0]._flat_weights)
    traced = trace(model, (torch.randn(2, 5, 4),), {})
    assert all(a is b for a, b in zip(model[0]._flat_weights, weights, strict=True))
    assert_same(traced, model, (torch.randn(3, 6, 4),))
