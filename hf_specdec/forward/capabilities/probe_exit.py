"""Probes whether a model's first layers can draft over its own cache.

Found by trying: two rounds of drafts and verify passes, against the same tokens one by one.
"""

import torch
from transformers import PreTrainedModel

from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.forward.capabilities.attempts import REFUSALS, sentence, tried
from hf_specdec.forward.capabilities.probe import known_text, runner_of
from hf_specdec.forward.capabilities.reference import tokens_of
from hf_specdec.forward.model_runner import Tier
from hf_specdec.forward.networks.exit_runner import ExitRunner


def probe_exit(model: PreTrainedModel, layers: int, tier: Tier) -> str | None:
    """Reason why the first `layers` layers cannot draft for a model of this tier, or `None`.

    Raises:
        ProbeFailed: a fault that may pass; it says nothing of the model.
    """
    try:
        tried(lambda attempt: _try(model, layers, tier, attempt))
    except REFUSALS as error:
        return sentence(error)
    return None


@torch.no_grad()
def _try(model: PreTrainedModel, layers: int, tier: Tier, attempt: int) -> None:
    """Two rounds; in the first of a tree, a branch next to the first one is accepted, so that columns move."""
    prompt, t = tokens_of(model, attempt)
    coming = [t[0], t[2], t[3], t[5], t[6]]
    wanted, tolerance = known_text(model, {}, prompt, coming)
    target, text = runner_of(model, {}, prompt, tier)
    target.prefill()
    device = target.input_ids.device
    runner = ExitRunner(model, layers, num_rows=1, takes_trees=tier == "tree", device=device)
    runner.bind(target)
    text.append(t[0])
    builder = TreeBuilder(t[0])
    runner.score([builder.build()])
    others = [] if tier == "chain" else [builder.add(0, t[1])]
    first = builder.add(0, t[2])
    runner.score([builder.build()])
    path = [0, first, builder.add(first, t[3])]
    for node in others:
        builder.add(node, t[4])
    rows = target.forward([builder.build()])[0]
    tolerance.check_logits(rows[path].float(), wanted.logits[0, :3])
    target.commit([path])
    for token in (t[2], t[3], t[5]):
        text.append(token)
    runner.score([DraftTree.chain(t[5])])
    rows = target.forward([DraftTree.chain(t[5], [t[6]])])[0]
    tolerance.check_logits(rows.float(), wanted.logits[0, 3:])
