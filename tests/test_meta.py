"""A model built on the meta device: each rank gives memory and values to its own stages alone."""

import pytest
import torch
from torch import nn

import fxpipe
from fxpipe.errors import FxpipeError, InputError
from tests.ranks import run_ranks

WIDTH = 16


class Net(nn.Module):
    def __init__(self, width=WIDTH, depth=8):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, ids):
        return self.head(self.norm(self.layers(self.embed(ids))))


def loss(output, target):
    return nn.functional.cross_entropy(output, target)


def on_meta():
    with torch.device("meta"):
        return Net()


def real():
    torch.manual_seed(0)
    model = Net()
    model.unused.data.fill_(5)
    return model, torch.randint(0, 11, (8,)), torch.randint(0, 11, (8,))


def compiled(model, ids, **options):
    return fxpipe.compile(
        model, 4, loss=loss, microbatches=4, example_inputs=((ids,), {}), **options
    )


def save(state, path):
    if path.suffix == ".pt":
        torch.save(state, path)
    else:
        safetensors = pytest.importorskip("safetensors.torch")
        state = {k: v.clone() for k, v in state.items() if k != "head.weight"}
        safetensors.save_file(state, path)


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_weights_from_a_file_give_the_numbers_of_the_plain_model(tmp_path, name):
    model, ids, target = real()
    save(model.state_dict(), tmp_path / name)
    want = compiled(model, ids)
    got = compiled(on_meta(), ids, weights=tmp_path / name)
    assert torch.equal(want.step(ids, target=target).loss, got.step(ids, target=target).loss)
    for (a, p), (b, q) in zip(want.named_parameters(), got.named_parameters(), strict=True):
        assert a == b
        assert p.grad is q.grad or torch.equal(p.grad, q.grad)
    full = got.full_state_dict()
    assert list(full) == list(model.state_dict())
    model.load_state_dict(full)


def test_ranks_load_their_own_stages_and_gather_the_whole(tmp_path):
    model, ids, target = real()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    plain = compiled(model, ids)
    want = plain.step(ids, target=target).loss
    size = sum(p.numel() for p in model.parameters())

    def rank(number):
        pipe = compiled(on_meta(), ids, weights=tmp_path / "weights.pt")
        assert torch.equal(pipe.step(ids, target=target).loss, want)
        assert sum(p.numel() for p in pipe.parameters()) < size / 2
        assert not any(p.is_meta for p in pipe.parameters())
        state = pipe.full_state_dict()
        assert torch.equal(state["unused"], model.unused)
        assert state.keys() == model.state_dict().keys()
        pipe.load_state_dict({k: torch.zeros_like(v) for k, v in state.items()})
        assert not any(p.any() for p in pipe.parameters())

    run_ranks(4, rank)


def test_an_init_function_gives_every_rank_the_same_values():
    _, ids, _ = real()

    def init(name, tensor):
        if tensor.is_floating_point():
            tensor.normal_()
        else:
            tensor.zero_()

    torch.manual_seed(3)
    want = compiled(on_meta(), ids, init=init).state_dict()

    def rank(number):
        torch.manual_seed(3)
        pipe = compiled(on_meta(), ids, init=init)
        for name, value in pipe.state_dict().items():
            assert torch.equal(value, want[name]), name

    run_ranks(4, rank)


def test_what_has_no_value_is_named():
    model, ids, _ = real()
    state = dict(model.state_dict())
    del state["layers.2.weight"]
    with pytest.raises(InputError, match=r"layers\.2\.weight is on the meta device"):
        compiled(on_meta(), ids, weights=state)
    state["layers.2.weight"] = torch.zeros(2, 2)
    with pytest.raises(InputError, match=r"layers\.2\.weight has shape \[2, 2\]"):
        compiled(on_meta(), ids, weights=state)


def test_a_missing_file_and_an_impossible_check_are_refused(tmp_path):
    _, ids, _ = real()
    with pytest.raises(FxpipeError, match="no file of weights"):
        compiled(on_meta(), ids, weights=tmp_path / "none.pt")
    with pytest.raises(FxpipeError, match="cannot be verified"):
        compiled(on_meta(), ids, weights={}, verify=True)


def own_bytes():
    """Resident memory of this process, without pages of files, which the system may drop."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_a_rank_needs_the_memory_of_its_stage_and_not_of_the_model(tmp_path):
    # 128 MiB in all, 32 a stage: enough to tell from what torch itself takes while it compiles
    width, ids = 1024, torch.randint(0, 11, (8,))
    with torch.device("meta"):
        model = Net(width, depth=32)
    state = {
        n: torch.zeros(t.shape, dtype=t.dtype)
        for n, t in model.state_dict().items()
        if n != "head.weight"
    }
    torch.save(state, tmp_path / "weights.pt")
    whole = sum(t.numel() * t.element_size() for t in state.values())
    del state

    def rank(number):
        small = on_meta()
        compiled(small, ids, init=lambda name, tensor: tensor.zero_())  # torch's own imports
        before = own_bytes()
        pipe = compiled(model, ids, weights=tmp_path / "weights.pt")
        own = sum(p.numel() * p.element_size() for p in pipe.parameters())
        assert own < whole / 3
        assert own_bytes() - before < own + 0.2 * whole

    run_ranks(4, rank, timeout_s=60)
