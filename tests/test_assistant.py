"""Guesses by an assistant, which reads the model's own cache: the same tokens and log-probabilities to the bit, and the very
guesses that transformers' assistant makes of the model's hidden rows, keys and values."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map
from safetensors.torch import load_file, save_file
from transformers import Gemma4AssistantConfig, Gemma4TextConfig

from engines import failing_once, greedy, random_model, run, save
from nanovllm_cli.engine.assistant import AssistantDraft
from nanovllm_cli.engine.cpu_platform import CpuPlatform
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.loader import read_spec
from nanovllm_cli.weights.quantized import open_reader
from test_lookup import ASKED, PROMPT, answers, engine_with
from test_models import CASES, GEMMA_4, GEMMA_4_LARGE
from test_mtp import every_guess

KINDS = {
    "layers read others' keys": "gemma4, keys of other layers",
    "keys are values": "gemma4, keys are values",
    "experts": "gemma4, 2 of 5 beside",
}
FEW = 6
"""Tokens, so that guesses of random weights hold now and then."""
DRAWN = SamplingParams(temperature=2.0, seed=5, max_tokens=40, ignore_eos=True)


pytestmark = pytest.mark.usefixtures("eight_rows_may_have_guesses")


class Saved(NamedTuple):
    model: Any
    assistant: Any
    folder: Path
    draft: Path


def pair(
    kind: str, folder: Path, vocab_size: int = FEW, *, ordered: bool = False, hidden_size: int = 40,
    dtype: torch.dtype = torch.float32,
) -> Saved:  # fmt: skip
    """A model of random weights, an assistant for it, which is narrower and has other heads, and both folders."""
    config = copy.deepcopy(CASES[KINDS[kind]])
    config.vocab_size = vocab_size
    if config.hidden_size_per_layer_input:
        config.vocab_size_per_layer_input = vocab_size
    model = random_model(config, dtype=dtype)
    large = GEMMA_4_LARGE if config.attention_k_eq_v else GEMMA_4
    text = Gemma4TextConfig(**large | {
        "vocab_size": vocab_size, "hidden_size": hidden_size, "intermediate_size": 56, "num_attention_heads": 4,
        "num_kv_shared_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "final_logit_softcapping": None,
    })  # fmt: skip
    own = Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=config.hidden_size, use_ordered_embeddings=ordered, num_centroids=3,
        centroid_intermediate_top_k=2,
    )  # fmt: skip
    assistant = random_model(own, 1, dtype)
    return Saved(model, assistant, save(model, folder / "model"), save(assistant, folder / "draft"))


@torch.no_grad()
def expected_guesses(saved: Saved, tokens: list[int], count: int) -> list[int]:
    """Behind the last of `tokens`, whose own key nobody has yet. In layers with a window as many keys are seen as the model's
    window is wide, which is what transformers' cache holds of them while it decodes."""
    found = saved.model.model(torch.tensor([tokens[:-1]]), return_shared_kv_states=True, use_cache=False)
    window = saved.model.config.sliding_window
    kept = dict(found.shared_kv_states)
    kept["sliding_attention"] = tuple(side[:, :, -window:] for side in kept["sliding_attention"])
    row, guesses = found.last_hidden_state[:, -1:], list[int]()
    for _ in range(count):
        embedded = saved.model.get_input_embeddings()(torch.tensor([[(tokens + guesses)[-1]]]))
        made = saved.assistant(
            inputs_embeds=torch.cat([embedded, row], -1), position_ids=torch.tensor([[len(tokens) - 1]]), shared_kv_states=kept
        )
        guesses.append(int(made.logits.argmax()))
        row = made.last_hidden_state
    return guesses


