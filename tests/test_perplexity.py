"""`nanovllm perplexity`: windows as llama-perplexity has them, and numbers as float64 makes them of transformers' logits."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from nanovllm_cli.engine import cpu_platform, worker
from nanovllm_cli.engine.cuda_platform import CudaPlatform
from nanovllm_cli.errors import CheckpointError, DoesNotFitError, RequestError, UsageError
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.quantization.card import measure, windows_of
from nanovllm_cli.quantization.logits import ON_CPU, STEP, MeasuredModel
from nanovllm_cli.quantization.original import open_original
from nanovllm_cli.quantization.perplexity import check_fits, cut, perplexity, text_ids
from nanovllm_cli.quantization.quality import Likelihood
from nanovllm_cli.quantization.texts import NamedText, bundled_text
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.random_weights import RandomCheckpoint
from quantizing import TINY
from test_cli_driver import Result, nanovllm

BOS = 4087
TEXT = bundled_text("verification").text[:6000]


def measured(home: Path, *words: str, stdin: str | None = None) -> Result:
    return nanovllm(home, "perplexity", *words, stdin=stdin)


# ---- windows ----


def test_windows_are_the_next_tokens_and_the_rest_is_none() -> None:
    found = cut(range(29), [], 8)
    assert [list(window) for window in found.ids] == [list(range(i, i + 8)) for i in (0, 8, 16)]
    assert (found.first, found.scored) == (4, 9), "tokens 5, 6 and 7 of each"
    assert (cut(range(29), [], 8, most=2).scored, cut(range(29), [], 8, most=9).scored) == (6, 9)
    whole = cut(range(29), [], 8, whole=True)
    assert (whole.first, whole.scored) == (0, 21)
    assert cut(range(90), [], 9).first == 4


def test_bos_stands_in_place_of_a_windows_first_token() -> None:
    found = cut([BOS, *range(19)], [BOS], 10)
    assert [list(window) for window in found.ids] == [[BOS, *range(9)], [BOS, *range(10, 19)]]
    assert found.first == 5
    assert cut([1, 2, *range(18)], [1, 2], 10, whole=True).first == 1, "nobody scores what stands there anyway"


@pytest.mark.parametrize(
    ("count", "ctx_size", "says"), [(7, 8, "7 tokens, and a window 8"), (100, 7, "too short"), (9, 0, "too short")]
)
def test_what_is_too_short_is_refused(count: int, ctx_size: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        cut(range(count), [], ctx_size)


def test_a_text_is_its_tokens_without_the_last_newline_and_control_tokens_are_text() -> None:
    tokenizer = Tokenizer.from_folder(TINY)
    text = "One<|im_end|> two.\n"
    ids = text_ids(tokenizer, NamedText("a", text + "\n"))
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert not tokenizer.control_ids.intersection(ids)


# ---- numbers ----


def their_logits(path: Path, windows: Sequence[Sequence[int]]) -> torch.Tensor:
    """[windows, tokens, V] float64, by transformers in float32."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return torch.cat([model(torch.tensor([list(ids)])).logits.double() for ids in windows])


