"""Guesses by a layer of the model's own: the same tokens and log-probabilities to the bit, and the very guesses that layers of
transformers make of the model's hidden rows, put together as DeepSeek-V3's report has it (2.2), and as vLLM and llama.cpp do,
which agree that the rows are those behind the last norm."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines import failing_once, greedy, random_model, run, save
from nanovllm_cli.config import MTP_TOKENS, EngineConfig
from nanovllm_cli.engine.cpu_platform import CpuPlatform
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.mtp import MTPDraft
from nanovllm_cli.engine.plan import Plan
from nanovllm_cli.engine.strategy import Drafted, Pace
from nanovllm_cli.errors import CheckpointError, UnsupportedError, UsageError
from nanovllm_cli.planning.facts import facts_of
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.weights.checkpoint import open_checkpoint
from test_convert_families import make_gguf
from test_draft import LONG, PRESSED, check_that_all_hold
from test_lookup import ASKED, PROMPT, answers, engine_with
from test_models import CASES

FEW = 6
"""Tokens, so that guesses of random weights hold now and then."""
KINDS = ["qwen3.5", "qwen3.5 moe, 2 of 5 and shared", "qwen3-next, 3 of 5 and shared", "glm4 moe, 2 of 5 and shared",
         "deepseek v3, 3 of 5 and shared", "sarvam moe, 3 of 8 in two of four groups",
         "hy v3, 3 of 5 and shared"]  # fmt: skip


DRAWN = SamplingParams(temperature=2.0, seed=5, max_tokens=40, ignore_eos=True)


pytestmark = pytest.mark.usefixtures("eight_rows_may_have_guesses")


class Layer(NamedTuple):
    """What transformers makes of it: the block and its norm as a model of one layer, two norms, and what joins them."""

    block: Any
    embedding_norm: Any
    hidden_norm: Any
    join: torch.Tensor


class Saved(NamedTuple):
    folder: Path
    model: Any
    layer: Layer


def with_layer(kind: str, folder: Path, seed: int = 0, **more: Any) -> Saved:
    """A model of random weights with such a layer, and both as transformers computes them."""
    config = copy.deepcopy(CASES[kind])
    for name, value in ({"vocab_size": FEW} | more).items():
        setattr(config, name, value)
    model = random_model(config, seed)
    one = copy.deepcopy(config)
    one.num_hidden_layers = 1
    if hasattr(one, "layer_types") and one.layer_types is not None:
        one.layer_types = ["full_attention"]
    for name in ("mlp_only_layers",):
        if hasattr(one, name):
            setattr(one, name, [])
    if hasattr(one, "first_k_dense_replace"):
        one.first_k_dense_replace = 0
    if hasattr(one, "mlp_layer_types"):
        one.mlp_layer_types = ["sparse"]
    block = random_model(one, seed + 1)
    norms = [copy.deepcopy(block.model.norm) for _ in range(2)]
    for i, norm in enumerate(norms):
        norm.weight.data = 0.5 + torch.rand(norm.weight.shape, generator=torch.Generator().manual_seed(seed + i))
    width = config.hidden_size
    join = torch.randn(width, 2 * width, generator=torch.Generator().manual_seed(seed)) * width**-0.5
    layer = Layer(block, *norms, join)
    write(save(model, folder), layer, config.num_hidden_layers)
    return Saved(folder, model, layer)


def write(folder: Path, layer: Layer, place: int) -> None:
    """Into the folder of the model, as its publisher has it."""
    config = json.loads((folder / "config.json").read_text())
    is_qwen, is_ling = (config["model_type"].startswith(kind) for kind in ("qwen", ("sarvam", "hy")))
    own = {"embedding_norm": "mtp.pre_fc_norm_embedding", "hidden_norm": "mtp.pre_fc_norm_hidden", "join": "mtp.fc",
           "norm": "mtp.norm", "block": "mtp.layers.0."}  # fmt: skip
    if not is_qwen:
        at = f"model.layers.{place}."
        own = {"embedding_norm": f"{at}enorm", "hidden_norm": f"{at}hnorm", "join": f"{at}eh_proj",
               "norm": f"{at}{'final_layernorm' if is_ling else 'shared_head.norm'}", "block": at}  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    layer.block.save_pretrained(folder / "layer")
    block = load_file(folder / "layer" / "model.safetensors")
    tensors = load_file(folder / "model.safetensors")
    at = "model.layers.0."
    tensors |= {own["block"] + name.removeprefix(at): tensor for name, tensor in block.items() if name.startswith(at)}
    others = {"embedding_norm": layer.embedding_norm.weight.data, "hidden_norm": layer.hidden_norm.weight.data,
              "join": layer.join, "norm": block["model.norm.weight"]}  # fmt: skip
    tensors |= {f"{own[name]}.weight": tensor for name, tensor in others.items()}
    if not is_qwen and not is_ling:  # what it shares is there once more
        shared = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
        tensors |= {f"{own['block']}{name}.weight": tensors[f"{theirs}.weight"] for name, theirs in shared.items()}
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


@torch.no_grad()
def expected_guesses(saved: Saved, tokens: list[int], count: int, among: int | None = None) -> list[int]:
    """By recomputing everything: of each token's embedding and the row of the token before it; rows of guesses are its own."""
    model, layer = saved.model, saved.layer
    rows = model.model(torch.tensor([tokens])).last_hidden_state[0]
    rows = torch.cat([torch.zeros(1, rows.shape[1]), rows[:-1]])
    guesses: list[int] = []
    while len(guesses) < count:
        embedded = model.get_input_embeddings()(torch.tensor(tokens + guesses))
        joined = torch.cat([layer.embedding_norm(embedded), layer.hidden_norm(rows)], 1) @ layer.join.T
        found = layer.block.model(inputs_embeds=joined[None]).last_hidden_state[0]
        guesses.append(int(model.lm_head(found[-1])[:among].argmax()))
        rows = torch.cat([rows, found[-1:]])
    return guesses


