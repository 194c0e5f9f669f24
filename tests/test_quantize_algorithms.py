"""GPTQ, AWQ and the choice of formats in whole models; the texts that they calibrate with."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config

from engines import SMALL, random_model, save
from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.quantization.allocation import with_target
from nanovllm_cli.quantization.original import open_original
from nanovllm_cli.quantization.pipeline import Method, plan_with_target
from nanovllm_cli.quantization.plan import Choices, make_plan
from nanovllm_cli.quantization.texts import MAX_LINE_CHARS, NamedText, bundled_text, windows
from nanovllm_cli.quantization.verify import compare, trace
from nanovllm_cli.quantization.walk import Walk
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.weights.checkpoint import open_checkpoint
from quantizing import TINY, digest_of, plan_of, quantize
from test_quantize_model import IDS, StopAt


def test_calibrated_weights_lose_less(tmp_path: Path) -> None:
    """How much less, and AWQ: tests/test_algorithms_on_tiny.py. Fewer tokens than these are too few to tell."""
    losses = {}
    for algorithm in ("rtn", "gptq"):
        card = quantize("int4:group=32", tmp_path / algorithm, algorithm=algorithm, verify_tokens=4096, num_samples=32)
        assert card is not None
        losses[algorithm] = card.quality.kl_mean
    assert losses["gptq"] < 0.7 * losses["rtn"]


@pytest.mark.parametrize("algorithm", ["gptq", "awq"])
def test_a_calibrated_run_that_is_resumed_gives_the_same_bytes(tmp_path: Path, algorithm: str) -> None:
    layers = ((r"layers\.[12]\.", "int4:group=32"), (".", "keep"))  # one before them that stays
    quantize("int4", tmp_path / "whole", algorithm=algorithm, tensor_types=layers, num_samples=2)
    stop = StopAt("quantizing", 0, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        quantize("int4", tmp_path / "resumed", algorithm=algorithm, tensor_types=layers, num_samples=2, progress=stop)
    assert (tmp_path / ".resumed.quantizing" / "blocks.1.safetensors").exists()
    quantize("int4", tmp_path / "resumed", algorithm=algorithm, tensor_types=layers, num_samples=2)
    assert digest_of(tmp_path / "resumed") == digest_of(tmp_path / "whole")
    before, after = (load_file(folder / "model.safetensors") for folder in (TINY, tmp_path / "whole"))
    norms = [name for name in before if name.endswith("layernorm.weight")]
    assert all(after[name].dtype == before[name].dtype for name in norms)
    changed = {name.split(".")[2] for name in norms if not torch.equal(after[name], before[name])}
    assert changed == ({"1", "2"} if algorithm == "awq" else set())


def test_a_head_beside_calibrated_layers_is_rounded_to_nearest_and_resumed(tmp_path: Path) -> None:
    layers = ((r"layers\.1\.self_attn\.o", "int4:group=32"), (r"layers", "keep"))
    stop = StopAt("writing", 0, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        quantize("int4", tmp_path / "m", algorithm="gptq", tensor_types=layers, head="int8", num_samples=1, progress=stop)
    quantize("int4", tmp_path / "m", algorithm="gptq", tensor_types=layers, head="int8", num_samples=1)
    written = load_file(tmp_path / "m" / "model.safetensors")
    head = load_file(TINY / "model.safetensors")["model.embed_tokens.weight"].float()
    scales = written["lm_head.weight_scale"].float()
    assert float((written["lm_head.weight"].float() - head / scales).abs().max()) <= 0.5 + 1e-3
    assert torch.allclose(scales, head.abs().amax(1, keepdim=True) / 127, rtol=2**-7)


def test_awq_writes_its_norms_into_a_gguf_file_too(tmp_path: Path) -> None:
    """Without them the layer would see inputs that its columns were not scaled for."""
    layer = ((r"blk\.1\.(ffn_up|ffn_gate)", "q8_0"), (".", "keep"))
    quantize("q8_0", tmp_path / "m.gguf", algorithm="awq", tensor_types=layer, num_samples=1)
    norm = "model.layers.1.post_attention_layernorm.weight"
    with open_checkpoint(tmp_path / "m.gguf") as written:
        after = written.tensor("blk.1.ffn_norm.weight").float()
    assert not torch.allclose(after, load_file(TINY / "model.safetensors")[norm].float(), rtol=0.01)
    found = compare(*(trace(path, IDS, "float32", NullProgress()) for path in (tmp_path / "m.gguf", TINY)), [], tolerance=0.03)
    assert found.first_layer is None, found.first_layer


def test_gptq_has_no_grid_for_block_types(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="q4_0"):
        quantize("q4_0", tmp_path / "m.gguf", algorithm="gptq", num_samples=1)


@pytest.mark.parametrize(("to", "target"), [("int4", 9.0), ("q4_k_m", 5.0)])
def test_target_bpw_is_kept_and_q_k_v_share_a_format(to: str, target: float) -> None:
    with open_original("tiny", TINY) as original:
        choices = Choices(to, tensor_types=((r"layers\.3\.mlp\.down|blk\.3\.ffn_down", "keep"),))
        plan = make_plan(original, choices)
        method = Method("rtn", bundled_text("calibration"), 4)
        chosen = plan_with_target(original, plan, target, method, NullProgress())
        assert target - 0.5 < chosen.bits_a_weight <= target
        formats = {item.weight.ours: item.format for item in chosen.items}
        assert formats["blocks.3.down.weight"] is None
        for i in range(4):
            assert len({formats[f"blocks.{i}.{part}.weight"] for part in "qkv"}) == 1
        with pytest.raises(UsageError, match="can't be reached"):
            plan_with_target(original, plan, 2.0, method, NullProgress())


def test_the_folder_in_transformers_says_what_it_says_here(tmp_path: Path) -> None:
    """64 greedy tokens, in each format that it loads."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from transformers import AutoModelForCausalLM

    from nanovllm_cli import LLM, EngineConfig, SamplingParams

    for spec in ("int8", "fp8", "int4:group=32"):
        out = tmp_path / spec.replace(":", "-")
        quantize(spec, out)
        theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        expected = theirs.generate(torch.tensor([IDS]), max_new_tokens=64, do_sample=False, eos_token_id=None)[0]
        with LLM(out, config=EngineConfig(dtype="float32", device="cpu", max_model_len=128)) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
            found = llm.generate(IDS, params)[0].outputs[0].token_ids
        assert list(found) == expected[len(IDS) :].tolist(), spec


