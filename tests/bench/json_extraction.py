"""JSON of twenty records by a grammar: processor time of plain `generate` and of drafts with and without forced tokens.

python -m tests.bench.json_extraction path/to/a/chat/model --precision bf16

Each record is a call of its own, the ways in turns, each with a model of its own: drafts come from its earlier records
too, or with `--own-text` from the record's own text alone. Plain `generate` computes with the same kernels.
"""

import argparse
import random
import time
from typing import Any

import torch
from transformers import AutoTokenizer, LogitsProcessor

import hf_specdec

FIRST = ("Alice", "Bruno", "Chen", "Dana", "Emil", "Fatima", "Goran", "Hana", "Igor", "Julia")
LAST = ("Novak", "Silva", "Okafor", "Weber", "Tanaka", "Rossi", "Larsen", "Haddad", "Kovacs", "Moreau")
CITIES = ("Lisbon", "Oslo", "Nairobi", "Kyoto", "Lyon", "Prague", "Toronto", "Lima")
JOBS = ("software engineer", "nurse", "civil engineer", "teacher", "data analyst", "architect")
FIELDS = {
    "full_name": "string",
    "age": "integer",
    "occupation": "string",
    "city": "string",
    "company": "string",
    "joined_year": "integer",
    "email": "string",
    "phone": "string",
}
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": kind} for name, kind in FIELDS.items()},
    "required": list(FIELDS),
    "additionalProperties": False,
}
WAYS = {
    "plain generate": (None, True),
    "auto, nothing forced": ("auto", False),
    "auto": ("auto", True),
}


class MasksAlone(LogitsProcessor):
    """A grammar that drafts know nothing of."""

    def __init__(self, grammar: Any) -> None:
        self.grammar = grammar

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        masked: torch.Tensor = self.grammar(input_ids, scores)
        return masked


def record(draw: random.Random) -> str:
    first, last = draw.choice(FIRST), draw.choice(LAST)
    reached = f"{first.lower()}.{last.lower()}@acme.example or +1-555-{draw.randint(1000, 9999)}"
    work = (
        f"works as a {draw.choice(JOBS)} in {draw.choice(CITIES)} for Acme Logistics since {draw.randint(2001, 2023)}"
    )
    return f"{first} {last}, {draw.randint(22, 64)}, {work}, and can be reached at {reached}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--records", type=int, default=20)
    parser.add_argument("--own-text", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    models: dict[str, Any] = {}
    for way in WAYS:
        model = hf_specdec.AutoModelForCausalLM.from_pretrained(options.model, precision=options.precision)
        models[way] = hf_specdec.enable(hf_specdec.disable(model), plain_kernels=True)
    draw, keys = random.Random(0), ", ".join(FIELDS)
    seconds, tokens, forwards = dict.fromkeys(WAYS, 0.0), 0, dict.fromkeys(WAYS, 0)
    same = dict.fromkeys(WAYS, 0)
    for number in range(-1, options.records):  # the first is not counted
        asked = f"Extract the person as JSON with the keys {keys}.\n\n{record(draw)}"
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": asked}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        expected: list[int] = []
        for way, (method, forces) in WAYS.items():
            grammar: Any = hf_specdec.grammar(tokenizer, json_schema=SCHEMA)
            arguments: dict[str, Any] = {} if method is None else {"spec_method": method}
            if method == "auto" and options.own_text:
                arguments["spec_config"] = {"pool": "request"}
            start = time.process_time()
            output = models[way].generate(
                **inputs,
                max_new_tokens=160,
                do_sample=False,
                logits_processor=[grammar if forces else MasksAlone(grammar)],
                return_dict_in_generate=True,
                **arguments,
            )
            taken, text = time.process_time() - start, output.sequences[0].tolist()
            expected = expected or text
            if number >= 0:
                seconds[way] += taken
                same[way] += text == expected
                forwards[way] += output.spec_stats.num_forwards if method else len(text) - inputs["input_ids"].shape[1]
        tokens += (len(expected) - inputs["input_ids"].shape[1]) * (number >= 0)
    print(f"{options.records} records, {tokens} tokens")
    for way in WAYS:
        factor = seconds["plain generate"] / seconds[way]
        print(f"{way:22}{seconds[way]:8.1f} s {factor:6.2f} x {forwards[way]:6} forwards, {same[way]} texts equal")


if __name__ == "__main__":
    main()
