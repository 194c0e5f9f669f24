"""GGUF's mixes of types: what llama.cpp says when it loads published files, and which layers its rules name for 32 of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from nanovllm_cli.mlp_spec import MLPSpec, MoESpec
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.families import LLAMA, spec_from_hf
from nanovllm_cli.quantization.mixes import file_type, type_of

PARTS = ("q", "k", "v", "o", "gate", "up", "down")


def spec_of(kv_heads: int = 8, tied: bool = False, layers: int = 32) -> ModelSpec:
    """Mistral 7B's shape; with 32 kv heads, Llama 2 7B's."""
    sizes = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 32, "num_key_value_heads": kv_heads, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    return spec_from_hf(sizes | heads | {"rope_theta": 10000.0, "tie_word_embeddings": tied}, LLAMA)


def with_experts(spec: ModelSpec, count: int) -> ModelSpec:
    return spec.each_mlp(lambda mlp: MoESpec(count, 2, MLPSpec(14336), norm_topk=True))


def types_of(mix: str, spec: ModelSpec, width: int = 4096) -> dict[str, str | None]:
    names = ["embedding.weight", *(f"blocks.{i}.{part}.weight" for i in range(spec.num_layers) for part in PARTS), "head.weight"]
    return {name: type_of(mix, name, width, spec) for name in names}


@pytest.mark.parametrize(
    ("mix", "kv_heads", "counts"),
    [
        ("q2_k_m", 8, {"Q2_K": 129, "Q3_K": 64, "Q4_K": 32, "Q6_K": 1}),
        ("q2_k_m", 32, {"Q2_K": 129, "Q3_K": 96, "Q6_K": 1}),
        ("q3_k_s", 8, {"Q3_K": 225, "Q6_K": 1}),
        ("q3_k_m", 8, {"Q3_K": 129, "Q4_K": 92, "Q5_K": 4, "Q6_K": 1}),
        ("q3_k_l", 8, {"Q3_K": 129, "Q5_K": 96, "Q6_K": 1}),
        ("q4_k_s", 8, {"Q4_K": 217, "Q5_K": 8, "Q6_K": 1}),
        ("q4_k_m", 8, {"Q4_K": 193, "Q6_K": 33}),
        ("q5_k_s", 8, {"Q5_K": 225, "Q6_K": 1}),
        ("q5_k_m", 8, {"Q5_K": 193, "Q6_K": 33}),
        ("q6_k", 8, {"Q6_K": 226}),
        ("q4_0", 8, {"Q4_0": 225, "Q6_K": 1}),
        ("q8_0", 8, {"Q8_0": 226}),
    ],
)
def test_a_file_has_as_many_tensors_of_each_type_as_llama_cpps(mix: str, kv_heads: int, counts: dict[str, int]) -> None:
    assert Counter(types_of(mix, spec_of(kv_heads)).values()) == counts


@pytest.mark.parametrize(
    ("mix", "part", "kind", "layers"),
    [
        ("q4_k_m", "v", "Q6_K", [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]),
        ("q4_k_m", "down", "Q6_K", [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]),
        ("q4_k_s", "v", "Q5_K", [0, 1, 2, 3]),
        ("q4_k_s", "down", "Q5_K", [0, 1, 2, 3]),
        ("q3_k_m", "v", "Q5_K", [0, 1]),
        ("q3_k_m", "down", "Q5_K", [0, 1]),
        ("q3_k_m", "o", "Q4_K", list(range(32))),
        ("q2_k_m", "v", "Q4_K", list(range(32))),
    ],
)
def test_the_layers_with_more_bits_are_those_of_llama_cpps_rules(mix: str, part: str, kind: str, layers: list[int]) -> None:
    found = types_of(mix, spec_of())
    assert [i for i in range(32) if found[f"blocks.{i}.{part}.weight"] == kind] == layers


@pytest.mark.parametrize("mix", ["q2_k_m", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_m", "q6_k"])
def test_what_values_share_with_queries_and_keys_has_the_bits_of_values(mix: str) -> None:
    for i in range(32):
        kinds = {type_of(mix, f"blocks.{i}.{part}.weight", 4096, spec_of()) for part in ("v", "qkv", "delta_qkv")}
        assert len(kinds) == 1


@pytest.mark.parametrize(
    ("mix", "k", "v", "o", "counts"),
    [
        ("q4_k_m", "Q8_0", "Q8_0", "Q5_K", {"Q4_K": 113, "Q6_K": 17, "Q5_K": 32, "Q8_0": 64}),
        ("q5_k_m", "Q8_0", "Q8_0", "Q5_K", {"Q5_K": 145, "Q6_K": 17, "Q8_0": 64}),
        ("q3_k_m", "Q8_0", "Q8_0", "Q5_K", {"Q3_K": 97, "Q4_K": 30, "Q5_K": 34, "Q6_K": 1, "Q8_0": 64}),
        ("q3_k_l", "Q8_0", "Q8_0", "Q3_K", {"Q3_K": 129, "Q5_K": 32, "Q6_K": 1, "Q8_0": 64}),
        ("q6_k", "Q8_0", "Q8_0", "Q6_K", {"Q6_K": 162, "Q8_0": 64}),
        ("q4_k", "Q4_K", "Q4_K", "Q4_K", {"Q4_K": 225, "Q6_K": 1}),
    ],
)
def test_with_eight_experts_attention_has_more_bits(mix: str, k: str, v: str, o: str, counts: dict[str, int]) -> None:
    """As published Mixtrals have it: 32 layers, whose experts are three tensors each."""
    found = types_of(mix, with_experts(spec_of(), 8))
    assert [found[f"blocks.5.{part}.weight"] for part in "kvo"] == [k, v, o]
    assert Counter(found.values()) == counts


@pytest.mark.parametrize(
    ("mix", "o", "down"),
    [
        ("q2_k_m", {"Q2_K": 32}, {"Q3_K": 32}),
        ("q3_k_s", {"Q3_K": 32}, {"Q3_K": 32}),
        ("q3_k_m", {"Q3_K": 32}, {"Q3_K": 16, "Q4_K": 14, "Q5_K": 2}),
        ("q3_k_l", {"Q4_K": 32}, {"Q4_K": 32}),
        ("q4_k_s", {"Q4_K": 32}, {"Q4_K": 32}),
        ("q4_k_m", {"Q4_K": 32}, {"Q4_K": 16, "Q5_K": 14, "Q6_K": 2}),
        ("q5_k_m", {"Q5_K": 32}, {"Q5_K": 16, "Q6_K": 16}),
    ],
)
def test_a_falcon_has_the_types_of_llama_cpps_rules_for_falcons(mix: str, o: dict[str, int], down: dict[str, int]) -> None:
    """As its llama_model_quantize gives them to a Falcon of 32 layers."""
    found = types_of(mix, replace(spec_of(tied=True), architecture="falcon"))
    assert Counter(found[f"blocks.{i}.o.weight"] for i in range(32)) == o
    assert Counter(found[f"blocks.{i}.down.weight"] for i in range(32)) == down
    assert found["embedding.weight"] == "Q8_0"


def test_experts_and_what_is_beside_them_are_as_an_mlp_of_their_layer() -> None:
    for count in (4, 128):
        spec = with_experts(spec_of(), count)
        assert types_of("q4_k_m", spec) == types_of("q4_k_m", spec_of())
        for place in ("experts.3", "shared"):
            kinds = [type_of("q4_k_m", f"blocks.{i}.{place}.down.weight", 4096, spec) for i in range(32)]
            assert kinds == [type_of("q4_k_m", f"blocks.{i}.down.weight", 4096, spec_of()) for i in range(32)]


def test_in_many_layers_the_first_and_last_eighth_and_every_third_between_have_more_bits() -> None:
    found = types_of("q4_k_m", spec_of(layers=80))
    layers = [i for i in range(80) if found[f"blocks.{i}.down.weight"] == "Q6_K"]
    assert layers == [*range(10), *range(12, 70, 3), *range(70, 80)]


def test_an_embedding_that_is_the_head_has_the_heads_type() -> None:
    tied, apart = (types_of("q4_k_s", spec_of(tied=tied))["embedding.weight"] for tied in (True, False))
    assert (tied, apart) == ("Q6_K", "Q4_K")


@pytest.mark.parametrize(
    ("mix", "width", "head", "other"),
    [("q4_k_s", 288, "Q8_0", "Q5_0"), ("q5_k_s", 288, "Q8_0", "Q5_1"), ("q6_k", 288, "Q8_0", "Q8_0"),
     ("q4_0", 288, "Q8_0", "Q4_0"), ("q8_0", 288, "Q8_0", "Q8_0"), ("q4_k_s", 272, None, None)],
)  # fmt: skip
def test_rows_that_blocks_of_256_do_not_divide_have_a_type_of_32(
    mix: str, width: int, head: str | None, other: str | None
) -> None:
    found = types_of(mix, spec_of(), width)
    assert (found["head.weight"], found["blocks.9.q.weight"]) == (head, other)


@pytest.mark.parametrize(
    ("mix", "number"),
    [("q4_0", 2), ("q4_1", 3), ("q8_0", 7), ("q5_0", 8), ("q5_1", 9), ("q2_k_m", 10), ("q3_k_s", 11), ("q3_k_m", 12),
     ("q3_k_l", 13), ("q3_k", 12), ("q4_k_s", 14), ("q4_k_m", 15), ("q4_k", 15), ("q5_k_s", 16), ("q5_k_m", 17), ("q5_k", 17),
     ("q6_k", 18)],
)  # fmt: skip
def test_a_file_says_its_mix_by_llama_h_numbers(mix: str, number: int) -> None:
    assert file_type(mix) == number