# ---- texts ----


def pieces(name: str, text: str) -> list[list[int]]:
    with open_original("tiny", TINY) as original:
        return list(windows(original.tokenizer(), NamedText(name, text), original.spec.vocab_size))


def test_bundled_texts_have_no_document_in_common() -> None:
    calibration, verification = (
        set(bundled_text(split).text.split("\n\n")) for split in ("calibration", "verification")
    )
    long = {
        paragraph for paragraph in calibration & verification if len(paragraph) > 200 and "<tools>" not in paragraph
    }
    assert not long


def test_a_text_comes_in_windows() -> None:
    found = pieces("a.txt", "word " * 2000)
    assert {len(piece) for piece in found[:-1]} == {512}
    assert sum(map(len, found)) >= 2000


def test_lines_of_json_may_hold_text_prompt_or_messages() -> None:
    lines = '{"text": "one two"}\n\n{"prompt": "three\u2028four"}\r\n{"messages": [{"role": "user", "content": "five"}]}\n'
    first, second, third = pieces("a.jsonl", lines)
    with open_original("tiny", TINY) as original:
        tokenizer = original.tokenizer()
        assert tokenizer.decode(first).strip() == "one two"
        assert tokenizer.decode(second).strip() == "three\u2028four"
        assert "<|im_start|>user\nfive" in tokenizer.decode(third, skip_special_tokens=False)


@pytest.mark.parametrize(
    "line", ["{", "[]", "3", '{"text": 3}', '{"messages": []}', '{"messages": [3]}', '{"other": "x"}', "[" * 100_000,
     '{"messages": 3}', '{"messages": [{"role": "user", "content": "a"}, 3]}', " " * MAX_LINE_CHARS + "{}"],
    ids=lambda line: line[:40],
)  # fmt: skip
def test_a_line_that_means_nothing_is_named(line: str) -> None:
    with pytest.raises(UsageError, match="line 2"):
        pieces("a.jsonl", '{"text": "fine"}\n' + line + "\n")


class Letters:
    """A tokenizer of a token a letter, behind one of its own, and with another at the end of a text."""

    chat_templates: ClassVar[dict[str, str]] = {}

    def __init__(self, prefix: list[int]) -> None:
        self.prefix_ids = tuple(prefix)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        letters = [ord(letter) for letter in text]
        return [*self.prefix_ids, *letters, 1] if add_special_tokens else letters


@pytest.mark.parametrize(
    ("prefix", "length", "lengths"),
    [([], 512, [512]), ([], 513, [512]), ([], 514, [512, 2]), ([7], 512, [512, 2]), ([7], 511, [512]), ([], 1, []), ([7], 0, [])],
)
def test_each_window_begins_as_a_text_does_and_is_no_longer(prefix: list[int], length: int, lengths: list[int]) -> None:
    """What is one token long has no next one."""
    text = ("abcdefg" * 100)[:length]
    found = list(windows(cast(Tokenizer, Letters(prefix)), NamedText("a.txt", text), 128))
    assert list(map(len, found)) == lengths
    assert all(piece[: len(prefix)] == prefix for piece in found)
    assert text.startswith("".join(chr(token) for piece in found for token in piece[len(prefix) :]))


def test_tokens_that_the_model_has_no_row_for_are_left_out() -> None:
    assert list(windows(cast(Tokenizer, Letters([])), NamedText("a.txt", "abzba"), 122)) == [[97, 98, 98, 97]]


def test_messages_need_a_chat_template() -> None:
    text = NamedText("a.jsonl", '{"messages": [{"role": "user", "content": "a"}]}')
    with pytest.raises(UsageError, match="line 1: messages, and the model has no chat template"):
        list(windows(cast(Tokenizer, Letters([])), text, 128))


# ---- formats under an average size ----


def test_where_every_layer_is_fixed_a_target_has_nothing_to_choose() -> None:
    plan = plan_of("int8", tensor_types=((".", "int8"),), head="keep")
    with pytest.raises(UsageError, match="nothing to choose"):
        with_target(plan, 5.0, cast(Walk, None), NullProgress())


def test_rows_that_no_type_of_gguf_has_are_told(tmp_path: Path) -> None:
    source = save(random_model(Qwen3Config(**SMALL | {"intermediate_size": 96, "num_hidden_layers": 1})), tmp_path)
    with open_original("m", source) as original:
        plan = make_plan(original, Choices("q4_k_m"))
        with pytest.raises(UnsupportedError, match="no format of --target-bpw has rows of 48"):
            with_target(plan, 5.0, Walk(original, [[1, 2, 3]], NullProgress()), NullProgress())


def test_a_plan_names_its_sizes() -> None:
    record = plan_of("int8").as_json()
    weight = record["weights"]["model.layers.0.mlp.up_proj.weight"]
    assert weight == {"shape": [640, 256], "format": "int8", "bytes": 640 * 256 + 640 * 2}
