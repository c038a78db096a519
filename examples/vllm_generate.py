"""Generate with vLLM and our experts: `python examples/vllm_generate.py CHECKPOINT [JOURNAL]`.

The checkpoint needs no tokenizer here: prompts and answers are token ids.
"""

from __future__ import annotations

import sys

from vllm import LLM, SamplingParams


def main(folder: str, journal: str | None = None) -> list[list[int]]:
    settings = {"flags": {"tune_small_shapes": 0}} | ({"journal": journal} if journal else {})
    llm = LLM(
        folder,
        quantization="sm70_awq",  # this turns it on
        additional_config={"sm70_moe": settings},
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
    )
    prompts = [{"prompt_token_ids": ids} for ids in ([1, 2, 3, 4], [10, 20, 30])]
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, sampling, use_tqdm=False)]


if __name__ == "__main__":
    for tokens in main(*sys.argv[1:]):
        print(*tokens)
