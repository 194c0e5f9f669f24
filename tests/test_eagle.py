"""Guesses by EAGLE-3: the same tokens and log-probabilities to the bit, and the very guesses that its report's formula makes of
what transformers' layers read (Li et al. 2025, section 3.1; norms as vLLM and llama.cpp have them)."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRotaryEmbedding, apply_rotary_pos_emb

from engines import random_model, run, save
from nanovllm_cli.engine.eagle import EagleDraft
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.files import choose
from nanovllm_cli.weights.loader import read_spec
from nanovllm_cli.weights.quantized import open_reader
from test_lookup import ASKED, PROMPT, answers, engine_with
from test_models import CASES
from test_mtp import DRAWN, FEW, every_guess

Tensors = dict[str, torch.Tensor]
OWN = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 500.0, "hidden_act": "silu", "rope_scaling": None, "target_hidden_size": 48,
}  # fmt: skip
"""Narrower than the model; `max_position_embeddings` is of its training alone."""


class Saved(NamedTuple):
    model: Any
    folder: Path
    draft: Path
    config: dict[str, Any]
    tensors: Tensors
    kept: list[int]


def pair(folder: Path, kind: str = "llama", vocab_size: int = FEW, guessed: int | None = 4, seed: int = 0,
         dtype: torch.dtype = torch.float32, **said: Any) -> Saved:  # fmt: skip
    """A model of random weights, and a drafter of some of its tokens, with an embedding of its own where it is narrower."""
    config = copy.deepcopy(CASES[kind])
    config.vocab_size = vocab_size
    config.num_hidden_layers = 5
    if getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * 5)[:5]
    model = random_model(config, seed, dtype)
    own = OWN | {"vocab_size": vocab_size, "target_hidden_size": config.hidden_size, "draft_vocab_size": guessed} | said
    r = torch.Generator().manual_seed(seed + 1)
    width, theirs, heads = own["hidden_size"], config.hidden_size, own["head_dim"]
    places = own.get("eagle_aux_hidden_state_layer_ids") or [2, 2, 2]
    count = guessed or vocab_size

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=r) * columns**-0.5 * 1.5

    def gains(size: int) -> torch.Tensor:
        return 0.5 + torch.rand(size, generator=r)

    layer = {"q": own["num_attention_heads"], "k": own["num_key_value_heads"], "v": own["num_key_value_heads"]}
    tensors = {f"midlayer.self_attn.{part}_proj.weight": matrix(n * heads, 2 * width) for part, n in layer.items()}
    tensors |= {
        "midlayer.self_attn.o_proj.weight": matrix(width, own["num_attention_heads"] * heads),
        **{f"midlayer.mlp.{part}_proj.weight": matrix(own["intermediate_size"], width) for part in ("gate", "up")},
        "midlayer.mlp.down_proj.weight": matrix(width, own["intermediate_size"]),
        **{f"midlayer.{norm}.weight": gains(width) for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
        "norm.weight": gains(width), "lm_head.weight": matrix(count, width), "fc.weight": matrix(width, len(places) * theirs),
    }  # fmt: skip
    if width != theirs:
        tensors["embed_tokens.weight"] = matrix(vocab_size, width)
    if own.get("norm_before_fc"):
        tensors["input_norm.weight"] = gains(len(places) * theirs)
    if own.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": gains(theirs) for i in range(len(places))}
    kept = list(range(count)) if guessed is None else sorted(random.Random(seed).sample(range(vocab_size), count))
    if guessed is not None:
        tensors["d2t"] = torch.tensor(kept) - torch.arange(count)
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, torch.tensor(kept), 1)
    (folder / "draft").mkdir(parents=True)
    (folder / "draft" / "config.json").write_text(json.dumps(own))
    tensors = {name: each.to(dtype) if each.is_floating_point() else each for name, each in tensors.items()}
    save_file(tensors, folder / "draft" / "model.safetensors")
    return Saved(model, save(model, folder / "model"), folder / "draft", own, tensors, kept)


def normed(x: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gains


@torch.no_grad()
def expected_guesses(saved: Saved, tokens: list[int], count: int) -> list[int]:
    """By recomputing everything. Of the first token's predecessor there is nothing, which zeros stand for."""
    t, own, model = saved.tensors, saved.config, saved.model
    read = model.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    layers = model.config.num_hidden_layers
    places = own.get("eagle_aux_hidden_state_layer_ids") or [2, layers // 2, layers - 3]
    taken = [read[place][0] for place in places]
    if own.get("fc_norm"):
        taken = [normed(rows, t[f"fc_norm.{i}.weight"]) for i, rows in enumerate(taken)]
    joined = torch.cat(taken, 1)
    joined = normed(joined, t["input_norm.weight"]) if own.get("norm_before_fc") else joined
    rows = torch.cat([torch.zeros(1, own["hidden_size"]), (joined @ t["fc.weight"].T)[:-1]])
    config = LlamaConfig(**{name: value for name, value in own.items() if name != "architectures"})
    mlp = LlamaMLP(config)
    mlp.load_state_dict({name.removeprefix("midlayer.mlp."): each for name, each in t.items() if ".mlp." in name})
    embedding = t.get("embed_tokens.weight", model.get_input_embeddings().weight)
    head, at = t.get("lm_head.weight", model.get_output_embeddings().weight), "midlayer.self_attn."
    guesses: list[int] = []
    while len(guesses) < count:
        ids = torch.tensor(tokens + guesses)
        hidden = normed(rows, t["midlayer.hidden_norm.weight"])
        stream = hidden if own.get("norm_before_residual") else rows
        x = torch.cat([normed(embedding[ids], t["midlayer.input_layernorm.weight"]), hidden], 1)
        q, k, v = ((x @ t[f"{at}{part}_proj.weight"].T).view(len(ids), -1, own["head_dim"]) for part in "qkv")
        if f"{at}q_norm.weight" in t:
            q, k = normed(q, t[f"{at}q_norm.weight"]), normed(k, t[f"{at}k_norm.weight"])
        angles = LlamaRotaryEmbedding(config)(x, torch.arange(len(ids))[None])
        q, k = (each[0] for each in apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *angles))
        k, v = (each.repeat_interleave(q.shape[0] // each.shape[0], 0) for each in (k, v.transpose(0, 1)))
        unseen = torch.ones(len(ids), len(ids)).triu(1) > 0
        scores = (q @ k.transpose(1, 2) * own["head_dim"] ** -0.5).masked_fill(unseen, -torch.inf)
        stream = stream + (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ t[f"{at}o_proj.weight"].T
        stream = stream + mlp(normed(stream, t["midlayer.post_attention_layernorm.weight"]))
        found = normed(stream, t["norm.weight"])
        guesses.append(saved.kept[int((head @ found[-1]).argmax())])
        rows = torch.cat([rows, (found if own.get("norm_output") else stream)[-1:]])
    return guesses


def guessing(saved: Saved, **more: Any) -> Engine:
    draft = str(more.pop("draft", saved.draft))
    return engine_with(saved.folder, more.pop("num_guesses", 3), **{"draft_model": draft, "draft_min_p": 0.0} | more)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, list[int]]]:
    return every_guess(EagleDraft, monkeypatch)


PLACES = "eagle_aux_hidden_state_layer_ids"
VARIANTS: dict[str, dict[str, Any]] = {
    "as first published": {},
    "of a Gemma, whose layers norm what joins": {"kind": "gemma3, ropes of two bases"},
    "of experts": {"kind": "qwen3 moe, 3 of 5, a dense layer between"},
    "as wide, without what is the model's": {"hidden_size": 48, "head_dim": 24, "guessed": None},
    "norms before, other layers": {"norm_before_fc": True, "norm_before_residual": True, PLACES: [0, 3, 4]},
    "3.1": {"fc_norm": True, "norm_output": True, PLACES: [1, 4]},
}


def check_guesses(engine: Engine, saved: Saved, made: list[tuple[int, int, list[int]]]) -> None:
    prompt = [random.Random(1).randrange(FEW) for _ in range(37)]
    (output,) = run(engine, [(prompt, DRAWN)])
    answer = list(output.outputs[0].token_ids)
    assert answer == list(run(engine_with(saved.folder, 0), [(prompt, DRAWN)])[0].outputs[0].token_ids)
    assert len(made) > 10
    for _, end, guesses in made:
        assert guesses == expected_guesses(saved, (prompt + answer)[:end], len(guesses)), f"behind {end} tokens"
    assert output.metrics.num_guessed_tokens > output.metrics.num_held_tokens > 0


@pytest.mark.parametrize("name", VARIANTS)
def test_guesses_are_those_of_the_formula(name: str, tmp_path: Path, made: list[tuple[int, int, list[int]]]) -> None:
    saved = pair(tmp_path, **VARIANTS[name])
    if VARIANTS[name].get("guessed", 4) is None:  # nor a head
        del saved.tensors["lm_head.weight"]
        save_file(saved.tensors, saved.draft / "model.safetensors")
    check_guesses(guessing(saved, max_num_batched_tokens=16), saved, made)


def test_answers_are_the_same_to_the_bit(tmp_path: Path) -> None:
    """All kinds together: where blocks are so few that sequences lose theirs, and steps so small that guesses find no room."""
    saved = pair(tmp_path, "gemma3, ropes of two bases", 259, 200)
    r = random.Random(4)
    asked = [(PROMPT[: r.randint(4, len(PROMPT))], params) for params in ASKED.values() for _ in range(2)]
    r.shuffle(asked)
    plain = answers(engine_with(saved.folder, 0, max_num_seqs=64), asked)
    for num_blocks, batched in ((24, 7), (256, 512)):
        pressed = guessing(saved, num_blocks=num_blocks, max_num_seqs=9, max_num_batched_tokens=batched)
        assert answers(pressed, asked) == plain
        assert pressed.stats().used_blocks == 0


@pytest.mark.parametrize(
    "more", [{"draft_quant": "int8"}, {"dtype": "bfloat16", "kv_cache_dtype": "int8"}, {"quant": "int8"}], ids=str
)
def test_rounded_weights_and_caches_too(
    more: dict[str, Any], tmp_path: Path, made: list[tuple[int, int, list[int]]]
) -> None:
    saved = pair(tmp_path)
    asked = [([i % FEW for i in range(20)], replace(DRAWN, logprobs=2))]
    plain = {name: value for name, value in more.items() if name != "draft_quant"}
    engine = guessing(saved, **more)
    assert answers(engine, asked) == answers(engine_with(saved.folder, 0, **plain), asked)
    assert run(engine, asked)[0].metrics.num_held_tokens > 0
    assert made


def test_texts_that_are_embedded_beside_it(tmp_path: Path, made: list[tuple[int, int, list[int]]]) -> None:
    """Of these few rows are wanted, and all of the other's."""
    saved, prompt, answer = pair(tmp_path), [random.Random(1).randrange(FEW) for _ in range(37)], list[int]()
    engine = guessing(saved)
    for i in range(3):
        engine.embed(f"before {i}", prompt[: 9 + i], "last")
    engine.add("text", prompt, DRAWN)
    while engine.has_unfinished():
        for output in engine.step():
            answer = list(output.outputs[0].token_ids) if output.request_id == "text" else answer
    assert len(made) > 5
    for _, end, guesses in made:
        assert guesses == expected_guesses(saved, (prompt + answer)[:end], len(guesses)), f"behind {end} tokens"


def test_a_saved_cache_is_for_who_guesses_alike(tmp_path: Path) -> None:
    saved = pair(tmp_path)
    kinds = [engine._executor.cache_kind for engine in (guessing(saved), engine_with(saved.folder, 0))]  # type: ignore[attr-defined]
    assert kinds[0] != kinds[1]


# ---- files ----


def rewrite(saved: Saved, config: dict[str, Any], rename: Callable[[str], str], tensors: Tensors | None = None) -> None:
    (saved.draft / "config.json").write_text(json.dumps(config))
    save_file({rename(name): each for name, each in (tensors or saved.tensors).items()}, saved.draft / "model.safetensors")


def as_speculators(saved: Saved) -> None:
    """By vLLM's trainer: the layer's settings in a section of their own."""
    beside = ("architectures", "target_hidden_size", "draft_vocab_size")
    inner = {name: value for name, value in saved.config.items() if name not in beside}
    own = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", PLACES: [2, 2, 2],
           **{name: saved.config[name] for name in beside[1:]}}  # fmt: skip
    rewrite(saved, own | {"transformer_layer_config": inner}, lambda name: name.replace("midlayer", "layers.0"))


