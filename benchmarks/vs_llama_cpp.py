"""nanovllm against llama.cpp on the CPU: the same random weights, one machine, one run, sides taking turns.

    pip install llama-cpp-python
    python benchmarks/vs_llama_cpp.py --threads 2 --output benchmarks/results/vs_llama_cpp.json
    python benchmarks/vs_llama_cpp.py --pair int8
    python benchmarks/vs_llama_cpp.py --pair mxfp4 --shape gpt-oss-20b --layers 6

A pair says what each side loads: bf16 the same file, int8 and int4 (groups of 32) ours against its Q8_0 and Q4_0, the others
(q4_k_m; mxfp4: experts, the rest Q8_0) the same file, which llama.cpp quantizes.

A processor without AVX-512 is compared on one that has it by NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx2,+fma,+f16c
ATEN_CPU_CAPABILITY=avx2 and a llama-cpp-python built with CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON
-DGGML_F16C=ON".

--lora R gives both sides an adapter of rank R of all matrices in the blocks.

Each side runs in a process of its own and measures: prefill of 512 tokens, decode of one sequence, decode of --sequences N (16)
together (both after prompts of 32 tokens); with --depth N instead prefill of 512 tokens behind N others, and decode of one
sequence behind those. Ours is the whole engine: scheduler, sampling (greedy) and all; llama.cpp's is
llama_decode alone, which flatters it. Reported: the median over rounds, and the ratio.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from common import made_up, medians, said_by, save

PREFILL, PROMPT, STEPS = 512, 32, 48
# Pair: (our --quant or None, llama.cpp's type or None, whether we load llama.cpp's file)
PAIRS = {
    "bf16": (None, None, False),
    "int8": ("int8", "Q8_0", False),
    "int4": ("int4:group=32", "Q4_0", False),
    "mxfp4": (None, "MXFP4_MOE", True),
    **{kind.lower(): (None, kind, True) for kind in ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ3_S", "IQ4_XS")},
}


def measure_ours(
    path: str, threads: int, quant: str | None, depth: int, lora: str | None, sequences: int
) -> dict[str, float]:
    from nanovllm_cli import LLM, EngineConfig, SamplingParams
    from nanovllm_cli.config import Lora

    config = EngineConfig(
        threads=threads,
        max_model_len=depth + 2048,
        num_blocks=depth // 16 + 2048,
        max_num_seqs=sequences,
        max_num_batched_tokens=PREFILL,
        enable_prefix_caching=False,
        quant=quant,
        lora=() if lora is None else (Lora(lora),),
    )
    llm = LLM(path, config=config)

    def prompt(n: int, salt: int) -> list[int]:
        return made_up(n, salt, llm.spec.vocab_size)

    def params(n: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)

    def decode(batch: int) -> float:
        """Tokens a second over the steps after the one that ended the prompts."""
        engine = llm.engine
        for i in range(batch):
            engine.add(f"{batch}-{i}", prompt(PROMPT, i), params(STEPS + 1))
        while engine.stats().generated_tokens - base[0] < batch:
            engine.step()
        first, begin = engine.stats().generated_tokens, time.perf_counter()
        while engine.has_unfinished():
            engine.step()
        base[0] = engine.stats().generated_tokens
        return (base[0] - first) / (time.perf_counter() - begin)

    def deep() -> dict[str, float]:
        engine = llm.engine
        base = engine.stats()
        engine.add("deep", prompt(depth + PREFILL, 98), params(STEPS + 1))
        while engine.stats().scheduled_tokens - base.scheduled_tokens < depth:
            engine.step()
        times = [time.perf_counter()]
        while engine.stats().generated_tokens == base.generated_tokens:
            engine.step()
        times.append(time.perf_counter())
        while engine.has_unfinished():
            engine.step()
        return deep_rates(*times, time.perf_counter())

    base = [0]

    def prefill() -> float:
        begin = time.perf_counter()
        llm.generate(prompt(PREFILL, 99), params(1))
        base[0] = llm.stats().generated_tokens
        return PREFILL / (time.perf_counter() - begin)

    return measured(prefill, decode, deep if depth else None, sequences)


@functools.cache
def silent(lib: Any) -> Any:
    """Left to itself it says thousands of lines."""
    return lib.llama_log_callback(lambda *_: None)


def measure_llama_cpp(
    path: str, threads: int, quant: None, depth: int, lora: str | None, sequences: int
) -> dict[str, float]:
    import ctypes

    import llama_cpp as lib

    lib.llama_log_set(silent(lib), None)
    lib.llama_backend_init()
    settings = lib.llama_model_default_params()
    model = lib.llama_model_load_from_file(path.encode(), settings)

    adapter = None if lora is None else lib.llama_adapter_lora_init(model, lora.encode())

    def new_context(count: int, length: int) -> Any:
        options = lib.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch, options.n_seq_max = count * length, 512, 512, count
        options.n_threads = options.n_threads_batch = threads
        context = lib.llama_init_from_model(model, options)
        if adapter is not None:
            one = (ctypes.c_float * 1)(1.0)
            assert lib.llama_set_adapters_lora(context, (lib.llama_adapter_lora_p_ctypes * 1)(adapter), 1, one) == 0
        return context

    contexts = {1: new_context(1, depth + 1024), sequences: new_context(sequences, 256)}
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))

    def run(context: Any, tokens: list[tuple[int, int, int, bool]]) -> None:
        """(token, position, sequence, wants logits) in one llama_decode."""
        batch = lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wants) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wants
            batch.seq_id[i][0] = sequence
        assert lib.llama_decode(context, batch) == 0
        lib.llama_synchronize(context)
        lib.llama_batch_free(batch)

    def prompt(n: int, salt: int) -> list[int]:
        return made_up(n, salt, vocab)

    def prefill() -> float:
        lib.llama_memory_clear(lib.llama_get_memory(contexts[1]), True)
        begin = time.perf_counter()
        run(contexts[1], [(t, i, 0, i == PREFILL - 1) for i, t in enumerate(prompt(PREFILL, 99))])
        return PREFILL / (time.perf_counter() - begin)

    def decode(count: int) -> float:
        context = contexts[count]
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        for s in range(count):
            run(context, [(t, i, s, i == PROMPT - 1) for i, t in enumerate(prompt(PROMPT, s))])
        begin = time.perf_counter()
        for step in range(STEPS):
            run(context, [((step * 31 + s) % vocab, PROMPT + step, s, True) for s in range(count)])
        return count * STEPS / (time.perf_counter() - begin)

    def deep() -> dict[str, float]:
        lib.llama_memory_clear(lib.llama_get_memory(contexts[1]), True)
        tokens = [(token, position, 0, False) for position, token in enumerate(prompt(depth + PREFILL, 98))]
        for first in range(0, depth, PREFILL):
            run(contexts[1], tokens[first : min(first + PREFILL, depth)])
        times = [time.perf_counter()]
        run(contexts[1], [*tokens[depth:-1], (*tokens[-1][:3], True)])
        times.append(time.perf_counter())
        for step in range(STEPS):
            run(contexts[1], [(step * 31 % vocab, depth + PREFILL + step, 0, True)])
        return deep_rates(*times, time.perf_counter())

    return measured(prefill, decode, deep if depth else None, sequences)


def measured(
    prefill: Callable[[], float], decode: Callable[[int], float], deep: Callable[[], dict[str, float]] | None, sequences: int
) -> dict[str, float]:
    """Tokens a second. What runs first is for what is made on first use."""
    prefill(), decode(1)
    if deep is not None:
        return deep()
    decode(sequences)
    return {"prefill": max(prefill() for _ in range(2)), "decode 1": decode(1), f"decode {sequences}": decode(sequences)}


def deep_rates(begin: float, first: float, end: float) -> dict[str, float]:
    """Tokens a second, of when the context was full, when the first token came, and when the last."""
    return {"prefill": PREFILL / (first - begin), "decode 1": STEPS / (end - first)}


SIDES: dict[str, Any] = {"nanovllm": measure_ours, "llama.cpp": measure_llama_cpp}


def quantize_by_llama_cpp(source: Path, target: Path, kind: str) -> None:
    import ctypes

    import llama_cpp as lib

    lib.llama_log_set(silent(lib), None)
    settings = lib.llama_model_quantize_default_params()
    settings.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if lib.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(settings)):
        raise SystemExit(f"llama.cpp could not make {kind} of {source}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="the shape's first so many alone, of a model that is too large")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--file", type=Path, help="keep the weights here and use them again")
    parser.add_argument("--pair", choices=PAIRS, default="bf16")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--depth", type=int, default=0, help="tokens in front of everything")
    parser.add_argument("--sequences", type=int, default=16, help="together, from 2 on")
    parser.add_argument("--lora", help="an adapter's rank; of a side, its file")
    parser.add_argument("--quant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        asked = str(options.file), options.threads, options.quant, options.depth, options.lora, options.sequences
        print(json.dumps(SIDES[options.side](*asked)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = options.file or Path(folder) / "random.gguf"
        if not path.exists():
            import shapes

            if options.shape in shapes.SHAPES and options.layers is None:
                shapes.write_gguf(path, options.shape)
            else:
                shapes.write_converted(path, options.shape, options.layers)
        quant, kind, same_file = PAIRS[options.pair]
        theirs = path
        if kind is not None:
            theirs = path.with_suffix(f".{kind}.gguf")
            if not theirs.exists():
                quantize_by_llama_cpp(path, theirs, kind)
        files = {"nanovllm": theirs if same_file else path, "llama.cpp": theirs}
        lora = None
        if options.lora is not None:
            from shapes import write_adapter

            lora = write_adapter(Path(folder) / "adapter.gguf", path, int(options.lora))
        rounds: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for number in range(options.rounds):
            for side in SIDES:
                given = {"--side": side, "--file": files[side], "--threads": options.threads, "--depth": options.depth}
                given |= {"--sequences": options.sequences}
                given |= {"--quant": quant} if side == "nanovllm" and quant is not None else {}
                given |= {"--lora": lora} if lora is not None else {}
                rounds[side].append(said_by(__file__, *(word for pair in given.items() for word in pair)))
                print(f"round {number + 1}, {side}: {rounds[side][-1]}", file=sys.stderr)
    found = medians(rounds)
    ratios = {k: found["nanovllm"][k] / found["llama.cpp"][k] for k in found["nanovllm"]}
    behind = f" behind {options.depth} tokens" if options.depth else ""
    behind += f", adapter of rank {options.lora}" if options.lora else ""
    behind += f", {options.layers} layers" if options.layers else ""
    print(f"| {options.shape}, {options.pair}, {options.threads} threads{behind} | nanovllm tok/s | llama.cpp tok/s | ratio |")
    print("|---|---|---|---|")
    for k, ratio in ratios.items():
        print(f"| {k} | {found['nanovllm'][k]:.1f} | {found['llama.cpp'][k]:.1f} | {ratio:.2f} |")
    settings = {name: getattr(options, name) for name in ("shape", "layers", "pair", "threads", "depth", "sequences")}
    settings["lora"] = options.lora and int(options.lora)
    save(options.output, settings | {"rounds": rounds, "ratios": ratios})


if __name__ == "__main__":
    main()
