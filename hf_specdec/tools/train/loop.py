"""The training of a draft of any kind: the target writes texts into shards, the draft learns from them.

Killed at any moment, the same call goes on where it was. Runs in every process of an `accelerate launch`. Knows
neither heads nor models: a rollout gives the loss of a batch and how many drafted tokens its texts accept.
"""

import contextlib
import dataclasses
import logging
import pickle
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from hf_specdec import compat
from hf_specdec.common.files import replacing, saving_tensors
from hf_specdec.common.progress import with_bar
from hf_specdec.errors import CheckpointError, ConfigError, first_line
from hf_specdec.tools.train.batch import Texts
from hf_specdec.tools.train.config import Training
from hf_specdec.tools.train.optimiser import MuonWithAdamW
from hf_specdec.tools.train.student import Student
from hf_specdec.tools.train.texts import read_shard

logger = logging.getLogger("hf_specdec")
STATE = {"student", "best_weights", "optimiser", "step", "best_step", "seconds", "without_gain", "best", "losses"}
WARM_UP, LAST_RATE = 0.03, 0.02  # share of training; share of the peak at the end


@dataclass(frozen=True, slots=True)
class Measured:
    """Acceptance of a draft's chains on held-out texts of one temperature.

    Attributes:
        temperature (`float`): at which the target wrote the texts.
        num_positions (`int`): where a chain was drafted.
        rates (`tuple[float, ...]`): share of the positions at which the first token, the first two, ... were the
            text's. The chains are of the likeliest tokens; drafts of sampled calls use the sampler's random numbers
            and are accepted more often as a rule.
    """

    temperature: float
    num_positions: int
    rates: tuple[float, ...]

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a verify step on the mean, the accepted ones and the target's own."""
        return 1.0 + sum(self.rates)


@dataclass(frozen=True, slots=True)
class HeadReport:
    """One training, of a head or of a draft model.

    Attributes:
        num_steps (`int`): steps trained.
        best_step (`int`): the step whose weights were kept.
        minutes (`float`): of training, the writing of texts and the measurements left out.
        measured (`tuple[Measured, ...]`): held-out acceptance of the kept weights, by temperature.
        loss (`float`): mean of the last 50 steps, in nats; of a head, the draft steps' weighted sum.
    """

    num_steps: int
    best_step: int
    minutes: float
    measured: tuple[Measured, ...]
    loss: float


def accelerator_for(target: PreTrainedModel, config: Training) -> Accelerator:
    """accelerate's view of the processes, on the target's kind of device.

    Raises:
        ConfigError: accelerate has begun with another precision or kind of device in this process.
    """
    kind, remedy = compat.input_device(target).type, "Use a process of its own for this training."
    try:
        accelerator = Accelerator(mixed_precision=config.mixed_precision, cpu=kind == "cpu")
    except ValueError as error:
        rule = "must stay as accelerate has been set up in this process"
        raise ConfigError("mixed_precision", rule, config.mixed_precision, remedy) from error
    if accelerator.device.type != kind:
        rule = f"must be on the device that accelerate has been set up for in this process, {accelerator.device.type}"
        raise ConfigError("target", rule, kind, remedy)
    return accelerator


@contextlib.contextmanager
def frozen(target: PreTrainedModel) -> Iterator[None]:
    """A block in which no gradients of the target's weights are computed, where a head reads its embeddings."""
    weights = [weight for weight in target.parameters() if weight.requires_grad]
    for weight in weights:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in weights:
            weight.requires_grad_(True)