def as_nvidias(saved: Saved) -> None:
    """The rest in a section, and a folder that calls itself a Llama."""
    config = saved.config | {"architectures": ["LlamaForCausalLM"], "eagle_config": {PLACES: [2, 2, 2], "norm_before_fc": False}}
    rewrite(saved, config, lambda name: name if name in ("d2t", "t2d", "lm_head.weight") else f"model.{name}")


def with_norms_of_heads(saved: Saved) -> None:
    """As of drafters for Qwen3."""
    gains = {f"midlayer.self_attn.{part}_norm.weight": torch.linspace(0.5, 1.5, 16) for part in "qk"}
    saved.tensors.update(gains)
    rewrite(saved, saved.config, str)


@pytest.mark.parametrize("written", [as_speculators, as_nvidias, with_norms_of_heads])
def test_folders_of_other_trainers(
    written: Callable[[Saved], None], tmp_path: Path, made: list[tuple[int, int, list[int]]]
) -> None:
    saved = pair(tmp_path)
    written(saved)
    check_guesses(guessing(saved), saved, made)


def test_the_models_embedding_once_more_is_not_kept_twice(tmp_path: Path) -> None:
    """Another one is, and read."""
    saved = pair(tmp_path, hidden_size=48, head_dim=24)
    alone = guessing(saved)._executor.draft_bytes  # type: ignore[attr-defined]
    for factor, more in ((1.0, False), (-1.0, True)):
        rows = saved.model.get_input_embeddings().weight.detach() * factor
        rewrite(saved, saved.config, str, saved.tensors | {"embed_tokens.weight": rows})
        assert (guessing(saved)._executor.draft_bytes > alone) is more  # type: ignore[attr-defined]