def as_llama_perplexity(logits: torch.Tensor, tokens: Sequence[int], n_ctx: int) -> tuple[float, float]:
    """Its sums, in float64: position by position of the second half, with E[x²] - E[x]² over count - 1."""
    nll = nll2 = count = 0.0
    for chunk in range(len(tokens) // n_ctx):
        for position in range(n_ctx // 2, n_ctx - 1):
            row = logits[chunk, position]
            value = float(torch.logsumexp(row, -1) - row[tokens[chunk * n_ctx + position + 1]])
            nll, nll2, count = nll + value, nll2 + value * value, count + 1
    mean = nll / count
    return math.exp(mean), math.exp(mean) * math.sqrt((nll2 / count - mean * mean) / (count - 1))


def with_bos(folder: Path) -> Path:
    """The bundled model, whose tokenizer puts <|endoftext|> before a text."""
    shutil.copytree(TINY, folder)
    data = json.loads((TINY / "tokenizer.json").read_text())
    special = {"id": "<|endoftext|>", "ids": [BOS], "tokens": ["<|endoftext|>"]}
    single = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    data["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {"<|endoftext|>": special}
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(data))
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    config |= {"add_bos_token": True, "bos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("bos", [False, True])
def test_a_perplexity_is_that_of_transformers_in_llama_cpps_windows(tmp_path: Path, bos: bool) -> None:
    from transformers import AutoTokenizer

    folder = with_bos(tmp_path / "m") if bos else TINY
    (tmp_path / "a.txt").write_text(TEXT)
    n_ctx = 65
    tokens = AutoTokenizer.from_pretrained(folder)(TEXT.removesuffix("\n"), split_special_tokens=True).input_ids
    assert (tokens[0] == BOS) == bos
    windows = [tokens[i * n_ctx : (i + 1) * n_ctx] for i in range(len(tokens) // n_ctx)]
    if bos:
        windows = [[BOS, *window[1:]] for window in windows]
    value, error = as_llama_perplexity(their_logits(folder, windows), tokens, n_ctx)
    words = [str(folder), "-f", "a.txt", "-c", str(n_ctx), "--dtype", "float32", "--json"]
    found = json.loads(measured(tmp_path, *words).out)
    assert found["perplexity"]["value"] == pytest.approx(value, rel=1e-5)
    assert found["perplexity"]["error"] == pytest.approx(error, rel=1e-4)
    assert (found["chunks"], found["tokens"], found["dtype"]) == (len(windows), len(windows) * 32, "float32")
    assert (found["ctx_size"], found["scored"], found["text"]) == (n_ctx, "second half", "a.txt")


def test_of_whole_windows_it_is_the_quality_cards() -> None:
    text = bundled_text("verification")
    with open_original("tiny", TINY) as original:
        tokenizer = original.tokenizer()
        card = measure(original.checkpoint, original.checkpoint, windows_of(tokenizer, text, 1024, 4096), NullProgress())
        windows = cut(text_ids(tokenizer, text, parse_special=True), tokenizer.prefix_ids, 512, most=2, whole=True)
        found = perplexity(MeasuredModel(original.checkpoint, 512), windows, NullProgress())
    assert windows.scored == card.tokens
    assert found.value == pytest.approx(card.before.value, rel=1e-6)
    assert found.error == pytest.approx(card.before.error, rel=1e-5)


def test_likelihoods_of_extreme_logits_are_numpys() -> None:
    rng = np.random.default_rng(5)
    logits = np.concatenate([rng.normal(size=(40, 700)) * 30, rng.normal(size=(40, 700)) + 1e4]).astype(np.float32)
    targets = rng.integers(0, 700, 80)
    found = Likelihood()
    for part in np.array_split(np.arange(80), 3):
        found.add(torch.from_numpy(logits[part]), torch.from_numpy(targets[part]))
    wide = logits.astype(np.float64)
    top = wide.max(1)
    nll = np.log(np.exp(wide - top[:, None]).sum(1)) + top - wide[np.arange(80), targets]
    assert found.tokens == 80
    assert found.perplexity().value == pytest.approx(math.exp(nll.mean()), rel=1e-6)


@pytest.mark.parametrize("length", [40, 1100])
def test_rows_are_the_same_to_the_bit_however_windows_are_put_together(length: int) -> None:
    """Several at once where they are short, several steps where they are long."""
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, 4000, (length - i,), generator=generator).tolist() for i in range(3)]
    with open_checkpoint(TINY) as checkpoint:
        model = MeasuredModel(checkpoint, length)
        assert (model.at_once > 1) == (length < STEP)
        alone = [model.hidden(ids)[17:-1] for ids in texts]
        if model.at_once > 1:
            assert torch.equal(model.scored(texts, 17), torch.cat(alone))
        for ids, wanted in zip(texts, alone, strict=True):
            assert torch.equal(model.scored([ids], 17), wanted)


@pytest.mark.parametrize("length", [40, 600])
def test_windows_of_a_model_with_states_begin_anew_and_do_not_meet(length: int) -> None:
    ids = [torch.randint(0, 1000, (length,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(3)]
    config = {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1000,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_key_head_dim": 16, "linear_num_value_heads": 4, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 1024, "tie_word_embeddings": True, "hidden_act": "silu",
    }  # fmt: skip
    model = MeasuredModel(RandomCheckpoint(config), length)
    alone = [model.hidden(each)[:-1] for each in ids]
    assert not torch.equal(alone[0], alone[1])
    assert all(torch.equal(model.scored([each]), wanted) for each, wanted in zip(ids, alone, strict=True))
    if length < STEP:
        assert torch.equal(model.scored(ids), torch.cat(alone))


@needs_emulation
def test_a_gpu_measures_what_a_cpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows side by side, the last norm being the head's own there, and two models after each other."""
    config = replace(ON_CPU, dtype="bfloat16")
    ids = torch.randint(0, 4000, (3 * 24,), generator=torch.Generator().manual_seed(3)).tolist()
    windows = cut(ids, [], 24)
    with open_checkpoint(TINY) as checkpoint:
        wanted = perplexity(MeasuredModel(checkpoint, 24, config), windows, NullProgress())
        monkeypatch.setattr(worker, "select_platform", lambda config, progress: CudaPlatform(config, EmulatedDevice()))
        model = MeasuredModel(checkpoint, 24, config)
        found = perplexity(model, windows, NullProgress())
        same = measure(checkpoint, checkpoint, windows.ids, NullProgress(), first=windows.first, config=config)
    assert model.at_once > 1
    assert found.value == pytest.approx(wanted.value, rel=0.01)
    assert same.before.value == same.after.value == pytest.approx(found.value)
    assert same.kl_mean == 0


def test_logits_that_are_no_numbers_are_told(tmp_path: Path) -> None:
    changed = changed_copy(tmp_path / "m", lambda weight: weight * 1e38)
    with open_checkpoint(changed) as checkpoint:
        model = MeasuredModel(checkpoint, 16)
        with pytest.raises(RequestError, match="not finite"):
            perplexity(model, cut(range(64), [], 16), NullProgress())


def test_what_does_not_fit_is_told_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_checkpoint(TINY) as checkpoint:
        monkeypatch.setattr(cpu_platform, "available_bytes", lambda: 1 << 30)
        with pytest.raises(DoesNotFitError, match="1000000 tokens need"):
            MeasuredModel(checkpoint, 1_000_000)
        with pytest.raises(DoesNotFitError, match="what is kept of 2,150,000 tokens takes"):
            measure(checkpoint, checkpoint, [[1] * 500] * 4300, NullProgress())


# ---- two models ----


def changed_copy(folder: Path, change: Any) -> Path:
    shutil.copytree(TINY, folder)
    tensors = load_file(TINY / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = change(tensors[name].clone())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_what_is_lost_is_the_divergence_of_transformers_logits(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    other = changed_copy(tmp_path / "m", lambda weight: weight * 1.5)
    (tmp_path / "a.txt").write_text(TEXT[:1500])
    tokens = AutoTokenizer.from_pretrained(TINY)(TEXT[:1500]).input_ids
    n_ctx, count = 96, len(tokens) // 96
    windows = [tokens[i * n_ctx : (i + 1) * n_ctx] for i in range(count)]
    both = [their_logits(path, windows) for path in (TINY, other)]
    p, q = (torch.log_softmax(logits[:, n_ctx // 2 : -1], -1).flatten(0, 1) for logits in both)
    kl = (p.exp() * (p - q)).sum(-1)
    words = ["tiny", "./m", "-f", "a.txt", "--parse-special", "-c", str(n_ctx), "--dtype", "float32"]
    found = json.loads(measured(tmp_path, *words, "--json").out)
    quality = found["quality"]
    assert (found["model"], found["other"], quality["tokens"]) == ("tiny", "./m", count * 47)
    assert quality["kl_mean"] == pytest.approx(float(kl.mean()), rel=1e-3)
    assert quality["kl_max"] == pytest.approx(float(kl.max()), rel=1e-3)
    assert quality["kl_median"] == pytest.approx(float(kl.quantile(0.5)), rel=1e-2)
    assert quality["same_top"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()), abs=0.01)
    for side, logits in (("before", both[0]), ("after", both[1])):
        value, error = as_llama_perplexity(logits, tokens, n_ctx)
        assert quality[side] == {"value": pytest.approx(value, rel=1e-4), "error": pytest.approx(error, rel=1e-3)}

    mean = quality["kl_mean"]
    passed = measured(tmp_path, *words, "--fail-above", f"{mean * 1.01}")
    failed = measured(tmp_path, *words, "--fail-above", f"{mean * 0.99}")
    assert (passed.code, failed.code) == (0, 7)
    assert passed.out == failed.out, "what was found is told either way"
    assert f"KL divergence, mean             {mean:.5f} ± " in failed.out
    assert "perplexity of ./m" in failed.out
    assert failed.err.splitlines()[-1].startswith("error: the mean KL divergence is")


def test_a_model_has_lost_nothing_against_itself(tmp_path: Path) -> None:
    quality = json.loads(measured(tmp_path, "tiny", str(TINY), "-c", "32", "--chunks", "2", "--json").out)["quality"]
    assert (quality["kl_mean"], quality["kl_max"], quality["same_top"], quality["tokens"]) == (0.0, 0.0, 1.0, 30)
    assert quality["before"] == quality["after"]


def test_models_that_say_other_tokens_are_not_compared(tmp_path: Path) -> None:
    other = with_bos(tmp_path / "m")
    result = measured(tmp_path, "tiny", str(other), "-c", "32", "--chunks", "1")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: the two tokenizers cut the text otherwise, first at token 0: [")


# ---- the command ----


def test_the_numbers_are_on_stdout_and_the_rest_is_not(tmp_path: Path) -> None:
    result = measured(tmp_path, "tiny", "--chunks", "2", "-c", "64")
    assert result.code == 0
    first, second = result.out.splitlines()
    assert first.startswith("perplexity  ")
    assert second == "scored      62 tokens of the bundled verification text: the second half of 2 windows of 64"
    assert result.err.splitlines()[-1].endswith("tokens/s, 0 s")
    whole = measured(tmp_path, "tiny", "--chunks", "1", "-c", "64", "--all", "-q")
    assert whole.out.splitlines()[1] == "scored      63 tokens of the bundled verification text: a window of 64"
    assert whole.err == ""


def test_a_text_may_come_from_standard_input(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT[:500])
    words = ["tiny", "-c", "32", "-q", "--no-parse-special", "--text"]
    from_file, from_stdin = measured(tmp_path, *words, "a.txt"), measured(tmp_path, *words, "-", stdin=TEXT[:500])
    assert from_file.out.replace("a.txt", "standard input") == from_stdin.out
    assert from_file.code == 0


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([], 2, "no model was named"),
        (["tiny", "tiny", "tiny"], 2, "got unexpected extra argument"),
        (["tiny", "--fail-above", "1"], 2, "--fail-above has no meaning without OTHER"),
        (["tiny", "tiny", "--fail-above", "nan"], 2, "invalid value for '--fail-above'"),
        (["tiny", "tiny", "--fail-above", "-1"], 2, "invalid value for '--fail-above'"),
        (["tiny", "--chunks", "0"], 2, "--chunks 0 leaves nothing to measure"),
        (["tiny", "wiki.test.raw"], 2, "wiki.test.raw is a text, and no form of tiny"),
        (["tiny", "-c", "0"], 2, "a window of 0 is too short"),
        (["tiny", "-c", "4K"], 5, "a window has 4,096 tokens, and the model's context 2,048"),
        (["tiny", "-c", "1M"], 2, "the text has"),
        (["tiny", "-f", "short.txt"], 2, "the text has 1 token, and a window 512"),
        (["tiny", "-f", "missing.txt"], 2, "there is no file missing.txt"),
        (["tiny", "--dtype", "float16"], 6, "float16 is not computed on a CPU"),
        (["tiny", "-t", "0"], 2, "--threads must be at least 1"),
        (["no/such/model", "--offline"], 3, "no/such is not in the cache"),
        (["tiny", "--stride", "4"], 2, "no such option: --stride"),
    ],
)
def test_mistakes_are_told_in_two_lines(tmp_path: Path, words: list[str], code: int, says: str) -> None:
    (tmp_path / "short.txt").write_text("a")
    result = measured(tmp_path, *words)
    assert (result.code, result.out) == (code, ""), result.err
    assert result.err.startswith(f"error: {says}")
    assert result.err.count("\n") <= 2


def test_tokens_that_the_model_lacks_are_told() -> None:
    with open_original("tiny", TINY) as original, pytest.raises(CheckpointError, match="token 4096"):
        check_fits(cut([4096] * 8, [], 8), original.spec)
