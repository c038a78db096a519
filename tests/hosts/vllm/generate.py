"""Starts an engine with options (JSON) and prints greedy tokens; the tests of several processes run it."""

from __future__ import annotations

import json
import sys

PROMPTS = ([1, 2, 3, 4, 5], [10, 20, 30], [500, 7, 7, 7, 123, 42, 9])


def main(folder: str, options: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        **{
            "quantization": "sm70_awq",
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 64,
            "max_num_seqs": 4,
            **json.loads(options),
        },
    )
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling, use_tqdm=False)
    print("TOKENS", json.dumps([list(output.outputs[0].token_ids) for output in outputs]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