class TrainingLoop:
    """The steps, their measurements and the state that is saved after each of these.

    Args:
        student: the kind of draft.
        draft: what is trained; `run` leaves it with its best weights.
        work: folder of the shards and of the state.
    """

    def __init__(
        self, accelerator: Accelerator, student: Student[Any, Any], draft: nn.Module, work: Path, config: Training
    ) -> None:
        self.accelerator, self.draft, self.work, self.config = accelerator, draft, work, config
        rollout = student.rollout(draft).to(accelerator.device)
        rate = config.learning_rate or 0.4 / student.width(draft)
        optimiser = MuonWithAdamW(rollout, rate, output=student.output(draft))
        self.peak = rate
        self.rollout, self.optimiser = accelerator.prepare(rollout, optimiser)
        held_out = config.num_held_out_shards
        self.held_out = range(held_out)
        self.learned = range(held_out, config.num_shards)
        self.most_steps = max(1, int(config.steps_per_epoch // accelerator.num_processes * config.epochs))
        self.step, self.best_step, self.seconds, self.without_gain = 0, 0, 0.0, 0
        self.best: list[Measured] = []
        self.best_weights: dict[str, torch.Tensor] = {}
        self.losses: list[float] = []

    @property
    def _state_file(self) -> Path:
        return self.work / "state.pt"

    def run(self, is_shown: bool) -> HeadReport:
        """Train until the steps, the time or the gain is over; the student is left with its best weights."""
        self._resume()
        if not self.best:
            self._measure()
        steps = range(self.step, self.most_steps)
        batches = self._batches()
        for _ in with_bar(steps, total=self.most_steps, done=self.step, label="training", is_shown=is_shown):
            if self._progress() >= 1.0 or self.without_gain >= self.config.patience:
                break
            began = time.perf_counter()
            self._learn(next(batches))
            self.step += 1
            self.seconds += self._slowest(time.perf_counter() - began)
            if self.step % self.config.eval_every == 0 or self._progress() >= 1.0:
                self._measure()
        self.draft.load_state_dict(self.best_weights)
        self.draft.eval().requires_grad_(False)
        return HeadReport(self.step, self.best_step, self.seconds / 60.0, tuple(self.best), self._mean_loss())

    def _learn(self, batch: Texts) -> None:
        """One step."""
        self.rollout.train()
        for group in self.optimiser.param_groups:
            group["lr"] = self.peak * _schedule(self._progress())
        own_step = self.step * self.accelerator.num_processes + self.accelerator.process_index
        torch.manual_seed(self.config.seed + own_step)  # what a rollout draws depends on the step alone
        loss = self.rollout(batch).loss
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.rollout.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.losses = [*self.losses[-49:], float(loss.detach())]

    def _measure(self) -> None:
        """Acceptance on the held-out texts; keep the weights if they are the best yet, and save everything."""
        found = _measured(self.accelerator, self.rollout, self.work, self.held_out, self.config)
        if not found:
            rule = "must be ones after which the target writes two tokens or more"
            raise ConfigError("prompts", rule, "ones after which it ends its held-out texts at once", "Give others.")
        gained = not self.best or _mean_tokens(found) > _mean_tokens(self.best)
        self.without_gain = 0 if gained else self.without_gain + 1
        if gained:
            self.best, self.best_step = found, self.step
            self.best_weights = {
                name: weight.detach().cpu().clone() for name, weight in self.draft.state_dict().items()
            }
        shown = ", ".join(f"{m.tokens_per_step:.2f} at temperature {m.temperature:g}" for m in found)
        loss = f", loss {self._mean_loss():.3f}" if self.losses else ""
        line = "step %d of at most %d, %.1f minutes%s: held-out tokens per step %s"
        logger.info(line, self.step, self.most_steps, self.seconds / 60.0, loss, shown)
        if self.accelerator.is_main_process:
            self._save()

    def _save(self) -> None:
        state = {
            "student": self.draft.state_dict(),
            "best_weights": self.best_weights,
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
            "best_step": self.best_step,
            "seconds": self.seconds,
            "without_gain": self.without_gain,
            "best": [dataclasses.asdict(found) for found in self.best],
            "losses": self.losses,
        }
        with saving_tensors(self._state_file), replacing(self._state_file) as temporary:
            torch.save(state, temporary)

    def _resume(self) -> None:
        if not self._state_file.exists():
            return
        state = _read_state(self._state_file, self.accelerator.device)
        self.draft.load_state_dict(state["student"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.best_weights = state["best_weights"]
        self.step, self.best_step, self.seconds = state["step"], state["best_step"], state["seconds"]
        self.without_gain, self.losses = state["without_gain"], state["losses"]
        self.best = [Measured(**found) for found in state["best"]]
        if any(len(found.rates) != self.config.rollout_steps for found in self.best):  # chains of another length
            self.draft.load_state_dict(self.best_weights)
            self.best = _measured(self.accelerator, self.rollout, self.work, self.held_out, self.config)
            self.draft.load_state_dict(state["student"])

    def _batches(self) -> Iterator[Texts]:
        """Batches without an end, beginning where training stands; the order depends on seed and epoch alone."""
        accelerator, config = self.accelerator, self.config
        per_shard = config.texts_per_shard // config.batch_size
        mine = list(self.learned)[accelerator.process_index :: accelerator.num_processes]
        mine = mine[: len(self.learned) // accelerator.num_processes] or list(self.learned)
        per_epoch = max(1, len(mine) * per_shard)
        epoch, skipped = divmod(self.step, per_epoch)
        while True:
            order = random.Random(f"{config.seed} {epoch}").sample(mine, len(mine))
            for place, index in enumerate(order):
                if (place + 1) * per_shard <= skipped:
                    continue
                shard = read_shard(self.work, index)
                rows = torch.randperm(len(shard.ids), generator=torch.Generator().manual_seed(config.seed + epoch))
                batches = [rows[i * config.batch_size : (i + 1) * config.batch_size] for i in range(per_shard)]
                for chosen in batches[max(0, skipped - place * per_shard) :]:
                    yield shard.batch(chosen, accelerator.device)
            epoch, skipped = epoch + 1, 0

    def _progress(self) -> float:
        """Share of the training that is over."""
        shares = [self.step / self.most_steps]
        if self.config.minutes is not None:
            shares.append(self.seconds / (60.0 * self.config.minutes))
        return max(shares)

    def _slowest(self, seconds: float) -> float:
        """The same number in every process, so that all end together."""
        if self.accelerator.num_processes == 1:
            return seconds
        mine = torch.tensor([seconds], device=self.accelerator.device)
        return float(self.accelerator.gather(mine).max())

    def _mean_loss(self) -> float:
        return sum(self.losses) / max(len(self.losses), 1)


def _read_state(file: Path, device: torch.device) -> dict[str, Any]:
    """Read the state that `_save` wrote.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        state: dict[str, Any] = torch.load(file, map_location=device, weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{str(file)!r} cannot be read: {first_line(error)} Delete it to train on the texts anew."
        ) from error
    if not isinstance(state, dict) or not state.keys() >= STATE:
        raise CheckpointError(f"{str(file)!r} is no state of a training. Delete it to train on the texts anew.")
    return state


def _measured(
    accelerator: Accelerator, rollout: Any, work: Path, indices: Sequence[int], config: Training
) -> list[Measured]:
    """Acceptance on the shards `indices`, by temperature.

    Processes have different numbers of batches here, so the module is called without what waits for the others.
    """
    rollout = accelerator.unwrap_model(rollout).eval()
    sums = {temperature: torch.zeros(config.rollout_steps + 1) for temperature in config.temperatures}
    mine = indices[accelerator.process_index :: accelerator.num_processes]
    with torch.no_grad():
        for shard in (read_shard(work, index) for index in mine):
            for rows in torch.split(torch.arange(len(shard.ids)), config.batch_size):
                outcome = rollout(shard.batch(rows, accelerator.device))
                counted = torch.cat([outcome.num_positions[None], outcome.accepted]).float().cpu()
                sums[shard.temperature] += counted
    found = []
    for temperature, own in sums.items():
        counted = accelerator.reduce(own.to(accelerator.device)).cpu()
        if counted[0] > 0:
            rates = tuple((counted[1:] / counted[0]).tolist())
            found.append(Measured(temperature, int(counted[0]), rates))
    return found


def _mean_tokens(found: Sequence[Measured]) -> float:
    return sum(measured.tokens_per_step for measured in found) / max(len(found), 1)


def _schedule(progress: float) -> float:
    """Linear warm-up, then a linear way down."""
    return max(min(progress / WARM_UP, (1.0 - progress) / (1.0 - WARM_UP)), LAST_RATE)
