"""Every family of transformers that has a module of experts, beside our layer in FP32: equal, or refused and why.

    python tests/hosts/transformers/sweep.py --write     # tests/data/families.json and the table of docs/formats.md

Of each family the module is made from its default config, made small, with random weights that we quantised; the same
weights are written as a checkpoint with the family's own config.json, which must be admitted or not by itself. A family
that is admitted must be equal; one that is not has what a plain layer would be off by beside its reason.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests" / "data" / "families.json"
PAGE = ROOT / "docs" / "formats.md"
MARKS = ("<!-- families: written by tests/hosts/transformers/sweep.py -->", "<!-- end of families -->")

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, TOKENS, GROUP = 64, 96, 4, 2, 7, 32
SIZES = {
    "hidden_size": HIDDEN, "moe_hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE,
    "intermediate_size": INTERMEDIATE, "expert_ffn_hidden_size": INTERMEDIATE, "num_experts": EXPERTS,
    "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K, "num_experts_per_token": TOP_K, "moe_topk": TOP_K, "moe_top_k": TOP_K, "moe_k": TOP_K,
    "num_hidden_layers": 1,
}  # fmt: skip
EQUAL = 1e-5
"""Largest difference, as a share of the largest result, that FP32 sums in another order leave."""
MATRICES = ("gate", "up", "down")
OTHER_MODULES = ("InklingSharedExperts", "JetMoeParallelExperts")
"""Experts that every token goes through, and one matrix of several experts."""


@dataclass(frozen=True)
class Verdict:
    """What became of one family. `difference`: a plain layer's result less the module's, as a share of the largest."""

    family: str
    model_type: str
    arithmetic: str
    admitted: bool
    reason: str
    difference: float | None


def families(names: set[str] | None = None) -> Iterator[tuple[str, type]]:
    """(folder, class) of every module of experts, or of those in folders of these names."""
    import transformers.models as models

    for found in pkgutil.iter_modules(models.__path__):
        if names is not None and found.name not in names:
            continue
        try:
            module = importlib.import_module(f"transformers.models.{found.name}.modeling_{found.name}")
        except ImportError:  # a family without a model of this name, or with needs of its own
            continue
        for name, value in vars(module).items():
            mine = isinstance(value, type) and value.__module__ == module.__name__
            if mine and name.endswith("Experts") and name not in OTHER_MODULES:
                yield found.name, value


def configs(family: str) -> list[Any]:
    """The family's configs, made small, those of text models first."""
    module = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    classes = [value for name, value in vars(module).items() if isinstance(value, type) and name.endswith("Config")]
    own = [value for value in classes if value.__module__ == module.__name__ and getattr(value, "model_type", "")]
    made = []
    for kind in sorted(own, key=lambda kind: ("Text" not in kind.__name__, kind.__name__)):
        try:
            config = kind()
        except Exception:  # a config that has no defaults
            continue
        for key, value in SIZES.items():
            with suppress(Exception):  # one that differs by layer
                if isinstance(getattr(config, key, key), int | None):
                    setattr(config, key, value)
        made.append(config)
    return made


def build(kind: type, family: str) -> tuple[Any, Any] | None:
    """The module and its config; None if no config of the family makes one of gate, up and down."""
    for config in configs(family):
        for arguments in ((config,), (config, INTERMEDIATE), (config, 0)):
            try:
                module = kind(*arguments)
            except Exception:  # another config is the right one
                continue
            if all(hasattr(module, name) for name in ("gate_up_proj", "down_proj")):
                return module.float().eval(), config
    return None


