"""What a family takes a config's missing keys for is what transformers does."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, GptOssConfig, Lfm3Config, ModernBertConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from nanovllm_cli.errors import CheckpointError
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.ears import EARS
from nanovllm_cli.models.families import spec_from_hf, text_config
from nanovllm_cli.models.registry import HF_ARCHITECTURES, hf_family, may_be_tied
from nanovllm_cli.models.towers import TOWERS

OTHER_NAMES = {
    "hidden_act": "activation_function", "layer_norm_eps": "layer_norm_epsilon", "rope_scaling": "rope_parameters",
}  # fmt: skip
OUR_OWN = {  # by architecture: what transformers has no key for, or another default, which no published config leaves out
    "AfmoeForCausalLM": {"route_norm"},
    "BloomForCausalLM": {"attention_bias", "mlp_bias", "hidden_act", "max_position_embeddings"},  # nothing bounds the last
    "DeepseekOcr2ForConditionalGeneration": {"norm_topk_prob"},
    "Dots1ForCausalLM": {"n_shared_experts"},
    "FalconForCausalLM": {"hidden_act"},  # by another name of the same
    "GemmaForCausalLM": {"hidden_act"},  # as its configs have it, who meant tanh's
    "Glm4MoeLiteForCausalLM": {"first_k_dense_replace"},
    "GPT2LMHeadModel": {"attention_bias", "mlp_bias"},
    "GPTBigCodeForCausalLM": {"attention_bias", "mlp_bias", "hidden_act"},  # by another name of the same
    "GPTJForCausalLM": {"mlp_bias"},
    "GPTNeoForCausalLM": {"mlp_bias"},
    "GPTNeoXForCausalLM": {"mlp_bias"},
    "HunYuanMoEV1ForCausalLM": {"num_shared_expert"},
    "KimiLinearForCausalLM": {"first_k_dense_replace"},  # which its kinds of layers follow from
    "LaraMiniForCausalLM": {"intermediate_size"},
    "LightOnOcrForConditionalGeneration": {"max_position_embeddings"},  # of a config without a part for texts
    "FalconMambaForCausalLM": {"max_position_embeddings"},  # which nothing bounds
    "MambaForCausalLM": {"max_position_embeddings"},
    "Mamba2ForCausalLM": {"max_position_embeddings"},
    "Mistral3ForConditionalGeneration": {"sliding_window"},  # a text_config's, not that of none
    "Mistral4ForCausalLM": {"head_dim"},  # the turned part
    "MptForCausalLM": {"hidden_act", "max_position_embeddings"},  # the last by another name of the same
    "NemotronForCausalLM": {"layer_norm_eps"},  # by another name of the same
    "OPTForCausalLM": {"mlp_bias"},
    "PaliGemmaForConditionalGeneration": {"hidden_act"},  # as a Gemma's
    "Qwen3_5MoeForCausalLM": {"intermediate_size"},
    "Qwen3_5MoeForConditionalGeneration": {"intermediate_size"},
    "Qwen4ExpForCausalLM": {"intermediate_size"},
    "Qwen4ExpForConditionalGeneration": {"intermediate_size"},
    "SolarOpenForCausalLM": {"intermediate_size"},
}  # fmt: skip
MODEL_TYPES: dict[str, str] = {}  # the first of several that share a class
for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
    for model_type, names in mapping.items():
        for each in [names] if isinstance(names, str) else names:
            MODEL_TYPES.setdefault(each, model_type)
KNOWN = [
    name for name, family in HF_ARCHITECTURES.items()
    if name in MODEL_TYPES and family.defaults and not family.assists  # which have none that are valid in transformers
]  # fmt: skip


def found(config: Any, key: str) -> Iterator[Any]:
    """What a config of transformers has by that name, or one that means the same."""
    values = config.to_dict()
    rope = values.get("rope_parameters") or {}
    for name in (config.attribute_map.get(key, key), key, OTHER_NAMES.get(key, key)):
        for place in (values, rope, rope.get("full_attention") or {}):
            if name in place:
                yield place[name]
    if hasattr(config, key):
        yield getattr(config, key)


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, Mapping):  # theirs has what is left out as well
        kinds = {"type": "rope_type"}
        return isinstance(theirs, Mapping) and all(same(value, theirs.get(kinds.get(key, key))) for key, value in ours.items())
    if isinstance(theirs, list) and not isinstance(ours, list):
        return all(each == ours for each in theirs)
    return bool(theirs == ours or theirs == pytest.approx(ours))


@pytest.mark.parametrize("architecture", KNOWN)
def test_defaults_are_those_of_transformers(architecture: str) -> None:
    config = CONFIG_MAPPING[MODEL_TYPES[architecture]]()
    config = getattr(config, "text_config", None) or config
    config.allow_global_per_layer_attribute_access = True
    own = {*OUR_OWN.get(architecture, ())}
    family = HF_ARCHITECTURES[architecture]
    own |= set() if family.window_switch is None else {"sliding_window"}  # None unless it is switched on
    for key, value in family.defaults.items():
        theirs = list(found(config, key))
        assert (key in own) or any(same(value, each) for each in theirs), (key, value, theirs)


NO_SPEC = {  # whose defaults alone are no model, or of no model that is published
    "DeepseekOcr2ForConditionalGeneration", "Glm4vMoeForConditionalGeneration", "LightOnOcrForConditionalGeneration",
    "Mistral3ForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration",
}  # fmt: skip
OF_ANOTHER_PART = {  # the whole's has another default
    f"{each}ForConditionalGeneration": {"tie_word_embeddings"} for each in ("CohereCompass", "Qwen3VLMoe", "Qwen2_5OmniThinker")
}


@pytest.mark.parametrize("architecture", [each for each in KNOWN if "Conditional" in each and each not in NO_SPEC])
def test_a_key_that_is_left_out_changes_nothing(architecture: str) -> None:
    """Of a config that has only defaults: either it is missed, or the model is the same. Of models that do nothing but write
    `test_models.py` has it."""
    config = CONFIG_MAPPING[MODEL_TYPES[architecture]]()
    whole = (getattr(config, "text_config", None) or config).to_dict() | {"architectures": [architecture]}
    family = HF_ARCHITECTURES[architecture]
    expected = spec_from_hf(whole, family)
    for key in whole.keys() - {"architectures"} - OF_ANOTHER_PART.get(architecture, set()):
        with suppress(CheckpointError):  # it says what is missing
            assert spec_from_hf({name: value for name, value in whole.items() if name != key}, family) == expected, key


TOWER_TYPES = MODEL_TYPES | {
    "Qwen2AudioForConditionalGeneration": "qwen2_audio", "Qwen3ASRForConditionalGeneration": "qwen3_asr",
    "VoxtralForConditionalGeneration": "voxtral", "LightOnOCRForConditionalGeneration": "lighton_ocr",
    "KimiK25ForConditionalGeneration": "kimi_k25",
    "StepVLForConditionalGeneration": "qwen3_vl",  # another that has a Qwen 3 in it
    **dict.fromkeys(("Qwen2_5OmniForConditionalGeneration", "Qwen2_5OmniModel"), "qwen2_5_omni_thinker"),
    "Qwen3OmniMoeForConditionalGeneration": "qwen3_omni_moe_thinker",
    "AudioFlamingo3ForConditionalGeneration": "audioflamingo3", "MusicFlamingoForConditionalGeneration": "musicflamingo",
    "GlmAsrForConditionalGeneration": "glmasr", "GraniteSpeechForConditionalGeneration": "granite_speech",
    "GraniteSpeechPlusForConditionalGeneration": "granite_speech_plus",
}  # fmt: skip
FITTING: dict[str, tuple[str, dict[str, Any]]] = {  # parts of defaults that do not go together
    "AyaVision": ("vision_config", {"num_attention_heads": 16, "image_size": 364}),
    "DeepseekOcr2": ("vision_config", {"encoder_config": {"hidden_size": 896, "num_attention_heads": 14}}),
    "Exaone4_5": ("text_config", {"hidden_size": 3584}),
    "Qwen3ASR": ("text_config", {"hidden_size": 3584}),
    "GlmOcr": ("text_config", {"hidden_size": 1536}),
    "Gemma3": ("vision_config", {"image_size": 896, "patch_size": 14}),
    "Idefics3": ("vision_config", {"image_size": 256}),
    "LightOn": ("vision_config", {"hidden_act": "gelu"}),  # of a part that does not say it, and not of one that is not there
    "SmolVLM": ("vision_config", {"image_size": 256}),
    "Molmo2": ("text_config", {"hidden_size": 3584}),
    "Ovis2": ("text_config", {"hidden_size": 1536}),
    "Qwen2Audio": ("audio_config", {}),
    "CohereCompass": ("text_config", {"hidden_size": 3584}),
    "GraniteSpeech": ("projector_config", {"encoder_hidden_size": 1024, "cross_attention_frequency": 1}),
    "Janus": ("text_config", {"hidden_size": 2048}),
    "Llama4": ("vision_config", {"intermediate_size": 3072, "vision_output_dim": 4096}),
    "Qwen": ("text_config", {"hidden_size": 3584}),
}


OTHER_TOWERS = {
    "DeepseekOCRForCausalLM", "DeepseekOCR2ForCausalLM", "InternVLChatModel",  # transformers lacks them
    "Ernie4_5_VL_MoeForConditionalGeneration", "Ernie4_5_VLMoEForCausalLM",  # test_tower_ernie.py has them
    "DotsOCRForCausalLM", "DotsOCRForConditionalGeneration", "KimiVLForConditionalGeneration",
    "LlavaForConditionalGeneration", "Granite4VisionForConditionalGeneration",  # they see by a CLIP there
    "MiniCPMV4_7ForConditionalGeneration",  # has no markers there
    "FastVlmForConditionalGeneration",  # without its arguments it is a tower that is refused
    "PerceptionLMForConditionalGeneration",  # the same
    "WhisperForConditionalGeneration",  # is one with its decoder: test_whisper.py
    "MoonshineForConditionalGeneration",  # the same: test_moonshine.py
}  # fmt: skip


@pytest.mark.parametrize("architecture", [each for each in (*TOWERS, *EARS) if each not in OTHER_TOWERS])
def test_nor_does_it_change_a_tower(architecture: str) -> None:
    whole = CONFIG_MAPPING[TOWER_TYPES[architecture]]().to_dict() | {"architectures": [architecture]}
    if "has_lora_adapter" in whole:
        whole["has_lora_adapter"] = False  # with which it is refused
    part, fitting = next((each for name, each in FITTING.items() if architecture.startswith(name)), ("text_config", {}))
    whole[part] = whole[part] | fitting
    family: Any = {**TOWERS, **EARS}[architecture]

    def spec(config: dict[str, Any]) -> Any:
        return family.read(ConfigReader(config, "config.json"), ConfigReader({}, "preprocessor_config.json"))

    expected = spec(whole)
    for part in {"vision_config", "audio_config"} & whole.keys():
        for key in (whole[part] or {}).keys() - fitting.keys():
            with suppress(CheckpointError):
                less = {name: value for name, value in whole[part].items() if name != key}
                assert spec(whole | {part: less}) == expected, key


IN_ONE_PIECE = {
    "YoutuVLForConditionalGeneration",  # whose config says all of the whole, as those of the next two
    "WhisperForConditionalGeneration", "MoonshineForConditionalGeneration",
    *(f"{kind}ForConditionalGeneration" for kind in ("T5", "MT5", "UMT5")),
    *(f"{kind}ForConditionalGeneration" for kind in ("Bart", "MBart", "M2M100", "Pegasus", "Blenderbot")),
    "KimiVLForConditionalGeneration", "Ernie4_5_VL_MoeForConditionalGeneration",  # names that transformers lacks
}  # fmt: skip


@pytest.mark.parametrize("architecture", [
    name for name in HF_ARCHITECTURES if name.endswith("ForConditionalGeneration") and name not in IN_ONE_PIECE
])  # fmt: skip
def test_a_head_is_the_embedding_where_transformers_has_it_so(architecture: str) -> None:
    """Of models of several parts: by what the whole says, and its part for texts. Where transformers would draw a head at random,
    as the whole says nothing and the part says yes, it may be tied here."""
    kind, family = CONFIG_MAPPING[TOWER_TYPES[architecture]], HF_ARCHITECTURES[architecture]
    part = kind().get_text_config().to_dict()
    for whole_says, part_says in itertools.product((None, True, False), repeat=2):
        texts = {key: value for key, value in part.items() if key != "tie_word_embeddings"}
        texts |= {} if part_says is None else {"tie_word_embeddings": part_says}
        given = {"text_config": texts} | ({} if whole_says is None else {"tie_word_embeddings": whole_says})
        theirs = getattr(kind.from_dict(copy.deepcopy(given)), "tie_word_embeddings", False)
        ours = text_config(given).get("tie_word_embeddings", family.tied_by_default)
        ours = ours or may_be_tied(given | {"architectures": [architecture]})
        unsaid_in_part = whole_says is False and part_says is None  # what transformers takes for granted there overrules it
        assert ours is bool(theirs) or (ours and part_says) or unsaid_in_part, (whole_says, part_says)


@pytest.mark.parametrize("name", ["bert", "distilbert", "eurobert", "modernbert", "mpnet", "nomic_bert", "roberta"])
def test_nor_does_it_change_an_encoder(name: str) -> None:
    written = CONFIG_MAPPING[name]()
    architecture = f"{type(written).__name__.removesuffix('Config')}Model"
    whole = written.to_dict() | {"architectures": [architecture]}
    family = hf_family(whole)
    expected = spec_from_hf(whole, family)
    for key in whole.keys() - {"architectures"}:
        with suppress(CheckpointError):
            assert spec_from_hf({name: value for name, value in whole.items() if name != key}, family) == expected, key


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "ModernBertModel"])
def test_a_ropes_section_that_says_no_base_has_that_of_its_layers(architecture: str, kind: str) -> None:
    config = {"Gemma3ForCausalLM": Gemma3TextConfig, "ModernBertModel": ModernBertConfig}[architecture]
    whole = config().to_dict() | {"architectures": [architecture]}
    family = hf_family(whole)
    ropes = copy.deepcopy(whole["rope_parameters"])
    assert config(rope_parameters=copy.deepcopy(ropes) | {kind: {"rope_type": "default"}}).rope_parameters == ropes
    ropes[kind].pop("rope_theta")
    assert spec_from_hf(whole | {"rope_parameters": ropes}, family) == spec_from_hf(whole, family)


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_sections_of_an_lfm3_that_say_no_base_have_its_usual_one(kind: str) -> None:
    whole = Lfm3Config().to_dict() | {"architectures": ["Lfm3ForCausalLM"]}
    ropes = copy.deepcopy(whole["rope_parameters"])
    ropes[kind].pop("rope_theta")
    filled = Lfm3Config(rope_parameters=copy.deepcopy(ropes)).rope_parameters
    family = hf_family(whole)
    assert spec_from_hf(whole | {"rope_parameters": ropes}, family) == spec_from_hf(whole | {"rope_parameters": filled}, family)


def test_a_range_that_is_said_to_be_null_is_not_rounded() -> None:
    """transformers takes null for false there, and true where nothing is said."""
    whole = GptOssConfig().to_dict() | {"architectures": ["GptOssForCausalLM"]}
    ropes, family = whole["rope_parameters"], hf_family(whole)
    none, null = ({**ropes, "truncate": said} for said in (False, None))
    of_transformers = [ROPE_INIT_FUNCTIONS["yarn"](GptOssConfig(rope_parameters=dict(each)), "cpu")[0] for each in (none, null)]
    assert torch.equal(*of_transformers)
    assert spec_from_hf(whole | {"rope_parameters": null}, family) == spec_from_hf(whole | {"rope_parameters": none}, family)


def test_there_are_many() -> None:
    assert len(KNOWN) > 70
