"""llama.cpp itself on the GGUF files that `convert` writes. llama-cpp-python is no dependency: without it, skipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines import worker_for
from nanovllm_cli import LLM, EngineConfig, SamplingParams
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.source import resolve
from test_quant_engine import logits_of

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

PROMPTS = ("Once upon a time", "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n")
TEXTS = (
    "Once upon a time, there was a little girl named Lily.",
    "def f(x):\n    return {'a': x[1:-1]}  # done\n\n\t\tend",
    "  spaces   and\ttabs \n\n\n 12345 6,789.01",
    "I'm sure they'LL've gone; it'd be O'Brien's",
    "Straße, naïve café, Слово, λόγος 你好，世界。こんにちは 안녕 مرحبا 😀👨‍👩‍👧",
    "<|im_start|>system\nYou are terse.<|im_end|>\n<think>\nhm\n</think>\n<tool_call>{}</tool_call><|endoftext|>",
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The bundled model as GGUF of a type."""
    folder = tmp_path_factory.mktemp("gguf")

    def write(outtype: str) -> Path:
        path = folder / f"tiny-{outtype}.gguf"
        if not path.exists():
            with convert.open_source(resolve("tiny").path) as source:
                convert.write(source, convert.plan(source, "gguf", outtype), path)
        return path

    return write


def peer(path: Path) -> Any:
    return llama_cpp.Llama(str(path), n_ctx=512, n_threads=2, logits_all=True, verbose=False, type_k=0, type_v=0)


def peer_logits(model: Any, ids: list[int]) -> np.ndarray:
    model.reset()
    model.eval(ids)
    return np.array(model.scores[: len(ids)], dtype=np.float64)


def test_sixty_four_greedy_tokens_of_an_f16_file_are_ours(written: Callable[[str], Path]) -> None:
    path = written("f16")
    model = peer(path)
    with LLM(path, config=EngineConfig(max_model_len=512, dtype="float32")) as ours:
        for prompt in PROMPTS:
            ids = ours.tokenizer.encode(prompt)
            params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
            wanted = list(ours.generate([ids], params)[0].outputs[0].token_ids)
            model.reset()
            steps = model.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0)
            assert [next(steps) for _ in range(64)] == wanted


@pytest.mark.parametrize(
    ("outtype", "relative"), [("q8_0", 0.03), ("q6_k", 0.08), ("q5_1", 0.15), ("q4_k", 0.25), ("q4_0", 0.3)]
)
def test_logits_of_block_types_are_within_their_noise(
    written: Callable[[str], Path], outtype: str, relative: float
) -> None:
    """Against the unrounded model in llama.cpp, relative to the spread of its logits."""
    ids = peer(written("f16")).tokenize(TEXTS[0].encode(), add_bos=False)
    exact, rounded = (peer_logits(peer(written(kind)), ids) for kind in ("f16", outtype))
    error = np.sqrt(np.mean((rounded - exact) ** 2)) / exact.std()
    assert error < relative
    assert np.isfinite(rounded).all()


def test_llama_cpp_makes_the_same_tokens_of_our_file(written: Callable[[str], Path]) -> None:
    path = written("f16")
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    with convert.open_source(path) as source:
        ours = Tokenizer.from_gguf(source.config)
    for text in TEXTS:
        assert model.tokenize(text.encode(), add_bos=True, special=True) == ours.encode(text)
        plain = model.tokenize(text.encode(), add_bos=False, special=False)
        assert plain == ours.encode(text, add_special_tokens=False, parse_special=False)
    assert model.token_eos() == ours.eos_id


def test_llama_cpp_reads_a_split_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    with convert.open_source(resolve("tiny").path) as source:
        made = convert.plan(source, "gguf", "f16", split_bytes=2_000_000)
        convert.write(source, made, tmp_path / "tiny")
    parts = sorted((tmp_path / "tiny").iterdir())
    assert len(parts) > 2
    assert np.isfinite(peer_logits(peer(parts[0]), [1, 2, 3])).all()


@pytest.mark.parametrize(
    ("kind", "activations", "bar"),
    [("Q8_0", "rounded", 1.5e-2), ("Q8_0", "exact", 1.5e-2), ("Q4_K_M", "rounded", 5e-2), ("Q4_K_M", "exact", 5e-2)],
)
def test_files_that_llama_cpp_quantized_give_us_its_logits(
    written: Callable[[str], Path], kind: str, activations: str, bar: float, tmp_path: Path
) -> None:
    """Blocks as they are in the file, on both sides, computed in float32.

    What is left at Q8_0, 1.15e-2 (relative L2 norm; by the largest magnitude 0.6e-2), is llama.cpp's rounding of activations to
    int8: of the same weights in F32 its logits equal ours to 6e-7; at Q8_0 its own are 1.5e-2 away from that, ours 0.9e-2.
    Rounding as it does gives other codes from the third token on, because one that falls to the other side in the first layer
    changes all that follow. All six TEXTS: 1.1e-2 to 1.8e-2 by the L2 norm, 0.6e-2 to 1.7e-2 by the largest magnitude; of
    stories260K 0.6e-2 to 0.9e-2, and 1.2e-2 to 2.1e-2.
    """
    path = tmp_path / "theirs.gguf"
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    assert llama_cpp.llama_model_quantize(str(written("f16")).encode(), str(path).encode(), settings) == 0
    ids = peer(path).tokenize(TEXTS[0].encode(), add_bos=False)
    theirs = peer_logits(peer(path), ids)
    ours = logits_of(worker_for(path, dtype="float32", activations=activations), [ids]).double().numpy()
    assert np.linalg.norm(ours - theirs) / np.linalg.norm(theirs) < bar