def weights(seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors of an AWQ checkpoint by name, and the FP32 matrices (K, N) that they stand for."""
    import numpy as np
    import torch

    from sm70_moe.evidence.synthetic import draw
    from sm70_moe.numbers.codes import Codes
    from sm70_moe.numbers.decoding import encode
    from sm70_moe.numbers.formats import AWQ

    rng, stored, plain = np.random.default_rng(seed), {}, {}
    for expert in range(EXPERTS):
        for matrix in MATRICES:
            shape = (INTERMEDIATE, HIDDEN) if matrix == "down" else (HIDDEN, INTERMEDIATE)
            n = draw(rng, shape, GROUP)
            codes = Codes(*(torch.from_numpy(np.ascontiguousarray(v)) for v in (n.codes, n.zeros, n.scales)))
            name = f"model.layers.0.mlp.experts.{expert}.{matrix}_proj"
            stored |= {f"{name}.{kind}": tensor for kind, tensor in encode(AWQ, codes).items()}
            scales = np.repeat(n.scales.astype(np.float64), GROUP, 0)
            biases = (-n.zeros.astype(np.float64) * n.scales.astype(np.float64)).astype(np.float16).astype(np.float64)
            weight = (n.codes * scales + np.repeat(biases, GROUP, 0)).astype(np.float16)
            plain[f"{expert}.{matrix}"] = torch.from_numpy(weight).float()
    return stored, plain


def fill(module: Any, plain: dict[str, Any]) -> bool:
    """Put the matrices into the module, whichever way round it has them; False if they do not fit."""
    import torch

    for expert in range(EXPERTS):
        both = torch.cat((plain[f"{expert}.gate"], plain[f"{expert}.up"]), 1)
        for name, matrix in (("gate_up_proj", both), ("down_proj", plain[f"{expert}.down"])):
            place = getattr(module, name)
            if len(place) < EXPERTS:
                return False
            fits = matrix if place[expert].shape == matrix.shape else matrix.t()
            if place[expert].shape != fits.shape:
                return False
            place.data[expert] = fits
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(generator=torch.Generator().manual_seed(1))
    return True


def plain_layer(x: Any, ids: Any, routed: Any, plain: dict[str, Any]) -> Any:
    """What the routes compute, in torch's FP32."""
    import torch

    out = torch.zeros_like(x)
    for token in range(len(x)):
        for slot in range(TOP_K):
            if int(ids[token, slot]) >= EXPERTS:  # one that hands on its input
                continue
            gate, up, down = (plain[f"{int(ids[token, slot])}.{matrix}"] for matrix in MATRICES)
            inner = torch.nn.functional.silu(x[token] @ gate) * (x[token] @ up)
            out[token] += routed[token, slot] * (inner @ down)
    return out


def judge(family: str, kind: type, folder: Path) -> Verdict:
    """One family: its module beside our layer, or beside a plain one where ours is refused."""
    import torch
    from safetensors.torch import save_file

    from sm70_moe import AdmissionService, Settings
    from sm70_moe.checkpoint.checkpoint import Checkpoint
    from sm70_moe.decision import obstacle_text
    from sm70_moe.reading.source import CheckpointSource

    made = build(kind, family)
    if made is None:
        return Verdict(family, "", "experts of another form", False, "no gate, up and down to compare", None)
    module, config = made
    stored, plain = weights(seed=len(family))
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    quantised = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP, "zero_point": True}
    text = json.loads(config.to_json_string(use_diff=False))
    (folder / "config.json").write_text(json.dumps({**text, "quantization_config": quantised}))
    checkpoint = Checkpoint.open(folder)
    facts = checkpoint.facts(checkpoint.layers[0], tensor_parallel=1, tensor_rank=0, device="cpu")
    facts = replace(facts, activations="float32", top_k=TOP_K)
    said = f"{facts.activation}, {facts.arithmetic}" if facts.arithmetic != "plain" else f"{facts.activation}"
    said += ", router weight on the input" if facts.router_weight_on_input else ""
    draw = torch.Generator().manual_seed(len(family))
    x = torch.randn(TOKENS, HIDDEN, generator=draw) * 4
    count = EXPERTS + bool(getattr(config, "zero_expert_num", 0))
    ids = torch.stack([torch.randperm(count, generator=draw)[:TOP_K] for _ in range(TOKENS)])
    routed = torch.rand(TOKENS, TOP_K, generator=draw) * 2 - 0.5
    with torch.no_grad(), AdmissionService(Settings()) as service:
        plan = service.admit(facts)
        theirs = None
        if fill(module, plain):
            try:
                theirs = module(x, ids, routed)
            except TypeError:  # another signature: not (hidden states, ids, weights)
                theirs = None
        if plan.supported:
            ours = service.layer(facts, CheckpointSource(checkpoint, checkpoint.layers[0], facts))(x, ids, routed)
        else:
            ours = plain_layer(x, ids, routed, plain)
    difference = None if theirs is None else float((ours - theirs).abs().max() / theirs.abs().max())
    stopped = "; ".join(f"{f.check} {obstacle_text(replace(f, hint=''))}" for f in plan.admission.last_resort.obstacles)
    return Verdict(family, str(text["model_type"]), said, plan.supported, stopped, difference)


def sweep(names: set[str] | None = None) -> list[Verdict]:
    """All families, or these; one verdict each, of its first module of experts."""
    found: dict[str, Verdict] = {}
    with tempfile.TemporaryDirectory() as place:
        for number, (family, kind) in enumerate(families(names)):
            one = judge(family, kind, Path(place) / str(number))
            if family not in found or (one.difference or 0) > (found[family].difference or 0):
                found[family] = one
    return list(found.values())


def table(records: list[dict[str, Any]]) -> str:
    """The page's table."""
    lines = ["| family | its experts compute | verdict |", "|---|---|---|"]
    for one in records:
        off = "" if one["difference"] is None else f"; a plain layer is off by {one['difference']:.2g}"
        verdict = "admitted, equal" if one["admitted"] else f"refused: {one['reason']}{off}"
        lines.append(f"| `{one['family']}` | {one['arithmetic']} | {verdict} |")
    return "\n".join(lines)


def page(text: str, records: list[dict[str, Any]]) -> str:
    """The page with this table between its marks."""
    before, _, rest = text.partition(MARKS[0])
    return f"{before}{MARKS[0]}\n{table(records)}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("families", nargs="*")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    verdicts = sweep(set(chosen.families) or None)
    for one in verdicts:
        print(one)
    wrong = [one for one in verdicts if one.admitted and (one.difference is None or not one.difference <= EQUAL)]
    if wrong:
        raise SystemExit(f"admitted and not equal, or not to be run: {wrong}")
    if chosen.write:
        records = [asdict(replace(one, difference=None if one.admitted else one.difference)) for one in verdicts]
        DATA.write_text(json.dumps(records, indent=1) + "\n")
        PAGE.write_text(page(PAGE.read_text(), records))


if __name__ == "__main__":
    main()
