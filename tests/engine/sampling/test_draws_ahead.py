"""Draws that are made ahead are those of `torch.multinomial`, number for number."""

import pytest
import torch
from transformers import LogitsProcessorList

from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.engine.sampling.node_processors import NodeProcessors
from hf_specdec.engine.sampling.noise_ahead import NoiseAhead
from hf_specdec.engine.sampling.random_streams import RandomStream
from hf_specdec.engine.sampling.sampler import TokensAhead
from hf_specdec.forward.text_rows import TokenBuffer

CPU, VOCAB = torch.device("cpu"), 50
PARENTS = [0, 1, 1, 0, 4, 5, 6]  # of nodes 1 to 7
PATHS = ([0], [0, 1], [0, 1, 3], [0, 4, 5], [0, 1, 2], [0, 4, 5, 6], [0, 4, 5, 6, 7])
LOGITS = torch.randn(len(PARENTS) + 1, VOCAB, generator=torch.Generator().manual_seed(0))
TEXT = TokenBuffer(torch.tensor([[3, 0]]), room=4)


def tree() -> DraftTree:
    builder = TreeBuilder(0)
    for node, parent in enumerate(PARENTS, 1):
        builder.add(parent, node)
    return builder.build()


def drawn_ahead(stream: RandomStream) -> TokensAhead:
    """As the samplers have them, after one transfer."""
    nodes = NodeProcessors.of(LogitsProcessorList(), CPU)
    assert nodes is not None
    ahead = TokensAhead(nodes, stream, NoiseAhead(stream))
    ahead.load([part.numpy() for part in ahead.find(LOGITS, tree(), TEXT)])
    return ahead


@pytest.mark.parametrize("is_global", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_the_draws_along_a_path_are_multinomials(path: list[int], is_global: bool) -> None:
    """The stream stands, after each, where as many draws of plain decoding leave it."""
    generator = None if is_global else torch.Generator()
    stream = RandomStream(CPU, generator)
    seed = torch.manual_seed if generator is None else generator.manual_seed
    seed(7)
    before = stream.state
    ahead = drawn_ahead(stream)
    assert torch.equal(stream.state, before)
    drawn = [(ahead.token_after(node), stream.state) for node in path]
    seed(7)
    for node, (token, after) in zip(path, drawn, strict=True):
        row = LOGITS[node : node + 1].softmax(dim=-1)
        assert token == int(torch.multinomial(row, 1, generator=generator))
        assert torch.equal(after, stream.state)


def test_what_another_thread_has_drawn_is_not_drawn_again() -> None:
    """The global generator stands elsewhere then, and what was made ahead is left alone."""
    ahead = drawn_ahead(RandomStream(CPU))
    assert ahead.token_after(1) is None, "the root's is drawn first"
    assert ahead.token_after(0) is not None
    torch.rand(1)
    moved = torch.get_rng_state()
    assert ahead.token_after(1) is None
    assert torch.equal(torch.get_rng_state(), moved)
