"""Parts of decoding that several processes of one model have to agree on, where there is one process."""

from collections.abc import Callable, Mapping

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from hf_specdec.engine.sampling.random_streams import drawn_seed
from hf_specdec.engine.sampling.sampler import Sampler
from hf_specdec.engine.stopping import StopCheck
from hf_specdec.forward.networks.runner_base import BaseDraftRunner


class SingleProcess:
    """A process that has nobody to agree with.

    Attributes:
        is_shared (`bool`): whether other processes decode the same texts with parts of the same models.
        leads (`bool`): whether this process drafts and chooses.
    """

    is_shared = False
    leads = True

    def sampler(
        self,
        processors: LogitsProcessorList,
        config: GenerationConfig,
        device: torch.device,
        generator: torch.Generator | None,
    ) -> Sampler:
        """Sampler of one row."""
        return Sampler(processors, config, device, generator)

    def stop_check(self, criteria: StoppingCriteriaList) -> StopCheck:
        """Stop check of one row."""
        return StopCheck(criteria)

    def seed(self) -> int:
        """A number drawn from the global generator."""
        return drawn_seed()

    def network(self, draft_runner: BaseDraftRunner | None) -> BaseDraftRunner | None:
        """The draft network, where this process computes with it."""
        return draft_runner

    def check(self, digests: Callable[[], Mapping[str, int]]) -> None:
        """Make sure that all processes are called alike, by digests of what has to be the same."""

    def flush(self) -> None:
        """Let other processes know what was decided."""

    def can_go_on(self) -> bool:
        """Tell whether there can be further steps after an error."""
        return True

    def abandon(self, error: BaseException) -> None:
        """An error ends the call."""

    def share_random_state(self) -> None:
        """Give all processes the random state of the one that leads."""
