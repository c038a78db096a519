"""What cannot be read: a reason at admission, an error that names the tensor when it is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from sm70_moe import Settings, admit, probe
from sm70_moe.admission.checks.layer import look_at
from sm70_moe.checkpoint.checkpoint import Checkpoint
from sm70_moe.cli.app import app
from sm70_moe.decision import Reason, Status
from sm70_moe.errors import CheckpointError
from sm70_moe.facts import LayerFacts
from sm70_moe.policy import choose_policy, load_policies
from sm70_moe.reading.source import CheckpointSource

LAYER = "model.layers.0.mlp.experts"
Make = Callable[..., Any]


def facts_of(folder: Path) -> LayerFacts:
    checkpoint = Checkpoint.open(folder)
    return checkpoint.facts(checkpoint.layers[0], tensor_parallel=1, tensor_rank=0, device="cpu")


def refusal(folder: Path) -> str:
    """What stops the layer: opening it, checking it, or reading its experts."""
    with pytest.raises(CheckpointError) as caught:
        read_all(folder)
    return str(caught.value)


def read_all(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    source = CheckpointSource(checkpoint, checkpoint.layers[0], facts_of(folder))
    for expert in range(source.experts):
        source.read(expert, 32)


def compressed(**changes: Any) -> Callable[[dict[str, Any]], None]:
    """Changes the keys of the file's only scheme, or of the whole config."""

    def edit(config: dict[str, Any]) -> None:
        scheme = config["config_groups"]["group_0"]
        for key, value in changes.items():
            target = config if key in config else scheme if key in scheme else scheme["weights"]
            target[key] = value

    return edit


CASES: list[tuple[str, Callable[[dict[str, Any]], Any], Reason, str]] = [
    ("awq", lambda c: c.update(bits=8), Reason.BITS, "8"),
    ("awq", lambda c: c.update(version="gemv"), Reason.FORMAT, "awq (gemv)"),
    ("awq", lambda c: c.update(version="gemv_fast"), Reason.FORMAT, "awq (gemv_fast)"),
    ("awq", lambda c: c.update(version="marlin"), Reason.FORMAT, "awq (marlin)"),
    ("awq", lambda c: c.update(quant_method="fp8"), Reason.FORMAT, "fp8"),
    ("awq", lambda c: c.update(quant_method="mxfp4"), Reason.FORMAT, "mxfp4"),
    ("awq", lambda c: c.update(quant_method="bitsandbytes", bnb_4bit_quant_type="nf4"), Reason.FORMAT, "nf4"),
    ("awq", lambda c: c.update(quant_method="modelopt", quant_algo="NVFP4"), Reason.FORMAT, "NVFP4"),
    ("awq", lambda c: c.update(quant_method="gguf", bits="q4_k"), Reason.FORMAT, "gguf"),
    ("awq", lambda c: c.update(quant_method=None), Reason.FACT_UNKNOWN, ""),
    ("awq", lambda c: c.update(version=None), Reason.FACT_UNKNOWN, ""),
    ("awq", lambda c: c.update(bits=None), Reason.FACT_UNKNOWN, ""),
    ("compressed", compressed(num_bits=3), Reason.BITS, "3"),
    ("compressed", compressed(format="float-quantized"), Reason.FORMAT, "float-quantized"),
    ("compressed", compressed(format="nvfp4-pack-quantized"), Reason.FORMAT, "nvfp4-pack-quantized"),
    ("compressed", compressed(strategy="block"), Reason.FORMAT, "strategy block"),
    ("compressed", compressed(actorder="group"), Reason.FORMAT, "act-order"),
    ("compressed", compressed(input_activations={"num_bits": 8}), Reason.FORMAT, "quantised activations"),
    ("gptq-v1", lambda c: c.update(bits=3), Reason.BITS, "3"),
    ("gptq-v1", lambda c: c.update(checkpoint_format="marlin"), Reason.FORMAT, "gptq (marlin)"),
    ("gptq-v1", lambda c: c.update(checkpoint_format="gptq_p"), Reason.FORMAT, "gptq (gptq_p)"),
    ("gptq-v2", lambda c: c.update(pack_dtype="int16"), Reason.FORMAT, "int16 words"),
    ("gptq-v2", lambda c: c.update(dynamic={r"+:.*up_proj": {"group_size": 64}}), Reason.FORMAT, "mixed"),
    ("gptq-v2", lambda c: c.update(dynamic={r"-:.*experts\.0\..*": {}}), Reason.FORMAT, "mixed"),
]


