"""vLLM's CPU build with checkpoints of our own making; the environment `vllm` of tox.ini has it.

Everything but the slow tests runs in this process: starting an engine takes seconds, importing vLLM
takes more.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.update(ENVIRONMENT)  # before vLLM is imported, which reads some of it then

TINY = Path(__file__).parents[2] / "data" / "tiny-qwen3-moe-awq"
PROMPTS = ([1, 2, 3, 4, 5], [10, 20, 30], [500, 7, 7, 7, 123, 42, 9])
TOKENS = 12
TIE = 1e-3
"""Logits of the reference that are closer than this are a tie: either token is right, and what follows
is another text, so that the prompt is not compared further."""

ENGINE = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "disable_log_stats": True,
    "enable_prefix_caching": False,
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: starts several processes, or a compiler")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The host's warnings are the host's; ours stay errors."""
    for item in items:
        if "vllm" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("ignore", append=False))
            item.add_marker(pytest.mark.filterwarnings("error:::sm70_moe"))


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer that we can run: a processor has no native route, and some run 4-bit experts themselves."""
    monkeypatch.setenv("SM70_MOE_TAKE", "all")


def decoded(tensors: Mapping[str, Any], name: str) -> Any:
    """FP16 weights (K, N) of an AWQ matrix, by CONTRACT 6 and 8 and nothing of the package."""
    nibbles = (0, 4, 1, 5, 2, 6, 3, 7)

    def values(kind: str) -> Any:
        words = tensors[f"{name}.{kind}"].view(np.uint32)
        found = np.stack([(words >> np.uint32(4 * place)) & np.uint32(15) for place in nibbles], axis=-1)
        return found.reshape(words.shape[0], -1).astype(np.float64)

    scales = tensors[f"{name}.scales"].astype(np.float64)
    bias = (-values("qzeros") * scales).astype(np.float16).astype(np.float64)
    codes = values("qweight")
    repeat = codes.shape[0] // scales.shape[0]
    return (codes * scales.repeat(repeat, 0) + bias.repeat(repeat, 0)).astype(np.float16)


@dataclass
class Files:
    """A checkpoint in memory: edit, then `write`."""

    tensors: dict[str, Any]
    config: dict[str, Any]

    def write(self, folder: Path) -> Path:
        from safetensors.numpy import save_file

        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        save_file({k: np.ascontiguousarray(v) for k, v in self.tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        return folder

    def matrices(self, part: str) -> list[str]:
        """Names of the quantised matrices whose name has this part."""
        return [k.removesuffix(".qweight") for k in self.tensors if k.endswith(".qweight") and part in k]

    def decode(self, part: str) -> Files:
        """The same with these matrices unquantised."""
        tensors = dict(self.tensors)
        for name in self.matrices(part):
            tensors[f"{name}.weight"] = decoded(self.tensors, name).T
            for kind in ("qweight", "qzeros", "scales"):
                del tensors[f"{name}.{kind}"]
        return Files(tensors, json.loads(json.dumps(self.config)))


def read(folder: Path) -> Files:
    from safetensors.numpy import load_file

    return Files(
        load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text(encoding="utf-8"))
    )


@pytest.fixture(scope="session")
def tiny() -> Files:
    """AutoAWQ's file: experts and attention quantised."""
    return read(TINY)


@pytest.fixture
def experts_only(tiny: Files) -> Files:
    """The same with only experts quantised, so that the rest runs in any dtype."""
    files = tiny.decode("self_attn")
    files.config["quantization_config"]["modules_to_not_convert"] = ["mlp.gate", "self_attn"]
    return files


@dataclass
class Reference:
    """Greedy tokens of the dequantised model in float32, and how far ahead of the next each was."""

    tokens: list[list[int]] = field(default_factory=list)
    leads: list[list[float]] = field(default_factory=list)

    def differences(self, found: list[list[int]], tie: float = TIE) -> tuple[list[str], list[str]]:
        """(real differences, differences at ties), each with prompt, step, tokens and lead."""
        real: list[str] = []
        ties: list[str] = []
        for prompt, (mine, theirs, leads) in enumerate(zip(self.tokens, found, self.leads, strict=True)):
            for step, (a, b, lead) in enumerate(zip(mine, theirs, leads, strict=True)):
                if a != b:
                    told = f"prompt {prompt} step {step}: {b}, reference {a}, ahead by {lead:.5f}"
                    (ties if lead < tie else real).append(told)
                    break
        return real, ties


def greedy(folder: Path) -> Reference:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    found = Reference()
    for prompt in PROMPTS:
        ids, leads = list(prompt), []
        for _ in range(TOKENS):
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1]
            best = logits.topk(2).values
            leads.append(float(best[0] - best[1]))
            ids.append(int(logits.argmax()))
        found.tokens.append(ids[len(prompt) :])
        found.leads.append(leads)
    return found