def guessing(folder: Path, **more: Any) -> Engine:
    return engine_with(folder, more.pop("num_guesses", 0), **{"mtp": True, "draft_min_p": 0.0} | more)


def every_guess(kind: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, list[int]]]:
    """Of a class that guesses, three each time from now on: whose it is, behind how many tokens, and what."""
    found: list[tuple[int, int, list[int]]] = []
    fill = kind.fill

    def spying(draft: Any, plan: Plan) -> Any:
        filled, guesses = fill(draft, plan)
        ends = {share.seq_id: share.start + len(share.known) for share in plan.scheduled}
        found.extend((seq_id, ends[seq_id], guess) for seq_id, guess in guesses.items())
        return filled, guesses

    monkeypatch.setattr(kind, "fill", spying)
    monkeypatch.setattr(Pace, "learn", lambda *_: None)  # as many every time
    monkeypatch.setattr(Drafted, "begin_sequence", lambda _: Pace(3))
    return found


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, list[int]]]:
    return every_guess(MTPDraft, monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_guesses_are_those_of_transformers_layers(kind: str, tmp_path: Path, made: list[tuple[int, int, list[int]]]) -> None:
    saved = with_layer(kind, tmp_path)
    prompt = [random.Random(1).randrange(FEW) for _ in range(37)]
    engine = guessing(saved.folder, max_num_batched_tokens=16)
    (output,) = run(engine, [(prompt, DRAWN)])
    answer = list(output.outputs[0].token_ids)
    assert answer == list(run(engine_with(saved.folder, 0), [(prompt, DRAWN)])[0].outputs[0].token_ids)
    assert len(made) > 10
    for _, end, guesses in made:
        assert guesses == expected_guesses(saved, (prompt + answer)[:end], len(guesses)), f"behind {end} tokens"
    assert output.metrics.num_guessed_tokens > output.metrics.num_held_tokens > 0


@pytest.fixture(scope="module")
def sure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer whose other layer is the same, and reads embeddings alone, all of which are as long as a norm makes
    them: it is right about every greedy token, as long as its own cache holds what the model's does."""
    return sure_model(tmp_path_factory.mktemp("sure"), "qwen3.5")


def sure_model(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> Path:
    config = copy.deepcopy(CASES[kind])
    for name, value in ({"vocab_size": 259, "num_hidden_layers": 1, "layer_types": ["full_attention"]} | more).items():
        setattr(config, name, value)
    model = random_model(config)
    rows = model.get_input_embeddings().weight
    rows.data /= rows.data.square().mean(1, keepdim=True).sqrt()
    width = config.hidden_size
    plain = copy.deepcopy(model.model.norm)
    plain.weight.data.zero_()  # and one is added
    layer = Layer(model, plain, plain, torch.cat([torch.eye(width), torch.zeros(width, width)], 1))
    write(save(model.to(dtype), folder), layer, 1)
    return folder


def test_answers_are_the_same_to_the_bit(tmp_path: Path) -> None:
    """All kinds together, with guesses that hold now and then: where blocks are so few that sequences lose theirs, and steps so
    small that guesses find no room."""
    saved = with_layer("qwen3.5", tmp_path, vocab_size=259)
    r = random.Random(4)
    asked = [(PROMPT[: r.randint(4, len(PROMPT))], params) for params in ASKED.values() for _ in range(2)]
    r.shuffle(asked)
    plain = answers(engine_with(saved.folder, 0, max_num_seqs=64), asked)
    for num_blocks, batched in ((40, 512), (24, 7), (256, 5)):
        pressed = guessing(saved.folder, num_blocks=num_blocks, max_num_seqs=9, max_num_batched_tokens=batched)
        assert answers(pressed, asked) == plain
        assert pressed.stats().used_blocks == 0


@pytest.mark.parametrize(
    "more",
    [{"quant": "fp8"}, {"quant": "int8"}, {"dtype": "bfloat16", "kv_cache_dtype": "int8"}],
    ids=str,
)
def test_rounded_weights_and_caches_too(more: dict[str, Any], sure: Path) -> None:
    asked = [(PROMPT, ASKED["logprobs"]), (PROMPT[:9], ASKED["greedy"])]
    engine = guessing(sure, **more)
    assert answers(engine, asked) == answers(engine_with(sure, 0, **more), asked)
    assert run(engine, [(PROMPT, greedy(30))])[0].metrics.num_held_tokens > 15, "it is nearly as right as it was"


def test_what_is_right_is_right_to_the_end(sure: Path) -> None:
    engine = guessing(sure)
    (output,) = run(engine, [(LONG, greedy(91))])
    assert output.metrics.num_guessed_tokens == output.metrics.num_held_tokens == 2 + MTP_TOKENS * 17 + 1
    assert engine.stats().steps == 20  # the prompt's, then three tokens, seventeen times five, and two


@pytest.mark.parametrize("more", PRESSED, ids=str)
def test_its_cache_follows_the_models(more: dict[str, Any], sure: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "most_drafted", 64)
    check_that_all_hold(guessing(sure, **more), loses="num_blocks" in more)


def test_where_nobody_guesses_it_is_fed_all_the_same(sure: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More sequences at once than pay: when the others have ended, what is left is guessed behind, and right."""
    engine = guessing(sure)
    outputs = run(engine, [(LONG[i : i + 9], greedy(20 + 40 * (i == 7))) for i in range(25)])
    assert outputs[7].metrics.num_guessed_tokens == outputs[7].metrics.num_held_tokens > 20


def test_it_guesses_up_to_what_it_is_not_sure_of(sure: Path) -> None:
    def guessed(least: float) -> int:
        (output,) = run(guessing(sure, draft_min_p=least), [(LONG[:20], greedy(60))])
        assert output.metrics.num_held_tokens == output.metrics.num_guessed_tokens
        return output.metrics.num_guessed_tokens

    counts = [guessed(least) for least in (0.0, 0.2, 0.5, 0.999)]
    assert counts[0] > counts[1] > counts[2] > counts[3] == 0


def test_a_step_that_fails_is_run_again_in_halves(sure: Path) -> None:
    asked = [(LONG[:n], greedy(30)) for n in (12, 25, 31)]
    plain = answers(engine_with(sure, 0), asked)
    engine = guessing(sure)
    failed = failing_once(engine._executor)  # type: ignore[arg-type]
    assert answers(engine, asked) == plain
    assert len(failed) > 2


def test_texts_that_are_embedded_beside_it(sure: Path) -> None:
    def embedded(engine: Engine) -> Any:
        found = {}
        engine.add("text", LONG[:20], greedy(8))
        for pooling in ("mean", "last", "cls"):
            engine.embed(pooling, LONG[:33], pooling)
        while engine.has_unfinished():
            found |= {each.request_id: each.pooled for each in engine.step() if each.finished}
        return found

    assert embedded(guessing(sure)) == embedded(engine_with(sure, 0))


def test_what_it_cannot_do_is_said(sure: Path, folder: Path) -> None:
    with pytest.raises(UnsupportedError, match="has no layer that predicts further tokens"):
        guessing(folder)
    with pytest.raises(UsageError, match="contradict each other"):
        EngineConfig(mtp=True, draft_model="x")
    with pytest.raises(UnsupportedError, match="not divided among processes"):
        guessing(sure, tensor_parallel_size=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without such a layer."""
    return save(random_model(CASES["qwen3.5"]), tmp_path_factory.mktemp("model"))


BROKEN: dict[str, Callable[[dict[str, torch.Tensor]], Any]] = {
    "1 missing: mtp.pre_fc_norm_hidden.weight": lambda t: t.pop("mtp.pre_fc_norm_hidden.weight"),
    "1 missing: mtp.layers.0.self_attn.q_proj.weight": lambda t: t.pop("mtp.layers.0.self_attn.q_proj.weight"),
    "1 not part of the model: mtp.layers.0.self_attn.q_proj.bias": lambda t: t.update(
        {"mtp.layers.0.self_attn.q_proj.bias": torch.ones(3)}
    ),
    r"mtp.fc.weight \(expected \[48, 96\], found \[48, 48\]\)": lambda t: t.update({"mtp.fc.weight": torch.ones(48, 48)}),
    "'mtp.fc.weight' .*NaN": lambda t: t["mtp.fc.weight"].fill_(torch.nan),
}


@pytest.mark.parametrize("said", BROKEN)
def test_a_layer_that_is_not_whole_is_refused(said: str, sure: Path, tmp_path: Path) -> None:
    shutil.copytree(sure, tmp_path / "model")
    tensors = load_file(sure / "model.safetensors")
    BROKEN[said](tensors)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        guessing(tmp_path / "model")
    assert engine_with(tmp_path / "model", 0), "of no use is that to who does not guess"


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_made_of_a_folder_has_it_too(kind: str, tmp_path: Path, made: list[tuple[int, int, list[int]]]) -> None:
    saved = with_layer(kind, tmp_path / "folder", vocab_size=4096)
    notes = make_gguf(saved.folder, tmp_path / "model.gguf")
    assert [note for note in notes if "guess" in note] == ([] if kind.startswith(("qwen", "sarvam", "hy")) else [
        "2 tensors that guess further tokens: model.layers.3.embed_tokens.weight, model.layers.3.shared_head.head.weight"
    ])  # fmt: skip
    for source in (saved.folder, tmp_path / "model.gguf"):
        run(guessing(source), [(LONG[:20], DRAWN)])
    count = len(made) // 2
    assert made[:count] == made[count:]
    assert count > 10


def test_who_has_one_is_told_from_the_headers(sure: Path, folder: Path) -> None:
    for path, has in ((sure, True), (folder, False)):
        with open_checkpoint(path) as checkpoint:
            assert facts_of(checkpoint).predicts_further is has


@pytest.mark.parametrize(("kind", "key"), [(KINDS[1], "mtp_num_hidden_layers"), (KINDS[3], "num_nextn_predict_layers")])
def test_random_weights_have_one_where_the_config_says_so(kind: str, key: str, tmp_path: Path) -> None:
    config = save(random_model(CASES[kind]), tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {key: 1}))
    engine = guessing(Path(f"random:{config}"))
    (output,) = run(engine, [(LONG[:20], greedy(9))])
    assert output.metrics.num_guessed_tokens > 0


def test_a_saved_cache_is_for_who_guesses_alike(sure: Path) -> None:
    kinds = [guessing(sure)._executor.cache_kind, engine_with(sure, 0)._executor.cache_kind]
    assert kinds[0] != kinds[1]


@pytest.mark.parametrize("tied", [False, True])
def test_of_a_large_vocabulary_the_first_tokens_are_guessed(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: list[tuple[int, int, list[int]]]
) -> None:
    """As if the head had no other rows; also where these are rounded."""
    saved = with_layer("qwen3.5", tmp_path, vocab_size=400, tie_word_embeddings=tied)
    monkeypatch.setattr("nanovllm_cli.models.mtp.LEAST_GUESSED", 100)
    (output,) = run(guessing(saved.folder), [(LONG[:20], DRAWN)])
    tokens = [*LONG[:20], *output.outputs[0].token_ids]
    for _, end, guesses in made:
        assert guesses == expected_guesses(saved, tokens[:end], len(guesses), among=128)
    assert answers(guessing(saved.folder, quant="int8"), [(LONG[:20], DRAWN)])


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
def test_what_breaks_its_feeding_breaks_no_answer(
    failure: type[BaseException], sure: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, and a failure, while it is fed what a step made of the prompts."""
    asked = [(LONG[:40], ASKED["penalties"]), (LONG[:9], ASKED["random"])]
    plain = answers(engine_with(sure, 0), asked)
    feed, left = MTPDraft._run, [failure]

    def failing(draft: MTPDraft, *args: Any) -> Any:
        if left:
            raise left.pop()
        return feed(draft, *args)

    engine = guessing(sure)
    step = engine.step

    def going_on() -> Any:
        try:
            return step()
        except KeyboardInterrupt:
            return []

    monkeypatch.setattr(MTPDraft, "_run", failing)
    monkeypatch.setattr(engine, "step", going_on)
    assert answers(engine, asked) == plain
    assert not left