@pytest.mark.parametrize(("form", "edit", "reason", "told"), CASES)
def test_what_cannot_be_read_is_a_reason_and_no_error(
    form: str, edit: Callable[[dict[str, Any]], Any], reason: Reason, told: str, tmp_path: Path, made: Make
) -> None:
    """Admission says it, the plan has no routes, and nothing is raised: an engine still starts."""
    layer = made(form, hidden=128, intermediate=128)
    edit(layer.config["quantization_config"])
    found = look_at(facts_of(layer.write(tmp_path)))
    obstacles = [finding for finding in found.base if finding.status is not Status.PASS]
    assert obstacles[0].reason is reason
    assert told in str(obstacles[0].observed)
    policies = load_policies(None)
    admission = admit(choose_policy(policies, found.facts), Settings.from_env({}), found.facts, probe(devices=()))
    assert not admission.supported
    assert not admission.refused
    refusal(tmp_path)


def test_eight_bits_keep_their_sizes(tmp_path: Path, made: Make) -> None:
    """Words of four values: the rows that they stand for are counted by the bits."""
    layer = made("compressed", hidden=128, intermediate=128)
    layer.config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 8
    for name in [name for name in layer.tensors if name.endswith("weight_packed")]:
        layer.tensors[name] = torch.cat((layer.tensors[name],) * 2, dim=1)
    facts = facts_of(layer.write(tmp_path))
    assert (facts.bits, facts.hidden, facts.intermediate) == (8, 128, 128)


def test_a_clamped_activation_is_another_one(tmp_path: Path, made: Make) -> None:
    """gpt-oss and others clamp gate and up; our routes do not, so such a layer is refused."""
    layer = made("awq")
    layer.config["swiglu_limit"] = 7.0
    found = look_at(facts_of(layer.write(tmp_path)))
    reasons = [finding.reason for finding in found.base if finding.status is Status.FAIL]
    assert reasons == [Reason.ACTIVATION]


def test_experts_without_a_gate_are_a_fact(tmp_path: Path, made: Make) -> None:
    """Nemotron's have up and down only."""
    layer = made("awq")
    layer.tensors = {name: tensor for name, tensor in layer.tensors.items() if "gate_proj" not in name}
    facts = facts_of(layer.write(tmp_path))
    assert (facts.gated, facts.hidden, facts.intermediate) == (False, 128, 96)
    assert "gate" in refusal(tmp_path)


def permute(layer: Any, expert: int) -> None:
    """Swap two rows' groups in one matrix."""
    index = layer.tensors[f"{LAYER}.{expert}.down_proj.g_idx"]
    index[[0, 40]] = index[[40, 0]]


def test_permuted_rows_are_refused_with_the_reason(tmp_path: Path, made: Make) -> None:
    """The first expert's row groups tell at once, whatever `desc_act` says."""
    layer = made("gptq-v1")
    permute(layer, 0)
    found = look_at(facts_of(layer.write(tmp_path)))
    assert found.base[0].reason is Reason.FORMAT
    assert "act-order" in str(found.base[0].observed)
    assert "desc_act" in found.base[0].hint
    assert "act-order" in Checkpoint.open(tmp_path).layers[0].notes[0]


