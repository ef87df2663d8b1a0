import re

import torch
from torch import nn

from fxpipe.ir.text import format_argument, format_graph, format_type
from tests.graphs import lowered, traced


class Varied(nn.Module):
    """One node of each kind, arguments of each kind."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("offset", torch.zeros(4, dtype=torch.bfloat16))

    def forward(self, x, pair):
        y = self.fc(x)[..., 1:3]
        found = torch.topk(y, 2, dim=-1, sorted=True)
        z = torch.cat([found.values, pair["ids"]], dim=1) + self.offset
        return {"z": z.view(x.size(0), -1), "found": found, "n": 3}


def arguments():
    return torch.randn(2, 4), {"ids": torch.ones(2, 2, dtype=torch.int64)}


def test_each_kind_of_node_and_argument(golden):
    golden(format_graph(traced(Varied(), *arguments())))


def test_stages_routes_and_tied_parameters(golden):
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    golden(format_graph(lowered(model, torch.randn(2, 4), cuts=("1",))))


def test_the_text_is_the_same_for_every_model_of_the_class():
    texts = {format_graph(traced(Varied(), *arguments())) for _ in range(2)}
    assert len(texts) == 1
    assert not re.search(r"0x[0-9a-f]{6}", texts.pop())


def test_types_of_values():
    assert format_type(torch.empty(2, 0, dtype=torch.complex64)) == "c64[2, 0]"
    assert format_type(torch.empty((), dtype=torch.uint16)) == "uint16[]"
    assert format_type((torch.empty(1), [3, None])) == "(f32[1], (int, NoneType))"
    assert format_type(torch.Size([1, 2])) == "Size"


def test_arguments_keep_their_shape():
    argument = ({"a": [1, "b"]}, slice(None, 3), torch.int8)
    assert format_argument(argument) == "[{'a': [1, 'b']}, slice(None, 3, None), torch.int8]"
