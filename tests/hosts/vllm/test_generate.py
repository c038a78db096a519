"""Greedy tokens of vLLM with our experts against the dequantised model in float32."""

from __future__ import annotations

import json

import pytest


def test_awq_in_float16_generates_what_the_reference_does(
    engine, experts_only, tmp_path, reference, tokens, journal, capsys
):
    """AWQ experts in half precision, on any processor."""
    llm = engine(experts_only.write(tmp_path / "m"), dtype="float16")
    real, ties = reference.differences(tokens(llm), tie=0.02)
    with capsys.disabled():
        print(f"\nfloat16 against float32: {len(ties)} differences at ties {ties}")
    assert real == []
    decisions = {line["feature"]: line for line in journal()}
    assert decisions["legacy"]["outcome"] == "admitted"
    assert decisions["legacy"]["layers"] == "0-1"
    assert decisions["qpn_m1"]["outcome"] == "fell back"
    assert [line["text"].split(";")[0] for line in journal("moe summary")] == ["supported 2/2"]


def test_a_whole_awq_checkpoint(engine, tiny, tmp_path, reference, tokens, journal):
    """Its attention is 4-bit too, and the host's: vLLM has a kernel for that on processors with AVX-512 alone.

    Its error is then the host's own, at the first token; our layers are admitted all the same.
    """
    import torch

    llm = engine(tiny.write(tmp_path / "m"), dtype="float16")
    assert [line["text"].split(";")[0] for line in journal("moe summary")] == ["supported 2/2"]
    if hasattr(torch.ops._C, "cpu_gemm_wna16"):
        assert reference.differences(tokens(llm), tie=0.02)[0] == []
    else:
        with pytest.raises(AttributeError, match="has no attribute 'cpu_gemm_wna16'"):
            tokens(llm)


def test_experts_only_awq_equals_the_reference_in_float32(engine, experts_only, tmp_path, reference, tokens):
    """In float32 nothing but the order of sums may differ, so no token does."""
    llm = engine(experts_only.write(tmp_path / "m"))
    assert reference.differences(tokens(llm)) == ([], [])


def test_awq_runs_in_bfloat16(engine, experts_only, tmp_path, reference, tokens, capsys):
    """Too coarse to compare token by token; every prompt gets its tokens, and the first ones are right."""
    found = tokens(engine(experts_only.write(tmp_path / "m"), dtype="bfloat16"))
    with capsys.disabled():
        print(f"\nbfloat16 against float32: {reference.differences(found, tie=0.0)[0]}")
    assert [len(mine) for mine in found] == [12, 12, 12]
    assert real_first_differences(reference, found) == []


def real_first_differences(reference, found):
    pairs = zip(reference.tokens, found, reference.leads, strict=True)
    return [(a[0], b[0]) for a, b, lead in pairs if a[0] != b[0] and lead[0] > 0.2]


@pytest.mark.parametrize("zero_point", [True, False])
def test_compressed_tensors_equals_the_reference(engine, compressed, tmp_path, reference_of, tokens, zero_point):
    """pack-quantized files, asymmetric and symmetric, with only experts quantised."""
    files = compressed(zero_point)
    llm = engine(files.write(tmp_path / "m"))
    assert reference_of(zero_point).differences(tokens(llm)) == ([], [])


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq_equals_the_reference(engine, gptq, tmp_path, reference_of, tokens, version):
    """Symmetric GPTQ in both conventions for zeros; vLLM itself takes no asymmetric ones."""
    llm = engine(gptq(version).write(tmp_path / "m"))
    assert reference_of(False).differences(tokens(llm)) == ([], [])


def test_a_layer_without_quantisation_is_left_to_the_host(
    engine, experts_only, tmp_path, reference, tokens, journal, model
):
    """One layer's experts are plain: vLLM runs them, the journal says why, the tokens stay the same."""
    files = experts_only.decode("layers.1.mlp.experts")
    files.config["quantization_config"]["modules_to_not_convert"] += ["model.layers.1.mlp.experts"]
    llm = engine(files.write(tmp_path / "m"))
    assert reference.differences(tokens(llm)) == ([], [])
    left = [line for line in journal() if line["layers"] == "1" and line["feature"] == "legacy"]
    assert [line["outcome"] for line in left] == ["not ours"]
    assert "none" in json.dumps(left[0]["findings"])


def test_skip_lists_reach_single_experts(engine, experts_only, tmp_path, tokens, reference):
    """vLLM looks for its prefix in each entry, or the other way round; entries for every expert mean the layer."""
    files = experts_only.decode("layers.1.mlp.experts")
    names = [n for n in files.tensors if "layers.1.mlp.experts" in n]
    files.config["quantization_config"]["modules_to_not_convert"] += [n.removesuffix(".weight") for n in names]
    llm = engine(files.write(tmp_path / "m"))
    assert reference.differences(tokens(llm)) == ([], [])


def test_sources_are_released(engine, experts_only, tmp_path, model):
    """After loading, the words that came from the files are gone; only the banks hold weights."""
    llm = engine(experts_only.write(tmp_path / "m"))
    left = [name for name, _ in model(llm).named_parameters() if ".experts." in name]
    assert left == []


def test_dummy_weights_need_no_files(engine, experts_only, tmp_path, tokens):
    """`load_format=dummy` brings no tensors, and completeness does not ask for them."""
    found = tokens(engine(experts_only.write(tmp_path / "m"), load_format="dummy"))
    assert [len(mine) for mine in found] == [12, 12, 12]


def test_settings_come_through_additional_config(engine, experts_only, tmp_path, journal):
    """A flag in our table counts as an argument, and the journal says so."""
    engine(experts_only.write(tmp_path / "m"), additional_config={"sm70_moe": {"flags": {"legacy_single_token": 0}}})
    found = {line["feature"]: line for line in journal()}["legacy_single_token"]
    assert (found["outcome"], found["flag_source"]) == ("off", "argument")


def test_plans_are_part_of_the_host_s_config_hash(engine, experts_only, tmp_path, monkeypatch):
    """A flag of the environment changes the key of the compile cache, since graphs hold plan digests."""

    def digest() -> str:
        llm = engine(experts_only.write(tmp_path / "m"))
        return llm.llm_engine.vllm_config.compute_hash()

    first, same = digest(), digest()
    monkeypatch.setenv("SM70_MOE_LEGACY_SINGLE_TOKEN", "0")
    assert first == same
    assert digest() != first


def test_what_the_ranks_fall_back_to_is_what_runs(
    engine, experts_only, tmp_path, reference, tokens, model, monkeypatch
):
    """Where other ranks lack a route, the agreed plan replaces the service's own before banks are made."""
    from sm70_moe.engines.vllm import engine as module
    from sm70_moe.plan.agreement import Lack, without

    monkeypatch.setattr(module, "rank_group", lambda: "a group")
    monkeypatch.setattr(
        "sm70_moe.runtime.service.agree",
        lambda plans, group, *, seconds: tuple(without(p, [Lack(1, p.layer, "legacy_single_token")]) for p in plans),
    )
    llm = engine(experts_only.write(tmp_path / "m"))
    methods = [m.quant_method for m in model(llm).modules() if type(m).__name__ == "RoutedExperts"]
    assert [[route.name for route in m.experts.plan.routes] for m in methods] == [["legacy"], ["legacy"]]
    assert [m.digest == m.experts.plan.digest != m.plan.digest for m in methods] == [True, True]
    assert reference.differences(tokens(llm)) == ([], [])