def test_permuted_rows_of_a_later_expert_are_named_when_read(tmp_path: Path, made: Make) -> None:
    """Nothing is decoded with groups that are not its own."""
    layer = made("gptq-v2")
    permute(layer, 1)
    assert look_at(facts_of(layer.write(tmp_path))).readable
    assert f"{LAYER}.1.down_proj.g_idx" in refusal(tmp_path)


def test_plain_rows_are_accepted_although_act_order_is_declared(
    tmp_path: Path, made: Make, source: Callable[..., Any]
) -> None:
    """`desc_act` may be true in a file whose rows are in order: tensors are trusted."""
    layer = made("gptq-v1")
    layer.config["quantization_config"]["desc_act"] = True
    assert source(layer.write(tmp_path)).experts == 2


def test_act_order_without_row_groups_is_refused(tmp_path: Path, made: Make) -> None:
    """Which group a row belongs to is then unknown."""
    layer = made("gptq-v1")
    layer.config["quantization_config"]["desc_act"] = True
    layer.tensors = {name: tensor for name, tensor in layer.tensors.items() if not name.endswith("g_idx")}
    assert "act-order" in refusal(layer.write(tmp_path))


def test_row_groups_may_be_missing_altogether(tmp_path: Path, made: Make, source: Callable[..., Any]) -> None:
    """Files without `g_idx` have plain rows; with some of them only, one is missing."""
    layer = made("gptq-v2")
    some = {name: tensor for name, tensor in layer.tensors.items() if "0.up_proj.g_idx" not in name}
    none = {name: tensor for name, tensor in layer.tensors.items() if not name.endswith("g_idx")}
    layer.tensors = none
    assert source(layer.write(tmp_path / "none")).experts == 2
    layer.tensors = some
    assert f"{LAYER}.0.up_proj.g_idx" in refusal(layer.write(tmp_path / "some"))


@pytest.mark.parametrize(("form", "off", "symmetric", "told"), [
    ("gptq-v1", 8, True, "every zero is 9"),
    ("gptq-v2", 7, True, "every zero is 7"),
    ("gptq-v1", 8, False, ""),
])  # fmt: skip
def test_symmetric_zeros_of_the_other_convention(
    form: str, off: int, symmetric: bool, told: str, tmp_path: Path, made: Make, source: Callable[..., Any]
) -> None:
    """Stored 8 read as version 1 is 9, stored 7 read as version 2 is 7: no symmetric file has either."""
    layer = made(form)
    layer.config["quantization_config"]["sym"] = symmetric
    for name in [name for name in layer.tensors if name.endswith("qzeros")]:
        word = int(f"0x{off}{off}{off}{off}{off}{off}{off}{off}", 16)
        layer.tensors[name].fill_(word - 2**32 if word >= 2**31 else word)
    folder = layer.write(tmp_path)
    if told:
        assert told in refusal(folder)
    else:
        assert source(folder).read(0, 32).up.zeros.unique().tolist() == [9]


BROKEN: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor | None], list[str]]] = [
    ("compressed", "1.up_proj.weight_packed", lambda t: t.long(), ["I64", "I32 [96, 16]"]),
    ("compressed", "1.up_proj.weight_packed", lambda t: t.t(), ["[16, 96]", "[96, 16]"]),
    ("compressed", "0.down_proj.weight_scale", lambda t: t.float(), ["F32", "F16 [128, 3]"]),
    ("compressed", "0.down_proj.weight_scale", lambda t: t[:, :2], ["[128, 2]", "96 / 32 = 3"]),
    ("compressed", "1.down_proj.weight_zero_point", lambda t: t.t(), ["[3, 16]", "[16, 3]"]),
    ("compressed", "1.down_proj.weight_zero_point", lambda t: t.to(torch.int8), ["I8", "I32"]),
    ("compressed", "1.gate_proj.weight_zero_point", lambda t: None, ["missing"]),
    ("compressed", "1.gate_proj.weight_shape", lambda t: None, ["missing"]),
    ("compressed", "1.gate_proj.weight_shape", lambda t: t.float(), ["F32", "I64 [2]"]),
    ("compressed", "1.gate_proj.weight_shape", lambda t: t.flip(0), ["[128, 96]", "[96, 128]"]),
    ("compressed-symmetric", "0.up_proj.weight_packed", lambda t: None, ["missing"]),
    ("gptq-v1", "1.up_proj.qweight", lambda t: t.t(), ["[96, 16]", "[16, 96]"]),
    ("gptq-v1", "0.up_proj.qzeros", lambda t: t[:1], ["[1, 12]", "[4, 12]"]),
    ("gptq-v2", "1.down_proj.qzeros", lambda t: None, ["missing"]),
    ("gptq-v2", "0.gate_proj.scales", lambda t: t[:, :95], ["95"]),
    ("gptq-v2", "0.down_proj.g_idx", lambda t: t.float(), ["F32", "I32 [96]"]),
    ("gptq-v2", "1.down_proj.g_idx", lambda t: t[:90], ["[90]", "[96]"]),
]


