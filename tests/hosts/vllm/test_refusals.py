"""What stops an engine's start: each with our text, where whoever started it sees it."""

from __future__ import annotations

import numpy as np
import pytest

from sm70_moe.errors import AdmissionRefused, BackendError, CheckpointError, SettingsError

GATE = "model.layers.1.mlp.experts.3.gate_proj"
DOWN = "model.layers.0.mlp.experts.7.down_proj"


def test_a_bad_flag_in_the_environment_stops_before_the_engine_is_made(engine, experts_only, tmp_path, monkeypatch):
    """vLLM asks about the checkpoint while it reads its arguments, in the process that the user started."""
    monkeypatch.setenv("SM70_MOE_QPN_M1", "true")
    with pytest.raises(SettingsError, match="SM70_MOE_QPN_M1='true'") as caught:
        engine(experts_only.write(tmp_path / "m"))
    assert "ModelConfig" in "".join(str(frame) for frame in caught.traceback)


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"flags": {"qpn_m1": True}}, "qpn_m1='true'"),
        ({"flags": {"qpn_m1": "on"}}, "qpn_m1='on'"),
        ({"flags": ["qpn_m1"]}, "sm70_moe.flags"),
        ({"jurnal": "x"}, "sm70_moe.jurnal"),
        ({"persistent_tokens": "-1"}, "persistent_tokens='-1'"),
        (["journal"], "sm70_moe is"),
    ],
)
def test_a_bad_additional_config_stops_the_start(engine, experts_only, tmp_path, table, told):
    """Every key and value of our table is read strictly, and named."""
    with pytest.raises(SettingsError, match=told):
        engine(experts_only.write(tmp_path / "m"), additional_config={"sm70_moe": table})


def test_a_required_route_stops_the_start_with_every_reason(engine, experts_only, tmp_path, monkeypatch):
    """A flag at 1 fails closed while the model is built, before any weight is read."""
    monkeypatch.setenv("SM70_MOE_QPN_M1", "1")
    with pytest.raises(AdmissionRefused, match=r"model\.layers\.0\.mlp\.experts") as caught:
        engine(experts_only.write(tmp_path / "m"))
    found = {decision.feature: decision for decision in caught.value.decisions}["qpn_m1"]
    assert len(found.obstacles) >= 3


def test_a_missing_tensor_is_named(engine, experts_only, tmp_path):
    """vLLM itself would go on with what memory held (R17)."""
    del experts_only.tensors[f"{GATE}.qweight"]
    with pytest.raises(CheckpointError, match=f"1 tensors did not come.*{GATE}.qweight"):
        engine(experts_only.write(tmp_path / "m"))


def test_a_missing_expert_is_named(engine, experts_only, tmp_path):
    """All nine tensors are counted, the first four named."""
    for name in [n for n in experts_only.tensors if ".layers.1.mlp.experts.15." in n]:
        del experts_only.tensors[name]
    with pytest.raises(CheckpointError, match=r"9 tensors .*experts\.15\.gate_proj\.qweight.* and 5 more"):
        engine(experts_only.write(tmp_path / "m"))


def test_short_scales_are_refused(engine, experts_only, tmp_path):
    """vLLM itself would copy them into the first rows and leave the others as they were."""
    experts_only.tensors[f"{DOWN}.scales"] = experts_only.tensors[f"{DOWN}.scales"][:3]
    with pytest.raises(CheckpointError, match=rf"{DOWN}.scales.*\[3, 256\].*\[4, 256\]"):
        engine(experts_only.write(tmp_path / "m"))


def test_a_wrong_dtype_is_refused(engine, experts_only, tmp_path):
    """FP32 scales would be rounded without a word."""
    experts_only.tensors[f"{DOWN}.scales"] = experts_only.tensors[f"{DOWN}.scales"].astype(np.float32)
    with pytest.raises(CheckpointError, match=rf"{DOWN}.scales.*float32"):
        engine(experts_only.write(tmp_path / "m"))


