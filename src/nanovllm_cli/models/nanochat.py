"""NanoChat (Karpathy 2025): norms of squares without weights, of what was embedded too, and of each head of q and k as rope
leaves it, which turns the other way; MLPs without a gate, whose activation is squared; a cap on logits."""

from __future__ import annotations

from dataclasses import replace

from nanovllm_cli.model_spec import EntrySpec, ModelSpec
from nanovllm_cli.models.config_reader import ConfigReader
from nanovllm_cli.models.family import SQUARED, Family, no_file
from nanovllm_cli.models.rotary import normed_when_turned


def _from_hf(spec: ModelSpec, read: ConfigReader) -> ModelSpec:
    norm = replace(spec.norm, gains=False)
    spec = replace(spec, norm=norm, entry=EntrySpec(norm), logit_softcap=read.cap("final_logit_softcapping"))
    return normed_when_turned(spec, qk_gains=False).each_rope(lambda rope: replace(rope, backwards=True))


NANOCHAT = Family(
    "nanochat",
    qk_norm=True,
    ungated=SQUARED,
    config=lambda config: {**config, "mlp_bias": False},
    defaults={"hidden_act": "relu2", "final_logit_softcapping": 15.0},
    hf_names={
        "blocks.{i}.up.weight": "model.layers.{i}.mlp.fc1.weight",
        "blocks.{i}.down.weight": "model.layers.{i}.mlp.fc2.weight",
    },
    hf=_from_hf,
    gguf_like=no_file("NanoChat"),
)