def write_gguf(saved: Saved, path: Path) -> Path:
    """As llama.cpp's converter does (conversion/llama.py): rotary pairs side by side, tokens by their own numbers."""
    own = saved.config
    writer = GGUFWriter(path, "eagle3")
    writer.add_block_count(1)
    writer.add_context_length(own["max_position_embeddings"])
    writer.add_embedding_length(own["hidden_size"])
    writer.add_feed_forward_length(own["intermediate_size"])
    writer.add_head_count(own["num_attention_heads"])
    writer.add_head_count_kv(own["num_key_value_heads"])
    writer.add_key_length(own["head_dim"])
    writer.add_value_length(own["head_dim"])
    writer.add_layer_norm_rms_eps(own["rms_norm_eps"])
    writer.add_rope_freq_base(own["rope_theta"])
    writer.add_rope_dimension_count(own["head_dim"])
    writer.add_vocab_size(own["vocab_size"])
    writer.add_array("eagle3.target_layers", [2, 2, 2])
    writer.add_uint32("eagle3.target_hidden_size", own["target_hidden_size"])
    for key in ("norm_before_residual", "norm_before_fc"):
        writer.add_bool(f"eagle3.{key}", own.get(key, False))
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
             "hidden_norm": "attn_norm_2", "self_attn.o_proj": "attn_output",
             "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
             "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}  # fmt: skip
    outer = {"fc": "fc", "norm": "output_norm", "lm_head": "output", "embed_tokens": "token_embd",
             "input_norm": "enc.output_norm"}  # fmt: skip
    for name, tensor in saved.tensors.items():
        if name == "t2d":
            continue
        if name == "d2t":
            writer.add_tensor(name, (tensor + torch.arange(len(tensor))).numpy())
            continue
        part = name.removesuffix(".weight")
        theirs = outer[part] if part in outer else f"blk.0.{names[part.removeprefix('midlayer.')]}"
        if part.endswith(("q_proj", "k_proj")):
            heads = tensor.view(-1, 2, own["head_dim"] // 2, tensor.shape[1])
            tensor = heads.transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(f"{theirs}.weight", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_guesses_the_same(tmp_path: Path, made: list[tuple[int, int, list[int]]]) -> None:
    saved = pair(tmp_path, norm_before_fc=True, norm_before_residual=True)
    check_guesses(guessing(saved, draft=write_gguf(saved, tmp_path / "draft.gguf")), saved, made)


def test_a_drafter_beside_a_model_is_not_taken_for_it() -> None:
    names = ["eagle3-m-Q4_K_M.gguf", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mtp-m-Q8_0.gguf", "parts/EAGLE3-m.gguf"]
    assert choose(names, "here").files == ("m-Q4_K_M.gguf",)
    assert choose(names, "here", quant="Q8_0").files == ("m-Q8_0.gguf",)
    assert choose(names, "here", file="eagle3-m-Q4_K_M.gguf").files == ("eagle3-m-Q4_K_M.gguf",)
    assert choose(names[:1], "here").files == ("eagle3-m-Q4_K_M.gguf",)


BROKEN: dict[str, Callable[[Tensors], Any]] = {
    "1 missing: fc.weight": lambda t: t.pop("fc.weight"),
    "1 missing: midlayer.hidden_norm.weight": lambda t: t.pop("midlayer.hidden_norm.weight"),
    "1 not part of the model: midlayer.self_attn.sinks": lambda t: t.update({"midlayer.self_attn.sinks": torch.ones(4)}),
    r"fc.weight \(expected \[40, 144\], found \[40, 48\]\)": lambda t: t.update({"fc.weight": torch.ones(40, 48)}),
    "'midlayer.mlp.up_proj.weight' .*NaN": lambda t: t["midlayer.mlp.up_proj.weight"].fill_(torch.nan),
    r"'d2t' must be I64 \[4\], and is I64 \[5\]": lambda t: t.update({"d2t": torch.zeros(5, dtype=torch.int64)}),
    "'d2t' must be I64": lambda t: t.update({"d2t": torch.zeros(4)}),
    "tokens 0 to 6, of a model of 6": lambda t: t.update({"d2t": torch.tensor([0, 0, 0, 3])}),
    "tokens -1 to 3": lambda t: t.update({"d2t": torch.tensor([-1, 0, 0, 0])}),
    "7 tokens, of which nothing says": lambda t: (t.pop("d2t"), t.update({"lm_head.weight": torch.ones(7, 40)})),
}


@pytest.mark.parametrize("said", BROKEN)
def test_files_that_are_not_whole_are_refused(said: str, tmp_path: Path) -> None:
    saved = pair(tmp_path)
    BROKEN[said](saved.tensors)
    rewrite(saved, saved.config, str)
    with pytest.raises(CheckpointError, match=said):
        guessing(saved)


REFUSED: dict[str, dict[str, Any]] = {
    "EAGLE-3 of 2 layers": {"num_hidden_layers": 2},
    "reads rows of 64 of the layers 2, 2, 2; the model has 5 layers and rows of 48": {"target_hidden_size": 64},
    "the layers 2, 3, 6; the model": {PLACES: [2, 3, 6]},
    "reads one layer of the model alone": {"eagle_config": {"use_aux_hidden_state": False}},
    "guesses several tokens at once": {"is_causal": False},
    "normed twice": {"norm_before_fc": True, "fc_norm": True},
    "must be a list of numbers of layers": {PLACES: [2, "3", 4]},
    "'transformer_layer_config' and 'eagle_config' must be objects": {"eagle_config": [1]},
    "must be true or false": {"norm_output": "yes"},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_it_is_not_made_for_is_said(said: str, tmp_path: Path) -> None:
    saved = pair(tmp_path)
    rewrite(saved, saved.config | REFUSED[said], str)
    with pytest.raises((UnsupportedError, CheckpointError), match=said):
        guessing(saved)


def test_what_it_cannot_do_is_said(tmp_path: Path) -> None:
    saved = pair(tmp_path)
    with pytest.raises(UnsupportedError, match="not divided among processes"):
        guessing(saved, tensor_parallel_size=2)
    with open_checkpoint(saved.draft) as checkpoint, pytest.raises(UnsupportedError, match="guesses for another"):
        read_spec(checkpoint, open_reader(checkpoint))
    del saved.tensors["embed_tokens.weight"]
    rewrite(saved, saved.config, str)
    with pytest.raises(UnsupportedError, match="the drafter reads rows of 48"):
        guessing(saved)
