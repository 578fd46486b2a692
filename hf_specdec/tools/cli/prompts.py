"""The prompts of a command that was given none: Python code, the language of the embedded target, or a question."""

from hf_specdec.tools.bench.prompts import default_prompts

QUESTION = "Write a Python function that removes duplicates from a list and keeps their order. Then explain it."
PROMPTS = tuple(prompt.turns[0] for prompt in default_prompts() if prompt.task == "continue")[:3]