def test_a_single_plain_expert_is_refused(engine, experts_only, tmp_path):
    """One entry for one expert in the skip list: vLLM's own test lets it escape."""
    files = experts_only.decode("layers.1.mlp.experts.3.")
    files.config["quantization_config"]["modules_to_not_convert"] += [
        f"model.layers.1.mlp.experts.3.{name}" for name in ("gate_proj", "up_proj", "down_proj")
    ]
    with pytest.raises(AdmissionRefused, match=r"model\.layers\.1\.mlp\.experts: some experts are quantised"):
        engine(files.write(tmp_path / "m"))


def test_act_order_that_the_config_hides_is_refused(engine, gptq, tmp_path):
    """vLLM drops g_idx; ours are looked at."""
    files = gptq("gptq")
    files.tensors[f"{GATE}.g_idx"] = files.tensors[f"{GATE}.g_idx"][::-1]
    with pytest.raises(CheckpointError, match=f"{GATE}.g_idx: rows are permuted"):
        engine(files.write(tmp_path / "m"))


def test_gptq_zeros_of_the_other_convention_are_refused(engine, gptq, tmp_path):
    """A symmetric file written as version 2 and labelled as version 1 would be off by one everywhere."""
    files = gptq("gptq_v2")
    files.config["quantization_config"]["checkpoint_format"] = "gptq"
    with pytest.raises(CheckpointError, match="every zero is 9"):
        engine(files.write(tmp_path / "m"))


def test_stored_sizes_of_another_matrix_are_refused(engine, compressed, tmp_path):
    """`weight_shape` must be that of the other tensors."""
    files = compressed(True)
    files.tensors[f"{GATE}.weight_shape"] = np.array([256, 128])
    with pytest.raises(CheckpointError, match=rf"{GATE}.weight_shape: \[256, 128\]; accepted is \[128, 256\]"):
        engine(files.write(tmp_path / "m"))


def test_a_stale_second_file_is_refused(engine, experts_only, tmp_path):
    """vLLM reads every safetensors file of a folder, and the last one would win."""
    folder = experts_only.write(tmp_path / "m")
    (folder / "old.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="came twice"):
        engine(folder)


@pytest.mark.parametrize("method", ["fp8", "bitsandbytes"])
def test_other_quantisations_are_refused_by_name(engine, experts_only, tmp_path, method):
    """`--quantization sm70_awq` on a file that is neither of the three."""
    experts_only.config["quantization_config"] = {"quant_method": method}
    with pytest.raises(SettingsError, match=f"'{method}'; accepted: awq, compressed-tensors, gptq"):
        engine(experts_only.write(tmp_path / "m"))


def test_a_model_without_quantisation_is_refused_by_name(engine, experts_only, tmp_path):
    """vLLM itself would say that it cannot find the config file for sm70_awq."""
    files = experts_only.decode("")
    del files.config["quantization_config"]
    with pytest.raises(Exception, match="no quantization_config") as caught:
        engine(files.write(tmp_path / "m"))
    assert "leave --quantization out" in str(caught.value)


def test_quantised_linears_in_float32_are_refused_before_the_first_request(engine, tiny, tmp_path):
    """vLLM itself would start, and die at the first token."""
    with pytest.raises(BackendError, match=r"self_attn\..*float32.*--dtype float16"):
        engine(tiny.write(tmp_path / "m"))


def test_experts_that_are_spread_in_an_untried_way_are_refused():
    """Each way that was never tried is named with what is accepted."""
    from types import SimpleNamespace as Of

    from sm70_moe.engines.vllm.facts import require_known

    ranks = Of(dp_size=2, pcp_size=1, sp_size=1, use_ep=True)
    moe = Of(
        moe_parallel_config=ranks,
        num_experts=18,
        num_logical_experts=16,
        hidden_dim=256,
        hidden_dim_unpadded=256,
        tp_shard_with_padding=False,
    )
    placed = Of(placement_strategy="round_robin", num_fused_shared_experts=0)
    with pytest.raises(BackendError) as caught:
        require_known(Of(moe_config=moe, expert_map_manager=placed), "layer")
    assert str(caught.value) == (
        "layer: data_parallel_size is 2, accepted is 1; expert placement is 'round_robin', accepted is 'linear'; "
        "number of experts with replicas is 18, accepted is 16"
    )