def guessing(saved: Saved, **more: Any) -> Engine:
    return engine_with(saved.folder, more.pop("num_guesses", 0), **{"draft_model": str(saved.draft), "draft_min_p": 0.0} | more)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, list[int]]]:
    return every_guess(AssistantDraft, monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_guesses_are_those_of_transformers(kind: str, tmp_path: Path, made: list[tuple[int, int, list[int]]]) -> None:
    saved = pair(kind, tmp_path)
    prompt = [random.Random(1).randrange(FEW) for _ in range(37)]
    (output,) = run(guessing(saved, max_num_batched_tokens=16), [(prompt, DRAWN)])
    answer = list(output.outputs[0].token_ids)
    assert answer == list(run(engine_with(saved.folder, 0), [(prompt, DRAWN)])[0].outputs[0].token_ids)
    assert len(made) > 10
    for _, end, guesses in made:
        assert len(guesses) > 0
        assert guesses == expected_guesses(saved, (prompt + answer)[:end], len(guesses)), f"behind {end} tokens"
    assert output.metrics.num_guessed_tokens > output.metrics.num_held_tokens > 0


def test_it_reads_the_row_of_the_last_token_but_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a prompt of which every row is wanted, for its log-probabilities."""
    saved, prompt = pair("layers read others' keys", tmp_path), [i % FEW for i in range(21)]
    read: list[torch.Tensor] = []
    draw = AssistantDraft._draw

    def spying(draft: Any, shares: Any, tokens: Any, num_drawn: int, rows: Any, *more: Any) -> Any:
        read.extend(rows.values() if num_drawn == 0 else ())
        return draw(draft, shares, tokens, num_drawn, rows, *more)

    monkeypatch.setattr(AssistantDraft, "_draw", spying)
    for logprobs in (None, 0):
        run(guessing(saved, max_num_batched_tokens=16), [(prompt, greedy(3, prompt_logprobs=logprobs))])
    expected = saved.model.model(torch.tensor([prompt])).last_hidden_state[0, -1:]
    for rows in (read[0], read[len(read) // 2]):
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("more", [{"max_num_batched_tokens": 11}, {"num_blocks": 9, "max_num_seqs": 4}], ids=str)
def test_so_they_are_where_sequences_fork_are_found_and_lose_their_blocks(
    more: dict[str, Any], tmp_path: Path, made: list[tuple[int, int, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each guess is one that some sequence of that length would get."""
    monkeypatch.setattr(CpuPlatform, "most_drafted", 64)
    saved = pair("layers read others' keys", tmp_path)
    r = random.Random(2)
    prompts = [[r.randrange(FEW) for _ in range(count)] for count in (33, 50, 17)]
    asked = [(prompt, replace(DRAWN, seed=i, max_tokens=30, n=1 + (i == 2))) for i, prompt in enumerate([*prompts, prompts[1]])]
    engine = guessing(saved, **more)
    texts: list[list[int]] = []
    for _ in range(2):  # the second time prompts and answers are found
        for (prompt, _), output in zip(asked, run(engine, asked), strict=True):
            texts += [prompt + list(answer.token_ids) for answer in output.outputs]
    assert engine.stats().prefix_hit_tokens > 100
    assert (engine.stats().preemptions > 0) == ("num_blocks" in more)
    assert sum(len(guesses) for _, _, guesses in made) > 100
    known: dict[tuple[int, ...], list[int]] = {}
    for _, end, guesses in made:
        places = {tuple(text[:end]) for text in texts if len(text) >= end}
        for place in places - known.keys():
            known[place] = expected_guesses(saved, list(place), 3)
        assert guesses in [known[place][: len(guesses)] for place in places]


def test_answers_are_the_same_to_the_bit(tmp_path: Path) -> None:
    """All kinds together, with guesses that hold now and then: where blocks are so few that sequences lose theirs, and steps so
    small that guesses find no room."""
    saved = pair("layers read others' keys", tmp_path, 259)
    r = random.Random(4)
    asked = [(PROMPT[: r.randint(4, len(PROMPT))], params) for params in ASKED.values() for _ in range(2)]
    r.shuffle(asked)
    plain = answers(engine_with(saved.folder, 0, max_num_seqs=64), asked)
    for num_blocks, batched in ((40, 512), (24, 7), (256, 5)):
        pressed = guessing(saved, num_blocks=num_blocks, max_num_seqs=9, max_num_batched_tokens=batched)
        assert answers(pressed, asked) == plain
        assert pressed.stats().used_blocks == 0


@pytest.fixture(scope="module")
def sure(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return sure_pair(tmp_path_factory.mktemp("sure"))


def sure_pair(folder: Path, dtype: torch.dtype = torch.float32) -> Saved:
    """A model and an assistant whose layers add nothing, so that both say the same of every token."""
    saved = pair("keys are values", folder, 259, hidden_size=48)
    with torch.no_grad():
        for model in (saved.model, saved.assistant):
            for name, weight in model.named_parameters():
                if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
                    weight.zero_()
            for name, buffer in model.named_buffers():
                if name.endswith("layer_scalar"):
                    buffer.fill_(1.0)
        saved.assistant.model.embed_tokens.weight.copy_(saved.model.model.embed_tokens.weight)
        saved.assistant.model.norm.weight.copy_(saved.model.model.norm.weight)
        saved.assistant.pre_projection.weight.copy_(torch.cat([torch.eye(48), torch.zeros(48, 48)], 1))
    save(saved.model.to(dtype), saved.folder)
    save(saved.assistant.to(dtype), saved.draft)
    return saved


@pytest.mark.parametrize(
    "more", [{}, {"draft_quant": "int8"}, {"dtype": "bfloat16", "kv_cache_dtype": "int8"}, {"quant": "int8"}], ids=str
)
def test_what_is_right_is_right_to_the_end(more: dict[str, Any], sure: Saved) -> None:
    engine = guessing(sure, **more)
    asked = [(PROMPT, greedy(91)), (PROMPT[:9], ASKED["logprobs"])]
    plain = {name: value for name, value in more.items() if name != "draft_quant"}
    assert answers(engine, asked) == answers(engine_with(sure.folder, 0, **plain), asked)
    (output,) = run(engine, [(PROMPT[:11], greedy(91))])
    held, guessed = output.metrics.num_held_tokens, output.metrics.num_guessed_tokens
    assert held > 70
    assert held == guessed or more


def test_it_guesses_up_to_what_it_is_not_sure_of(sure: Saved) -> None:
    def guessed(least: float) -> int:
        (output,) = run(guessing(sure, draft_min_p=least), [(PROMPT, greedy(60))])
        assert output.metrics.num_held_tokens == output.metrics.num_guessed_tokens
        return output.metrics.num_guessed_tokens

    assert guessed(0.0) > guessed(0.999) == 0


def test_a_step_that_fails_is_run_again_in_halves(sure: Saved) -> None:
    asked = [(PROMPT[:n], greedy(30)) for n in (12, 20, 7)]
    plain = answers(engine_with(sure.folder, 0), asked)
    engine = guessing(sure)
    failed = failing_once(engine._executor)  # type: ignore[arg-type]
    assert answers(engine, asked) == plain
    assert len(failed) > 2


def test_texts_that_are_embedded_beside_it_and_states_of_prompts(sure: Saved) -> None:
    def embedded(engine: Engine) -> Any:
        found = {}
        engine.add("text", PROMPT, greedy(8, prompt_logprobs=1))
        for pooling in ("mean", "last", "cls"):
            engine.embed(pooling, PROMPT[:13], pooling)  # type: ignore[arg-type]
        while engine.has_unfinished():
            found |= {each.request_id: (each.pooled, each.prompt_logprobs) for each in engine.step() if each.finished}
        return found

    assert embedded(guessing(sure)) == embedded(engine_with(sure.folder, 0))


def test_a_saved_cache_is_also_for_who_does_not_guess(sure: Saved) -> None:
    """Nothing in it is the assistant's."""
    kinds = [engine._executor.cache_kind for engine in (guessing(sure), engine_with(sure.folder, 0))]  # type: ignore[attr-defined]
    assert kinds[0] == kinds[1]


# ---- files ----


def test_which_tokens_to_look_at_first_is_left_aside(tmp_path: Path, made: list[tuple[int, int, list[int]]]) -> None:
    saved = pair("layers read others' keys", tmp_path, ordered=True)
    assert "masked_embedding.token_ordering" in load_file(saved.draft / "model.safetensors")
    saved.assistant.config.use_ordered_embeddings = False
    prompt = [random.Random(1).randrange(FEW) for _ in range(9)]
    (output,) = run(guessing(saved), [(prompt, greedy(9))])
    text = prompt + list(output.outputs[0].token_ids)
    assert made
    for _, end, guesses in made:
        assert guesses == expected_guesses(saved, text[:end], len(guesses))


def write_gguf(saved: Saved, path: Path) -> None:
    """As llama.cpp's converter does (conversion/gemma.py, gguf-py's tensor_mapping.py)."""
    arch, config = "gemma4-assistant", json.loads((saved.draft / "config.json").read_text())
    text, width = config["text_config"], config["backbone_hidden_size"]
    writer = GGUFWriter(path, arch)
    windows = [kind == "sliding_attention" for kind in text["layer_types"]]
    full, small = 40, 24
    writer.add_block_count(len(windows))
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv([2 if window else 1 for window in windows])
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    for size in (writer.add_key_length, writer.add_value_length):
        size(full)
    for size in (writer.add_key_length_swa, writer.add_value_length_swa):
        size(small)
    writer.add_rope_dimension_count(full)
    writer.add_rope_dimension_count_swa(small)
    writer.add_rope_freq_base(1e6)
    writer.add_rope_freq_base_swa(1e4)
    writer.add_sliding_window(text["sliding_window"])
    writer.add_sliding_window_pattern(windows)
    writer.add_shared_kv_layers(len(windows))
    writer.add_embedding_length_per_layer_input(0)
    writer.add_embedding_length_out(width)
    writer.add_nextn_predict_layers(len(windows))
    divisors = np.ones(full // 2, np.float32)
    divisors[int(0.25 * full / 2) :] = 1e30
    writer.add_tensor("rope_freqs.weight", divisors)
    names = get_tensor_name_map(MODEL_ARCH.GEMMA4, len(windows))
    own = {"pre_projection": "blk.0.nextn.pre_projection", "post_projection": "nextn.post_projection"}
    for name, tensor in load_file(saved.draft / "model.safetensors").items():
        place, dot, kind = name.rpartition(".")
        if name.endswith("layer_scalar"):
            place, dot, kind = name, ".", "weight"
        theirs = own.get(place) or names.get_name(place)
        assert theirs is not None, name
        writer.add_tensor(theirs + dot + kind, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_guesses_the_same(tmp_path: Path, made: list[tuple[int, int, list[int]]]) -> None:
    saved = pair("keys are values", tmp_path)
    write_gguf(saved, tmp_path / "draft.gguf")
    prompt = [random.Random(3).randrange(FEW) for _ in range(25)]
    for draft in (saved.draft, tmp_path / "draft.gguf"):
        run(guessing(saved._replace(draft=draft)), [(prompt, DRAWN)])
    count = len(made) // 2
    assert count > 5
    assert [each[1:] for each in made[:count]] == [each[1:] for each in made[count:]]


BROKEN: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "'pre_projection.weight' is missing": lambda t: t.pop("pre_projection.weight"),
    "1 missing: post_projection.weight": lambda t: t.pop("post_projection.weight"),
    "1 missing: model.layers.2.self_attn.q_proj.weight": lambda t: t.pop("model.layers.2.self_attn.q_proj.weight"),
    "1 not part of the model: model.layers.2.self_attn.q_proj.bias": lambda t: t.update(
        {"model.layers.2.self_attn.q_proj.bias": torch.ones(3)}
    ),
    "'pre_projection.weight' .*NaN": lambda t: t["pre_projection.weight"].fill_(torch.nan),
}


@pytest.mark.parametrize("said", BROKEN)
def test_one_that_is_not_whole_is_refused(said: str, sure: Saved, tmp_path: Path) -> None:
    shutil.copytree(sure.draft, tmp_path / "draft")
    tensors = load_file(sure.draft / "model.safetensors")
    BROKEN[said](tensors)
    save_file(tensors, tmp_path / "draft" / "model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        guessing(sure._replace(draft=tmp_path / "draft"))


def test_what_it_is_not_made_for_is_said(sure: Saved, tmp_path: Path) -> None:
    other = save(random_model(CASES["qwen3.5"]), tmp_path / "qwen")
    few = pair("keys are values", tmp_path / "few")
    heads = pair("layers read others' keys", tmp_path / "heads", 259)
    cases: list[tuple[Saved, dict[str, Any], str]] = [
        (sure._replace(folder=other), {}, "made for 259 tokens and rows of 48; the model has 513 tokens"),
        (sure._replace(draft=few.draft), {}, "made for 6 tokens"),
        (sure._replace(folder=heads.folder), {}, "keeps no 1 heads of 40 that the assistant could read"),
        (sure, {"tensor_parallel_size": 2}, "not divided among processes"),
    ]
    for saved, more, said in cases:
        with pytest.raises(UnsupportedError, match=said):
            guessing(saved, **more)


def test_alone_it_does_nothing(sure: Saved) -> None:
    with open_checkpoint(sure.draft) as checkpoint, pytest.raises(UnsupportedError, match="guesses for another") as caught:
        read_spec(checkpoint, open_reader(checkpoint))
    assert "--draft-model" in str(caught.value.hint)
