"""Muon takes the matrices of the layers and AdamW the rest, at one learning rate, and both states are kept."""

import copy

import pytest
import torch
from torch import nn

from hf_specdec.tools.train import optimiser
from hf_specdec.tools.train.optimiser import Muon, MuonWithAdamW


class Net(nn.Module):
    """Every kind of weight: an embedding, a matrix, a vector, a frozen matrix and an output head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(9, 4), nn.Linear(4, 6)
        self.frozen = nn.Linear(6, 6, bias=False).requires_grad_(False)
        self.output = nn.Linear(6, 9, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.output(self.frozen(self.hidden(self.embedding(ids)).tanh()))
        return logits


IDS = torch.arange(9)


def learn(net: Net, both: torch.optim.Optimizer, steps: int) -> float:
    """The loss before the last step."""
    loss = torch.tensor(0.0)
    for _ in range(steps):
        both.zero_grad()
        loss = nn.functional.cross_entropy(net(IDS), IDS)
        loss.backward()
        both.step()
    return float(loss.detach())


@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (7, 7)], ids=str)
@pytest.mark.parametrize("in_bf16", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("scaling", ["match_rms_adamw", "original"])
def test_muon_steps_as_torchs_does(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], in_bf16: bool, scaling: str
) -> None:
    """In bf16 with the same bits; torch has no other."""
    monkeypatch.setattr(optimiser, "computes_bf16", lambda device: in_bf16)
    torch.manual_seed(1)
    ours, peer = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.empty(shape))
    peer.data.copy_(ours.data)
    began = ours.detach().clone()
    steps = (
        Muon([ours], 0.1, like_adamw=scaling == "match_rms_adamw"),
        torch.optim.Muon([peer], lr=0.1, weight_decay=0.01, adjust_lr_fn=scaling),
    )
    for _ in range(3):
        ours.grad = torch.randn(shape)
        peer.grad = ours.grad.clone()
        for one in steps:
            one.step()
    assert torch.equal(ours, peer) == in_bf16
    assert (ours - peer).abs().max() < 0.02 * (ours - began).abs().max()


def test_a_matrix_without_a_gradient_stays() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    Muon([weight], 0.1).step()
    assert torch.equal(weight, torch.ones(2, 3))


def test_matrices_of_layers_get_orthogonal_steps_and_the_rest_adamws() -> None:
    torch.manual_seed(0)
    net = Net()
    began, peer = copy.deepcopy(net), copy.deepcopy(net)
    learn(net, MuonWithAdamW(net, 0.01, output=net.output), 1)
    learn(peer, torch.optim.AdamW(peer.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.01), 1)
    for name, weight in peer.named_parameters():
        assert torch.equal(weight, net.get_parameter(name)) == (name != "hidden.weight"), name
    singular = torch.linalg.svdvals(net.hidden.weight - began.hidden.weight * (1.0 - 0.01 * 0.01))
    assert singular.min() > 0.5 * singular.max()  # AdamW's step has singular values far apart
    assert torch.equal(net.frozen.weight, began.frozen.weight)


def test_the_learning_rate_of_the_groups_is_used_and_both_learn() -> None:
    torch.manual_seed(0)
    net = Net()
    both, began = MuonWithAdamW(net, 0.05, output=net.output), copy.deepcopy(net)
    for group in both.param_groups:
        group["lr"] = 0.0
    learn(net, both, 2)
    assert all(torch.equal(weight, began.get_parameter(name)) for name, weight in net.named_parameters())
    for group in both.param_groups:
        group["lr"] = 0.05
    assert learn(net, both, 60) < 0.1


def test_a_training_goes_on_from_the_saved_states() -> None:
    torch.manual_seed(0)
    net = Net()
    both = MuonWithAdamW(net, 0.02, output=net.output)
    learn(net, both, 3)
    other = copy.deepcopy(net)
    resumed = MuonWithAdamW(other, 0.5, output=other.output)
    resumed.load_state_dict(copy.deepcopy(both.state_dict()))
    learn(net, both, 3)
    learn(other, resumed, 3)
    for name, weight in net.named_parameters():
        assert torch.equal(weight, other.get_parameter(name)), name


def test_a_model_without_matrices_or_with_matrices_alone_is_trained_too() -> None:
    for net in (nn.LayerNorm(4), nn.Linear(4, 4, bias=False)):
        both, began = MuonWithAdamW(net, 0.1), net.weight.detach().clone()
        net(torch.randn(2, 4)).square().sum().backward()
        both.step()
        assert not torch.equal(net.weight, began)