@pytest.mark.parametrize(("form", "name", "change", "named"), BROKEN)
def test_a_broken_tensor_is_named(
    form: str,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor | None],
    named: list[str],
    tmp_path: Path,
    made: Make,
) -> None:
    """A wrong dtype, a wrong shape, a missing tensor, sizes that do not agree: with both forms."""
    layer = made(form)
    tensor = change(layer.tensors.pop(f"{LAYER}.{name}"))
    if tensor is not None:
        layer.tensors[f"{LAYER}.{name}"] = tensor
    told = refusal(layer.write(tmp_path))
    assert all(text in told for text in named)
    # N itself comes from the scales, and then it is the layer's size that does not agree
    assert f"{LAYER}.{name}" in told or "intermediate" in told


@pytest.mark.parametrize("scale", [1e6, 1e-8])
def test_bf16_scales_beyond_fp16_name_their_tensor(form: str, scale: float, tmp_path: Path, made: Make) -> None:
    """Too large or too small, in any format: the layer is not read with other weights than it has."""
    layer = made(form)
    for name in [name for name in layer.tensors if name.endswith(("scale", "scales"))]:
        layer.tensors[name] = layer.tensors[name].bfloat16()
    folder = layer.write(tmp_path / "good")
    assert any("BF16" in note for note in Checkpoint.open(folder).layers[0].notes)
    assert look_at(facts_of(folder)).readable
    broken = next(name for name in layer.tensors if "1.down_proj" in name and "scale" in name)
    layer.tensors[broken][0, 0] = scale
    told = refusal(layer.write(tmp_path / "bad"))
    assert f"tensor {broken}" in told
    assert "FP16" in told


def test_a_broken_file_is_named_by_each_command(tmp_path: Path, made: Make) -> None:
    """`explain` goes on and exits with 1, `verify` has nothing to run."""
    layer = made("compressed")
    del layer.tensors[f"{LAYER}.1.gate_proj.weight_shape"]
    folder = layer.write(tmp_path)
    told = CliRunner().invoke(app, ["explain", str(folder)])
    assert told.exit_code == 1
    assert "weight_shape" in told.stderr
    refused = CliRunner().invoke(app, ["verify", str(folder)]).exception
    assert isinstance(refused, CheckpointError)
    assert "weight_shape" in str(refused)


def test_explain_and_verify_on_every_format(form: str, tmp_path: Path, made: Make) -> None:
    """Every format has a route that runs it, inside its bound."""
    folder = made(form, hidden=128, intermediate=128, seed=9).write(tmp_path)
    told = CliRunner().invoke(app, ["explain", str(folder), "--json"])
    assert told.exit_code == 0
    assert json.loads(told.stdout)["groups"][0]["supported"] is True
    result = CliRunner().invoke(app, ["verify", str(folder), "--tp", "2", "--rank", "1", "--tokens", "2", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["ok"] is True
