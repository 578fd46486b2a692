"""Muon takes the matrices of the layers and AdamW the rest, at one learning rate, and both states are kept."""

import copy

import torch
from torch import nn

from hf_specdec.training.optimiser import MuonWithAdamW


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


def learn(net: Net, optimiser: torch.optim.Optimizer, steps: int) -> float:
    """The loss before the last step."""
    loss = torch.tensor(0.0)
    for _ in range(steps):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(net(IDS), IDS)
        loss.backward()
        optimiser.step()
    return float(loss.detach())


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
    optimiser, began = MuonWithAdamW(net, 0.05, output=net.output), copy.deepcopy(net)
    for group in optimiser.param_groups:
        group["lr"] = 0.0
    learn(net, optimiser, 2)
    assert all(torch.equal(weight, began.get_parameter(name)) for name, weight in net.named_parameters())
    for group in optimiser.param_groups:
        group["lr"] = 0.05
    assert learn(net, optimiser, 60) < 0.1


def test_a_training_goes_on_from_the_saved_states() -> None:
    torch.manual_seed(0)
    net = Net()
    optimiser = MuonWithAdamW(net, 0.02, output=net.output)
    learn(net, optimiser, 3)
    other = copy.deepcopy(net)
    resumed = MuonWithAdamW(other, 0.5, output=other.output)
    resumed.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    learn(net, optimiser, 3)
    learn(other, resumed, 3)
    for name, weight in net.named_parameters():
        assert torch.equal(weight, other.get_parameter(name)), name


def test_a_model_without_matrices_or_with_matrices_alone_is_trained_too() -> None:
    for net in (nn.LayerNorm(4), nn.Linear(4, 4, bias=False)):
        optimiser, began = MuonWithAdamW(net, 0.1), net.weight.detach().clone()
        net(torch.randn(2, 4)).square().sum().backward()
        optimiser.step()
        assert not torch.equal(net.weight, began)
