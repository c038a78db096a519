"""Generate with transformers, experts run by sm70_moe.

    python examples/transformers_generate.py FOLDER_OR_HUB_NAME [PROMPT...]

Without a prompt, or where the model has no tokenizer, the prompt is the token ids 1 2 3 4.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sm70_moe.engines.transformers import service_of, use_sm70_moe


def main(name: str, prompt: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = use_sm70_moe(name)
    model = AutoModelForCausalLM.from_pretrained(name, config=config, dtype="auto", device_map={"": device})
    print(service_of(model).summary())

    tokenizer = AutoTokenizer.from_pretrained(name) if prompt else None
    ids = tokenizer(prompt, return_tensors="pt").input_ids if tokenizer else torch.tensor([[1, 2, 3, 4]])
    tokens = model.generate(ids.to(device), max_new_tokens=16, do_sample=False)[0]
    print(tokenizer.decode(tokens) if tokenizer else tokens.tolist())


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER_OR_HUB_NAME [PROMPT...]")
    main(sys.argv[1], " ".join(sys.argv[2:]))
