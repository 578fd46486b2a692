"""A model with the options of a call, and the prompts that it continues."""

import dataclasses
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer

from hf_specdec.common.files import lone_surrogate
from hf_specdec.common.stats import SpecStats
from hf_specdec.compat.attention import attention_implementation
from hf_specdec.compat.models import max_positions
from hf_specdec.errors import ConfigError, counted
from hf_specdec.kernels.quantization.weights import precision_of
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.bench.prompts import Prompt, default_prompts
from hf_specdec.tools.cli.report import drafts_line, print_json
from hf_specdec.tools.command_errors import note

QUESTION = "What are the benefits of reading books? Answer in a list."
PROMPTS = tuple(prompt.text for prompt in default_prompts() if prompt.task == "continue")[:3]

Result = tuple[list[int], float, SpecStats | None]  # new tokens of a call, its seconds and its statistics


@dataclass(frozen=True, slots=True)
class Job:
    """A model with the arguments of `generate` that its calls share; `method` has those that choose the method."""

    loaded: LoadedModel
    method: Mapping[str, Any]
    options: Mapping[str, Any]
    seed: int | None = None

    def write(self, prompt: Prompt) -> Result:
        """Write the continuation of a prompt to stdout as it comes."""
        length, positions = len(prompt.encode(self.loaded.tokenizer)), max_positions(self.loaded.model.config)
        if positions is not None and length + self.options["max_new_tokens"] > positions:
            wanted = f"{counted(length, 'token')} in the prompt and {self.options['max_new_tokens']} new ones"
            note(f"note: the model has {positions} positions; {wanted} may go beyond them", "yellow")
        streamer = TextStreamer(self.loaded.tokenizer, skip_prompt=True, skip_special_tokens=True)
        result = self.run(prompt, streamer=streamer)
        if len(result[0]) < 2 and not prompt.is_chat and getattr(self.loaded.tokenizer, "chat_template", None):
            note("hint: the model ended its text at once; --chat asks it through its chat template", "cyan")
        return result

    def show(self, prompt: Prompt) -> None:
        """Write the continuation of a prompt, and on stderr how long it took."""
        token_ids, seconds, stats = self.write(prompt)
        speed = f"{counted(len(token_ids), 'token')} in {seconds:.2f} s ({len(token_ids) / seconds:.1f} tokens/s)"
        note(speed if stats is None else f"{speed}; {drafts_line(stats)}", "dim")

    def print_document(self, prompt: Prompt) -> None:
        """Print the continuation of a prompt with all that made it, as one JSON document."""
        (token_ids, seconds, stats), model = self.run(prompt), self.loaded.model
        config, draft = self.method.get("spec_config"), self.method.get("assistant_model")
        document = {
            "model": model.name_or_path,
            "dtype": precision_of(model),
            "device": str(self.loaded.device),
            "attention": attention_implementation(model.config),
            "assistant_model": None if draft is None else draft.name_or_path,
            "assistant_dtype": None if draft is None else precision_of(draft),
            "threads": torch.get_num_threads(),
            "spec_method": self.method["spec_method"],
            "spec_config": None if config is None else dataclasses.asdict(config),
            "options": {**self.options, "seed": self.seed},
            "chat": prompt.is_chat,
            "system": next((message["content"] for message in prompt.before), None),
            "prompt": prompt.text,
            "text": self.loaded.tokenizer.decode(token_ids, skip_special_tokens=True),
            "token_ids": token_ids,
            "seconds": seconds,
            "tokens_per_second": len(token_ids) / seconds,
            "spec_stats": None if stats is None else stats.to_dict(),
        }
        print_json(document)

    def run(self, prompt: Prompt, **kwargs: Any) -> Result:
        """Call `generate` on one prompt."""
        ids = torch.tensor([prompt.encode(self.loaded.tokenizer)], device=self.loaded.device)
        kwargs = {**self.options, **self.method, **kwargs, "attention_mask": torch.ones_like(ids)}
        if self.seed is not None:
            torch.manual_seed(self.seed)
        model: Any = self.loaded.model
        started = time.perf_counter()
        output = model.generate(ids, return_dict_in_generate=True, **kwargs)
        token_ids = output.sequences[0, ids.shape[1] :].tolist()
        return token_ids, time.perf_counter() - started, getattr(output, "spec_stats", None)


def make_prompts(
    text: str | None, tokenizer: PreTrainedTokenizerBase, *, is_chat: bool, system: str | None
) -> list[Prompt]:
    """The prompt, or without a text a question to a model with a chat template, Python code to another."""
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if is_chat and not has_template:
        rule = "must come with a model that has a chat template"
        raise ConfigError("chat", rule, tokenizer.name_or_path, "Name one, such as smollm2.")
    if text is None:
        texts, is_chat = (QUESTION,) if has_template else PROMPTS, has_template
    elif not text:
        raise ConfigError("prompt", "must hold at least one token", text, "Type some text to continue.")
    elif lone_surrogate(text) is not None:
        raise ConfigError("prompt", "must be Unicode text", ascii(text[:40]), "Convert it to UTF-8.")
    else:
        texts = (text,)
    before = () if system is None else ({"role": "system", "content": system},)
    return [Prompt(f"prompt {number}", "prompts", each, is_chat, before) for number, each in enumerate(texts)]


def read_prompt(argument: str | None) -> str | None:
    """The prompt from the argument or stdin; `None` where neither says anything."""
    if argument is not None and argument != "-":
        return argument
    if argument == "-" or (sys.stdin is not None and not sys.stdin.isatty()):
        return sys.stdin.read() or (None if argument is None else "")
    return None
