"""llama.cpp itself on the GGUF files that `convert` writes. llama-cpp-python is no dependency: without it, skipped."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from engines import worker_for
from nanovllm_cli import LLM, EngineConfig, SamplingParams
from nanovllm_cli.quant.cpu_formats import make_storage
from nanovllm_cli.quant.format import Blocks
from nanovllm_cli.quant.rows import BlockRows
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.weights import convert
from nanovllm_cli.weights.source import resolve
from test_quant_engine import logits_of

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

STORIES = Path(__file__).resolve().parents[2] / "shared" / "data" / "stories260K" / "stories260K.gguf"
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


@pytest.fixture(scope="module")
def quantized(written: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The bundled model as llama.cpp's own quantizer writes it; `as_f32`: and then back, as F32, which loses nothing."""
    folder = tmp_path_factory.mktemp("theirs")

    def write(kind: str, as_f32: bool = False) -> Path:
        path = folder / f"{kind}{'-f32' if as_f32 else ''}.gguf"
        if not path.exists():
            source = write(kind) if as_f32 else written("f16")
            settings = llama_cpp.llama_model_quantize_default_params()
            settings.allow_requantize = as_f32
            settings.ftype = getattr(llama_cpp, "LLAMA_FTYPE_ALL_F32" if as_f32 else f"LLAMA_FTYPE_MOSTLY_{kind}")
            assert llama_cpp.llama_model_quantize(str(source).encode(), str(path).encode(), settings) == 0
        return path

    return write


def relative(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def logits_on_both_sides(ours: Path, activations: str, theirs: Path, text: str) -> tuple[np.ndarray, np.ndarray]:
    model = peer(theirs)
    ids = model.tokenize(text.encode(), add_bos=False)
    worker = worker_for(ours, dtype="float32", activations=activations)
    return logits_of(worker, [ids]).double().numpy(), peer_logits(model, ids)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K_M"])
def test_files_that_llama_cpp_quantized_are_the_numbers_that_it_takes_them_for(
    quantized: Callable[..., Path], kind: str
) -> None:
    """Our logits of the blocks, with activations as they are, against its own of the F32 file that it makes of them."""
    ours, theirs = logits_on_both_sides(quantized(kind), "exact", quantized(kind, as_f32=True), TEXTS[0])
    assert relative(ours, theirs) < 1e-5


@pytest.mark.parametrize(
    ("kind", "activations", "bar"),
    [("Q8_0", "rounded", 1.5e-2), ("Q8_0", "exact", 1.5e-2), ("Q4_K_M", "rounded", 5e-2), ("Q4_K_M", "exact", 5e-2)],
)
def test_files_that_llama_cpp_quantized_give_us_its_logits(
    quantized: Callable[..., Path], kind: str, activations: str, bar: float
) -> None:
    """Blocks as they are in the file, on both sides, all else in float32.

    At Q8_0 no bar below 1.2e-2 could be held, by anybody. llama.cpp rounds activations to int8, which moves its own logits by
    1.15e-2 to 1.8e-2 on TEXTS (this one: 1.15e-2; the test above holds ours to what they were before). The same rounding in
    another implementation does not give the same codes: an embedding of Q8_0 is whole numbers times a scale, so behind the
    first norm some lie at 94.5 exactly and the last bit decides, and each code that falls to the other side moves a tenth of
    the codes of the next layer. By its very rule, in float64, 1.0e-2 to 1.9e-2 are left; llama.cpp with flash attention is
    1.15e-2 to 1.7e-2 away from itself, with an F16 cache 1.1e-2 to 1.8e-2.
    """
    path = quantized(kind)
    ours, theirs = logits_on_both_sides(path, activations, path, TEXTS[0])
    assert relative(ours, theirs) < bar


@pytest.mark.skipif(not STORIES.exists(), reason="the stories260K checkpoint is not beside this project")
@pytest.mark.parametrize("text", TEXTS)
def test_a_smaller_model_as_llama_cpp_quantized_it_gives_us_its_logits(text: str, tmp_path: Path) -> None:
    """stories260K, to 1e-2, whatever the text."""
    path = tmp_path / "stories.gguf"
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    assert llama_cpp.llama_model_quantize(str(STORIES).encode(), str(path).encode(), settings) == 0
    ours, theirs = logits_on_both_sides(path, "rounded", path, text)
    assert relative(ours, theirs) < 1e-2


# What a matrix is multiplied with and what it gives, as llama.cpp names its nodes.
NODES = {
    "blk.{}.attn_q": ("attn_norm-{}", "Qcur-{}"),
    "blk.{}.attn_k": ("attn_norm-{}", "Kcur-{}"),
    "blk.{}.attn_v": ("attn_norm-{}", "Vcur-{}"),
    "blk.{}.ffn_gate": ("ffn_norm-{}", "ffn_gate-{}"),
    "blk.{}.ffn_up": ("ffn_norm-{}", "ffn_up-{}"),
    "blk.{}.ffn_down": ("ffn_swiglu-{}", "ffn_out-{}"),
}
MATMULS = {name.format(i): [node.format(i) for node in nodes] for name, nodes in NODES.items() for i in range(4)}
MATMULS["token_embd"] = ["result_norm", "result_output"]


def peer_nodes(path: Path, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """What llama.cpp computes on its way, a row a token: the first node of each name that MATMULS has."""
    from llama_cpp._ggml import libggml

    libggml.ggml_get_name.restype = ctypes.c_char_p
    libggml.ggml_get_data.restype = ctypes.c_void_p
    libggml.ggml_nelements.restype = ctypes.c_int64
    wanted, found = {name for nodes in MATMULS.values() for name in nodes}, {}

    @llama_cpp.ggml_backend_sched_eval_callback
    def see(tensor: int, is_question: bool, _: object) -> bool:
        node = ctypes.c_void_p(tensor)
        name = libggml.ggml_get_name(node).decode()
        if not is_question and name in wanted - found.keys():
            data = (ctypes.c_float * libggml.ggml_nelements(node)).from_address(libggml.ggml_get_data(node))
            found[name] = np.array(data).reshape(len(ids), -1)
        return True

    settings = llama_cpp.llama_context_default_params()
    settings.cb_eval = see
    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_context_default_params", lambda: settings)
    peer_logits(peer(path), ids)
    return found


def test_every_matmul_of_a_q8_0_file_gives_what_llama_cpp_gets_of_the_same_rows(
    quantized: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded as it rounds them, but for block scales, which are F16 there: half of its last bit is 4.9e-4. As they are: 1e-2."""
    blocks = {tensor.name.removesuffix(".weight"): tensor for tensor in gguf.GGUFReader(quantized("Q8_0")).tensors}
    nodes = peer_nodes(quantized("Q8_0"), list(range(300, 313)), monkeypatch)
    for name, (before, after) in MATMULS.items():
        width, num_rows = map(int, blocks[name].shape)
        x = torch.from_numpy(nodes[before])
        for rounds, bar in ((True, 4.9e-4), (False, 1e-2)):
            storage = make_storage(Blocks("Q8_0"), num_rows, width, torch.float32, rounds=rounds)
            storage.load_rows(0, BlockRows(torch.from_numpy(np.array(blocks[name].data))))
            assert relative(storage.matmul(x, None, torch.float32).numpy(), nodes[after]) < bar, (name, rounds)
