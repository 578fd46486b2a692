#!/usr/bin/env bash
# Qwen2-VL goes on with one conversation at the positions of another.   transformers 5.24.0, torch 2.13.0
#
# Expected: a conversation is its text and its cache, which generate gets at every turn. Two conversations in turn, each with a cache of
#   its own, are answered as each alone.
# Seen: the distance between positions and tokens, which an image makes (16 tokens of a 4 x 4 grid take 4 positions), is kept on the
#   model (`rope_deltas`) and not in the cache. A turn that continues a cache takes the distance of the prompt that the model read last,
#   whoever's it was: here positions are 12 too high, and the answer is another one. No error, no warning.
# Who meets it: chats and servers that keep a DynamicCache for each user of one Qwen2-VL; 20 other model files of this version have the
#   same lines (Qwen2.5-VL, Qwen3-VL, Qwen3.5, GLM-4V, PaddleOCR-VL). Calls from an empty cache are right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
unset PYTHONPATH
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install --quiet --no-compile torch==2.13.0
venv/bin/pip install --quiet --no-compile transformers==5.24.0

HF_HUB_OFFLINE=1 venv/bin/python -W ignore - <<'END'
import torch
import transformers
from transformers import DynamicCache, Qwen2VLConfig, Qwen2VLForConditionalGeneration

transformers.logging.set_verbosity_error()
START, END, IMAGE = 61, 62, 63
text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
text |= {"num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
names = {"image_token_id": IMAGE, "video_token_id": 60, "vision_start_token_id": START, "vision_end_token_id": END}
config = Qwen2VLConfig(text_config=text, vision_config=vision, **names)
torch.manual_seed(0)
model = Qwen2VLForConditionalGeneration(config).eval()
with torch.no_grad():
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.2)
picture = torch.randn(64, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0))
about_it = torch.tensor([[5, 6, START, *[IMAGE] * 16, END, 9, 10]])


def turn(ids, cache, **more):
    """The conversation with eight more tokens of the model."""
    asked = {"attention_mask": torch.ones_like(ids), "cache": cache, "do_sample": False, "eos_token_id": None}
    return model.generate(ids, **asked, **more, max_new_tokens=8, pad_token_id=0)


def conversation(between=None):
    """The second answer about a picture, and the distance when it begins; `between` happens between the two."""
    cache = DynamicCache(config=config)
    image = {"pixel_values": picture, "image_grid_thw": torch.tensor([[1, 8, 8]])}
    said = turn(about_it, cache, mm_token_type_ids=(about_it == IMAGE).int(), **image)
    if between is not None:
        between()
    question = torch.cat([said, torch.tensor([[7, 8]])], dim=1)
    distance = int(model.model.rope_deltas)
    return distance, turn(question, cache)[0, question.shape[1] :].tolist()


alone = conversation()
among_others = conversation(lambda: turn(torch.tensor([[20, 21, 22, 23]]), DynamicCache(config=config)))
print("alone:           distance", alone[0], "answer", alone[1])
print("among others:    distance", among_others[0], "answer", among_others[1])
if alone[0] != -12:
    raise SystemExit("changed: the distance that an image makes is another one, or kept elsewhere")
if alone != conversation():
    raise SystemExit("changed: the conversation alone is not answered the same each time")
if among_others == alone:
    raise SystemExit("changed: conversations with caches of their own do not disturb one another")
END