@pytest.fixture(scope="session")
def reference(tiny: Files, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    files = tiny.decode("")
    del files.config["quantization_config"]
    return greedy(files.write(tmp_path_factory.mktemp("plain")))


Engine = Callable[..., Any]


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Start an engine with our quantization, `engine(folder, dtype=...)`; it ends with the test."""
    started: list[Any] = []

    def start(folder: Path, **options: Any) -> Any:
        from vllm import LLM

        started.append(LLM(str(folder), **{**ENGINE, "quantization": "sm70_awq", "dtype": "float32", **options}))
        return started[-1]

    yield start
    from vllm.distributed import cleanup_dist_env_and_memory

    started.clear()
    gc.collect()
    cleanup_dist_env_and_memory()


def tokens_of(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in PROMPTS], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture
def tokens() -> Callable[[Any], list[list[int]]]:
    return tokens_of


def model_of(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


@pytest.fixture
def model() -> Callable[[Any], Any]:
    """The torch module inside of an engine that runs in this process."""
    return model_of


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """The lines that the engine of this test wrote, of one rank and one kind."""
    path = tmp_path / "moe.jsonl"
    monkeypatch.setenv("SM70_MOE_JOURNAL", str(path))

    def lines(event: str = "moe decision", rank: int = 0) -> list[dict[str, Any]]:
        text = path.with_name(f"moe.rank{rank}.jsonl").read_text(encoding="utf-8")
        return [line for line in map(json.loads, text.splitlines()) if line["event"] == event]

    return lines


def regrouped(files: Files, form: Any, zero_point: bool) -> Files:
    """Experts in another format; symmetric ones lose their zeros, so that all are 8."""
    import torch

    from sm70_moe.numbers.codes import Codes
    from sm70_moe.numbers.decoding import decode, encode
    from sm70_moe.numbers.formats import AWQ

    tensors = {k: v for k, v in files.tensors.items() if ".mlp.experts." not in k}
    for name in files.matrices(".mlp.experts."):
        stored = {k: torch.from_numpy(files.tensors[f"{name}.{k}"]) for k in ("qweight", "qzeros", "scales")}
        codes = decode(AWQ, stored, tuple(range(stored["scales"].shape[0])))
        if not zero_point:
            codes = Codes(codes.codes, torch.full_like(codes.zeros, 8), codes.scales)
        found = {kind: tensor.numpy() for kind, tensor in encode(form, codes).items()}
        rows, columns = codes.codes.shape
        if form.sizes is not None:
            found[form.sizes.kind] = np.array([columns, rows])
        if form.index is not None and form.zeros_always:
            found[form.index.kind] = np.arange(rows, dtype=np.int32) // 32
        if not zero_point and not form.zeros_always:
            del found[form.zeros.kind]
        tensors |= {f"{name}.{kind}": tensor for kind, tensor in found.items()}
    return Files(tensors, json.loads(json.dumps(files.config)))


@pytest.fixture
def compressed(experts_only: Files) -> Callable[[bool], Files]:
    """A compressed-tensors file, asymmetric or not."""

    def make(zero_point: bool) -> Files:
        from sm70_moe.numbers.formats import COMPRESSED

        files = regrouped(experts_only, COMPRESSED, zero_point)
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": not zero_point}
        files.config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"],
        }
        return files

    return make


@pytest.fixture
def gptq(experts_only: Files) -> Callable[[str], Files]:
    """A symmetric GPTQ file of one of the two versions."""

    def make(version: str) -> Files:
        from sm70_moe.numbers.formats import find

        files = regrouped(experts_only, find("gptq", version), False)
        files.config["quantization_config"] = {
            "quant_method": "gptq",
            "checkpoint_format": version,
            "bits": 4,
            "group_size": 32,
            "desc_act": False,
            "sym": True,
            "dynamic": {"-:.*self_attn.*": {}, "-:.*mlp\\.gate$": {}},
        }
        return files

    return make


@pytest.fixture(scope="session")
def reference_of(
    tiny: Files, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[bool], Reference]:
    """The reference of the same weights, asymmetric or with all zeros 8."""
    made: dict[bool, Reference] = {True: reference}

    def get(zero_point: bool) -> Reference:
        if zero_point not in made:
            changed = Files({**tiny.tensors}, tiny.config)
            for name in tiny.matrices(".mlp.experts."):
                changed.tensors[f"{name}.qzeros"] = np.full_like(tiny.tensors[f"{name}.qzeros"], -0x77777778)
            files = changed.decode("")
            del files.config["quantization_config"]
            made[zero_point] = greedy(files.write(tmp_path_factory.mktemp("plain-symmetric")))
        return made[zero_point]

    return get
