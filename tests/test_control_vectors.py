"""Control vectors: logits as transformers has them with the same added to what its layers give, in one process or several, on a
GPU, beside guesses; and files that are none, are broken, or are another model's."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from embedders import body, write_tokenizer
from emulation.device import EmulatedDevice
from emulation.emulator import needs_emulation
from engines import SMALL, engine_for, greedy, random_model, run, save, worker_for
from live_server import live_server
from nanovllm_cli import LLM, SamplingParams
from nanovllm_cli.config import ControlVector, EngineConfig
from nanovllm_cli.engine.eagle import EagleDraft
from nanovllm_cli.errors import CheckpointError, ModelNotFoundError, NanovllmError, UnsupportedError, UsageError
from nanovllm_cli.weights.control_vector import read_directions
from test_cli_driver import Result
from test_cli_driver import nanovllm as driven
from test_cli_real import nanovllm as real
from test_cuda_engine import SHAPE as GPU_SHAPE
from test_cuda_engine import engine_on, kernels_not_rehearsed
from test_cuda_engine import tokens as gpu_tokens
from test_cuda_quantized import worker_on
from test_eagle import FEW, expected_guesses, guessing, pair
from test_encoders import CONFIGS, FLOATS, TEXTS, expected, far
from test_lookup import engine_with
from test_models import CASES, chosen, prompts, whole_batch
from test_mtp import DRAWN, every_guess, sure_model
from test_mtp import guessing as predicting
from test_quant_engine import difference, logits_of, write_gguf
from vectors_gguf import named, random_directions, write_vector

KINDS = [
    "llama", "qwen3", "gemma2, caps, window in every other layer", "gemma3, ropes of two bases", "gpt2", "pythia",
    "olmo2, group 1", "command r", "granite", "nemotron", "lfm2", "mamba2", "nemotron h", "falcon h1", "qwen3.5",
    "qwen3 moe, 3 of 5, a dense layer between", "gpt-oss, 2 of 5", "deepseek v3, 3 of 5 and shared",
    "gemma4, keys of other layers", "gemma4, numbers a layer", "gemma4, 2 of 5 beside",
]  # fmt: skip
"""Of those of test_models.py every order of norms, and what else happens to a layer's output."""
FIVE = Qwen3Config(**SMALL | {"num_hidden_layers": 5})
PROMPT = prompts(SMALL["vocab_size"])[-1][:37]


@contextmanager
def led(reference: Any, directions: dict[int, torch.Tensor]) -> Iterator[None]:
    """Within, transformers adds these to what its layers give."""
    count = reference.config.num_hidden_layers
    layers = next(each for each in reference.modules() if isinstance(each, torch.nn.ModuleList) and len(each) == count)
    with ExitStack() as stack:
        for layer, direction in directions.items():

            def hook(_module: Any, _inputs: Any, output: Any, added: torch.Tensor = direction) -> Any:
                return (output[0] + added, *output[1:]) if isinstance(output, tuple) else output + added

            stack.callback(layers[layer].register_forward_hook(hook).remove)
        yield


@pytest.mark.parametrize("case", KINDS)
def test_equal_to_transformers(case: str, tmp_path: Path) -> None:
    """Prompts whole, then read in pieces, of which only the last rows go through all layers, and answered."""
    config = CASES[case]
    reference = random_model(config)
    save(reference, tmp_path)
    directions = random_directions(config.hidden_size, config.num_hidden_layers)
    worker = worker_for(tmp_path, control_vectors=[(write_vector(tmp_path / "vector.gguf", named(directions)), -0.75)])
    asked = prompts(config.vocab_size)
    with torch.inference_mode():
        hidden = worker.model.run(worker.model.prepare(whole_batch(asked)), worker.runner.cache)
        actual = worker.model.logits(hidden).split([len(ids) for ids in asked])
    outputs = run(engine_for(worker, max_num_batched_tokens=50), [(ids, greedy(12)) for ids in asked])
    with torch.inference_mode():
        plain = reference(torch.tensor([asked[-1]])).logits[0]
    with torch.inference_mode(), led(reference, {layer: each * -0.75 for layer, each in directions.items()}):
        for ids, rows, output in zip(asked, actual, outputs, strict=True):
            wanted = reference(torch.tensor([ids])).logits[0]
            assert float((rows - wanted).norm() / wanted.norm()) < 1e-4
            answer = list(output.outputs[0].token_ids)
            assert answer == chosen(reference, ids, answer)
    assert float((plain - wanted).norm() / wanted.norm()) > 0.03


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_vectors_of_an_encoder(name: str, tmp_path: Path) -> None:
    """Of which one norms the stream that it is added to."""
    torch.manual_seed(1)
    model = body(CONFIGS[name], tmp_path / "m")
    write_tokenizer(tmp_path / "m")
    directions = random_directions(model.config.hidden_size, model.config.num_hidden_layers)
    vector = write_vector(tmp_path / "vector.gguf", named(directions))
    llm = LLM(tmp_path / "m", config=replace(FLOATS, control_vectors=(ControlVector(vector),)))
    with led(model, directions):
        assert far(llm.embed(TEXTS, "mean"), expected(model, "mean")) < 3e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of five layers, and two control vectors of it, `one.gguf` and `two.gguf`, the second for some layers."""
    folder = save(random_model(FIVE), tmp_path_factory.mktemp("five"))
    write_vector(folder / "one.gguf", named(random_directions(48, 5)))
    write_vector(folder / "two.gguf", named({layer: random_directions(48, 5, 1)[layer] for layer in (1, 4)}))
    return folder


def logits_led(folder: Path, *vectors: tuple[str, float], layers: tuple[int, int] | None = None, **more: Any) -> torch.Tensor:
    given = [(str(folder / name), scale) for name, scale in vectors]
    worker = worker_for(folder, control_vectors=given, control_vector_layers=layers, **more)
    with torch.inference_mode():
        hidden = worker.model.run(worker.model.prepare(whole_batch([PROMPT])), worker.runner.cache)
        return worker.model.logits(hidden)


@pytest.mark.parametrize(
    ("vectors", "layers", "taken"),
    [
        ([("one.gguf", 1.0), ("two.gguf", -2.0)], None, (1, 4)),
        ([("one.gguf", 0.5), ("one.gguf", 0.25)], (2, 3), (2, 3)),
        ([("two.gguf", 1.5)], (2, 4), (4, 4)),
        ([("two.gguf", 1.5)], (1, 1), (1, 1)),
        ([("one.gguf", 1.0)], (4, 10**9), (4, 4)),
    ],
    ids=str,
)
def test_several_are_summed_behind_the_layers_that_are_named(
    vectors: list[tuple[str, float]], layers: tuple[int, int] | None, taken: tuple[int, int], folder: Path
) -> None:
    theirs = {"one.gguf": random_directions(48, 5), "two.gguf": random_directions(48, 5, 1)}
    sums = {layer: torch.zeros(48) for layer in range(taken[0], taken[1] + 1)}
    for name, scale in vectors:
        for layer in sums:
            sums[layer] += scale * theirs[name][layer] * (name == "one.gguf" or layer in (1, 4))
    reference = random_model(FIVE)
    with torch.inference_mode(), led(reference, sums):
        wanted = reference(torch.tensor([PROMPT])).logits[0]
    found = logits_led(folder, *vectors, layers=layers)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-4


def test_one_of_scale_0_changes_no_bit(folder: Path) -> None:
    assert torch.equal(logits_led(folder, ("one.gguf", 0.0)), logits_led(folder))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_do_not_depend_on_the_batch(dtype: str, folder: Path) -> None:
    """To the bit, with recorded steps too, which are all after the first."""
    requests = [(ids, greedy(16, logprobs=2)) for ids in prompts(SMALL["vocab_size"])]
    worker = worker_for(folder, control_vectors=[str(folder / "one.gguf")], dtype=dtype)
    assert worker.recordable

    def answers(*groups: Any) -> list[Any]:
        outputs = [output.outputs[0] for group in groups for output in run(engine_for(worker), list(group))]
        return [(each.token_ids, each.logprobs) for each in outputs]

    together = answers(requests)
    assert together == answers(*([request] for request in requests))
    worker.runner.graphs._recordable = False  # type: ignore[attr-defined]
    assert together == answers(requests)


def test_beside_weights_that_are_quantized(tmp_path: Path) -> None:
    """It is added to the stream, which no format is of."""
    config = Qwen3Config(**SMALL | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 2})
    reference = random_model(config)
    write_gguf(tmp_path / "model.gguf", reference, ["Q8_0"])
    directions = random_directions(64, 3)
    vector = write_vector(tmp_path / "vector.gguf", named(directions))
    worker = worker_for(tmp_path / "model.gguf", dtype="float32", control_vectors=[vector], activations="exact")
    with torch.inference_mode(), led(reference, directions):
        hidden = worker.model.run(worker.model.prepare(whole_batch([PROMPT])), worker.runner.cache)
        wanted = reference(torch.tensor([PROMPT])).logits[0]
    assert float((worker.model.logits(hidden) - wanted).norm() / wanted.norm()) < 1e-3


@needs_emulation
def test_on_a_gpu(tmp_path: Path) -> None:
    """As on a CPU; recorded, and with every kernel compiled beforehand."""
    save(random_model(Qwen3Config(**GPU_SHAPE), dtype=torch.bfloat16), tmp_path)
    vectors = {"control_vectors": [(write_vector(tmp_path / "v.gguf", named(random_directions(32, 2))), 0.5)]}
    few, many = [[3, 4, 5]], [[3, 4, 5], [7], list(range(20, 41))]
    on_gpu = worker_on(tmp_path, EmulatedDevice(), **vectors)
    on_cpu, plain = (worker_for(tmp_path, dtype="bfloat16", num_blocks=16, **each) for each in (vectors, {}))
    for asked in (few, many):
        wanted = logits_of(on_cpu, asked)
        assert difference(logits_of(on_gpu, asked), wanted) < 0.02
        assert difference(logits_of(plain, asked), wanted) > 0.1
    device = EmulatedDevice()
    found = gpu_tokens(engine_on(tmp_path, device, **vectors), greedy(8))
    assert device.graphs
    assert found == gpu_tokens(engine_on(tmp_path, EmulatedDevice(), eager=True, **vectors), greedy(8))
    assert found == gpu_tokens(engine_on(tmp_path, None, **vectors), greedy(8))
    assert kernels_not_rehearsed(tmp_path, **vectors) == set()


def test_several_processes(folder: Path) -> None:
    asked = [(PROMPT, greedy(8, logprobs=2)), (PROMPT[:3], greedy(5, logprobs=1))]
    found = []
    for size in (1, 2):
        worker = worker_for(folder, tensor_parallel_size=size, control_vectors=[(str(folder / "one.gguf"), -1.5)],
                            control_vector_layers=(2, 4))  # fmt: skip
        try:
            outputs = [output.outputs[0] for output in run(engine_for(worker, max_num_batched_tokens=16), asked)]
            found.append([(each.token_ids, each.logprobs) for each in outputs])
        finally:
            worker.close()
    assert found[0] == found[1]


# ---- beside guesses ----


def test_a_drafter_that_reads_layers_reads_them_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = every_guess(EagleDraft, monkeypatch)
    saved = pair(tmp_path)
    directions = random_directions(saved.model.config.hidden_size, 5, size=0.5)
    vectors = {"control_vectors": [write_vector(tmp_path / "vector.gguf", named(directions))]}
    prompt = [(5 * i) % FEW for i in range(37)]
    (output,) = run(guessing(saved, max_num_batched_tokens=16, **vectors), [(prompt, DRAWN)])
    answer = list(output.outputs[0].token_ids)
    assert answer == list(run(engine_with(saved.folder, 0, **vectors), [(prompt, DRAWN)])[0].outputs[0].token_ids)
    assert len(made) > 10
    with led(saved.model, directions):
        for _, end, guesses in made:
            assert guesses == expected_guesses(saved, (prompt + answer)[:end], len(guesses)), f"behind {end} tokens"


def test_what_guesses_is_not_led(folder: Path, tmp_path: Path) -> None:
    """A draft model of another size can't be."""
    settings = {"control_vectors": [str(folder / "one.gguf")], "control_vector_layers": (1, 3)}
    narrow = save(random_model(Qwen3Config(**SMALL | {"hidden_size": 32})), tmp_path / "narrow")
    asked = [(PROMPT, greedy(20, logprobs=1))]
    plain = run(engine_with(folder, 0, **settings), asked)[0].outputs[0]
    drafted = run(engine_with(folder, 4, draft_model=str(narrow), draft_min_p=0.0, **settings), asked)[0].outputs[0]
    assert (drafted.token_ids, drafted.logprobs) == (plain.token_ids, plain.logprobs)


def test_a_layer_for_further_tokens_changes_nothing(tmp_path: Path) -> None:
    own = sure_model(tmp_path / "m", "qwen3.5", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    vector = write_vector(tmp_path / "vector.gguf", named(random_directions(CASES["qwen3.5"].hidden_size, 2)))
    asked = [([token % 259 for token in PROMPT], greedy(20, logprobs=1))]
    plain = run(engine_with(own, 0, control_vectors=[vector]), asked)[0].outputs[0]
    output = run(predicting(own, control_vectors=[vector]), asked)[0]
    assert output.metrics.num_guessed_tokens > 0
    assert (output.outputs[0].token_ids, output.outputs[0].logprobs) == (plain.token_ids, plain.logprobs)


# ---- what was kept ----


def test_keys_that_were_kept_are_not_those_of_another_vector(folder: Path, tmp_path: Path) -> None:
    one, own = str(folder / "one.gguf"), tmp_path / "own.gguf"
    given: list[dict[str, Any]] = [
        {}, {"control_vectors": [one]}, {"control_vectors": [(one, 0.5)]}, {"control_vectors": [str(folder / "two.gguf")]},
        {"control_vectors": [one], "control_vector_layers": (1, 3)}, {"control_vectors": [one, one]},
    ]  # fmt: skip
    kinds = [worker_for(folder, **each).cache_kind for each in given]
    for seed in (5, 6):
        own.unlink(missing_ok=True)
        write_vector(own, named(random_directions(48, 5, seed)))
        kinds.append(worker_for(folder, control_vectors=[str(own)]).cache_kind)
    assert len({json.dumps(kind) for kind in kinds}) == len(kinds)


# ---- files that are none ----


def row(width: int = 48, dtype: Any = np.float32, value: float = 1.0) -> np.ndarray:
    return np.full(width, value, dtype=dtype)


BAD: dict[str, tuple[dict[str, Any], type[NanovllmError], str]] = {
    "no tensor": ({}, UnsupportedError, "no control vector: it has no direction.1"),
    "a model": ({"blk.0.attn_norm.weight": row()}, UnsupportedError, "but blk.0.attn_norm.weight"),
    "layer 0": ({"direction.0": row(), "direction.1": row()}, CheckpointError, "nothing is added behind layer 0"),
    "a layer more": ({"direction.5": row()}, UnsupportedError, "a layer 5, and the model's last one is 4"),
    "a number of nine digits": ({"direction.999999999": row()}, UnsupportedError, "for a layer 999999999"),
    "a longer number": ({"direction.99999999999999999999": row()}, CheckpointError, "names no layer"),
    "below 0": ({"direction.-1": row()}, CheckpointError, "'direction.-1' names no layer"),
    "no number": ({"direction.x": row()}, CheckpointError, "'direction.x' names no layer"),
    "nothing": ({"direction.": row()}, CheckpointError, "'direction.' names no layer"),
    "one layer by two names": ({"direction.1": row(), "direction.01": row()}, CheckpointError, "'direction.01' names no layer"),
    "digits of other scripts": ({"direction.١": row()}, CheckpointError, "names no layer"),
    "another width": ({"direction.2": row(47)}, UnsupportedError, "has 47 numbers, and the model's hidden size is 48"),
    "a matrix": ({"direction.1": np.ones((1, 48), np.float32)}, CheckpointError, "is \\[1, 48\\], not a row"),
    "halves": ({"direction.1": row(dtype=np.float16)}, UnsupportedError, "holds F16, not F32"),
    "doubles": ({"direction.1": row(dtype=np.float64)}, UnsupportedError, "holds F64, not F32"),
    "nan": ({"direction.1": row(value=math.nan)}, CheckpointError, "NaN or infinite"),
    "inf": ({"direction.3": row(value=-math.inf)}, CheckpointError, "'direction.3' has values that are NaN or infinite"),
}


@pytest.mark.parametrize("case", BAD)
def test_files_that_are_not_of_this_model(case: str, folder: Path, tmp_path: Path) -> None:
    tensors, error, told = BAD[case]
    vector = write_vector(tmp_path / "bad.gguf", tensors)
    with pytest.raises(error, match=told) as raised:
        worker_for(folder, control_vectors=[vector])
    assert str(tmp_path / "bad.gguf") in raised.value.message


def test_other_tensors_are_left_aside(folder: Path, tmp_path: Path) -> None:
    direction = random_directions(48, 5)[2]
    vector = write_vector(tmp_path / "v.gguf", {"directions": row(3), "mean": row(48), "direction.2": direction}, "llama")
    found = read_directions([ControlVector(vector, 2.0)], None, 48, 5)
    assert found.keys() == {2}
    assert torch.equal(found[2], direction * 2)


def test_files_that_cannot_be_read(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "one.gguf").read_bytes()
    (tmp_path / "text.gguf").write_text("no GGUF at all")
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "short.gguf").write_bytes(whole[:-40])
    said = {"text.gguf": "not a GGUF", "empty.gguf": "empty", "short.gguf": "the file ends", ".": "not a regular"}
    for name, told in said.items():
        with pytest.raises(CheckpointError, match=told):
            worker_for(folder, control_vectors=[str(tmp_path / name)])
    with pytest.raises(ModelNotFoundError, match=r"no control vector .*nothere"):
        worker_for(folder, control_vectors=[str(tmp_path / "nothere")])
    for length in range(0, len(whole) - 48 * 4, 37):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(NanovllmError):
            read_directions([ControlVector(str(tmp_path / "cut.gguf"))], None, 48, 5)


def test_sums_that_are_too_large(folder: Path, tmp_path: Path) -> None:
    vector = write_vector(tmp_path / "v.gguf", {"direction.1": row(value=3e38)})
    with pytest.raises(CheckpointError, match="behind layer 1 is too large for float32"):
        worker_for(folder, control_vectors=[vector, vector])
    small = write_vector(tmp_path / "w.gguf", {"direction.1": row(value=3e38)})
    with pytest.raises(CheckpointError, match="too large"):
        worker_for(folder, control_vectors=[(small, 1e6)])


def test_layers_that_have_none(folder: Path) -> None:
    with pytest.raises(UsageError, match="no control vector has a direction for layers 2 to 3"):
        worker_for(folder, control_vectors=[str(folder / "two.gguf")], control_vector_layers=(2, 3))
    with pytest.raises(UsageError, match="for layers 5 to 7"):
        worker_for(folder, control_vectors=[str(folder / "one.gguf")], control_vector_layers=(5, 7))


def test_a_model_of_several_streams_is_refused(tmp_path: Path) -> None:
    save(random_model(CASES["gemma3n"]), tmp_path)
    vector = write_vector(tmp_path / "v.gguf", {"direction.1": row(CASES["gemma3n"].hidden_size)})
    with pytest.raises(UnsupportedError, match="several residual streams"):
        worker_for(tmp_path, control_vectors=[vector])


@pytest.mark.parametrize("given", [3, [3], ["a", ""], [("a", "b")], [("a", True)], [("a", math.nan)], [("a", 2e6)], [None]])
def test_configs_that_name_none(given: Any) -> None:
    with pytest.raises(UsageError, match="control_vectors"):
        EngineConfig(control_vectors=given)


@pytest.mark.parametrize("layers", [3, (1,), (1, 2, 3), (0, 2), (3, 2), (-1, 2), (1.0, 2), (True, 2), ("1", "2"), "12"])
def test_layers_that_are_none(layers: Any) -> None:
    with pytest.raises(UsageError, match="control_vector_layers must be"):
        EngineConfig(control_vectors=("a",), control_vector_layers=layers)  # type: ignore[arg-type]


def test_configs_that_do() -> None:
    config = EngineConfig(control_vectors=["a", ("b", -2)], control_vector_layers=[3, 3])  # type: ignore[arg-type]
    assert (config.control_vectors, config.control_vector_layers) == ((ControlVector("a"), ControlVector("b", -2.0)), (3, 3))
    assert EngineConfig(control_vectors="a").control_vectors == (ControlVector("a"),)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="control_vector_layers has no meaning without control_vectors"):
        EngineConfig(control_vector_layers=(1, 2))


# ---- from the command line ----


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a control vector of the bundled model, `v.gguf`."""
    folder = tmp_path_factory.mktemp("tiny")
    write_vector(folder / "v.gguf", named(random_directions(256, 4)))
    write_vector(folder / "w:1.gguf", named(random_directions(256, 4, 1)))
    return folder


def test_run_says_what_the_library_says(tiny: Path) -> None:
    prompt, params = "Once upon a time", SamplingParams(temperature=0, max_tokens=24)
    said, asked = set(), {
        ("--control-vector", "v.gguf"): ([("v.gguf", 1.0)], None),
        ("--control-vector-scaled", "v.gguf:-2,w:1.gguf:1.5"): ([("v.gguf", -2.0), ("w:1.gguf", 1.5)], None),
        ("--control-vector", "v.gguf,w:1.gguf", "--control-vector-layer-range", "2", "2"):
            ([("v.gguf", 1.0), ("w:1.gguf", 1.0)], (2, 2)),
    }  # fmt: skip
    for flags, (vectors, layers) in asked.items():
        given = tuple(ControlVector(str(tiny / name), scale) for name, scale in vectors)
        config = EngineConfig(control_vectors=given, control_vector_layers=layers, max_model_len=256)
        with LLM("tiny", config=config) as llm:
            said.add(text := llm.generate(prompt, params)[0].outputs[0].text)
            assert llm.control_vectors == given
        done = real(tiny, "run", "tiny", "--raw", "--temp", "0", "-n", "24", prompt, *flags)
        assert (done.returncode, done.stdout.rstrip("\n")) == (0, text.rstrip("\n")), done.stderr
        assert "led by the control vector v.gguf" in done.stderr
        assert ("times -2" in done.stderr) == ("--control-vector-scaled" in flags)
    assert len(said) == 3, "each matters"


ALL = ["-n", "4000", "-c", "8000"]
"""For the stand-in of the library to say its settings whole."""
VECTOR = ["--control-vector", "v.gguf"]
RANGE = "--control-vector-layer-range"


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        (["run", "tiny", "--control-vector-scaled", "v.gguf", "x"], 2, "'v.gguf' is not a control vector with its scale"),
        (["run", "tiny", "--control-vector-scaled", "v.gguf:x", "x"], 2, "is not a control vector with its scale"),
        (["run", "tiny", "--control-vector-scaled", "v.gguf:nan", "x"], 2, "is not a control vector with its scale"),
        (["run", "tiny", "--control-vector-scaled", ":2", "x"], 2, "is not a control vector with its scale"),
        (["run", "tiny", *VECTOR, RANGE, "2"], 2, "requires 2 arguments"),
        (["run", "tiny", *VECTOR, RANGE, "1", "b", "x"], 2, "'b' is not a whole number"),
        (["run", "tiny", *VECTOR, RANGE, "0", "2", "x"], 2, f"{RANGE} must be the first, from 1 on, and the last, not 0 and 2"),
        (["run", "tiny", *VECTOR, RANGE, "3", "2", "x"], 2, f"{RANGE} must be the first"),
        (["run", "tiny", RANGE, "1", "2", "x"], 2, f"{RANGE} has no meaning without --control-vector"),
        (["run", "--url", "http://127.0.0.1:1", *VECTOR, "x"], 2, "--control-vector has no meaning with --url"),
        (["serve", "tiny", "tiny", "--alias", "a,b", *VECTOR], 2, "--control-vector has no meaning with several models"),
        (["plan", "tiny", *VECTOR], 2, "nanovllm run, chat, embed and others have --control-vector"),
    ],
)  # fmt: skip
def test_what_a_command_says(args: list[str], code: int, told: str, tiny: Path) -> None:
    done = driven(tiny, *args)
    assert (done.code, done.out) == (code, ""), done.err
    assert told in done.err


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        (["run", "tiny", "--control-vector", "nothere.gguf", "x"], 3, "no control vector nothere.gguf"),
        (["embed", "tiny", "--control-vector", "v.gguf,nothere.gguf", "x"], 3, "no control vector nothere.gguf"),
        (["run", "tiny", "--control-vector", "wide.gguf", "x"], 6, "has 257 numbers, and the model's hidden size is 256"),
    ],
)
def test_what_a_command_says_of_files(args: list[str], code: int, told: str, tiny: Path) -> None:
    (tiny / "wide.gguf").unlink(missing_ok=True)
    write_vector(tiny / "wide.gguf", {"direction.1": row(257)})
    done = real(tiny, *args)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert told in done.stderr


def test_a_run_goes_on_with_it(tiny: Path) -> None:
    """Where it was is kept, not how it was called."""
    first = driven(tiny, "run", "tiny", "config", *ALL, "--control-vector-scaled", "v.gguf:-0.5", RANGE, "1", "2")
    again = driven(tiny, "run", "--continue", "-p", "config", *ALL)
    assert [done.code for done in (first, again)] == [0, 0], again.err
    assert f"ControlVector(path={str(tiny / 'v.gguf')!r}, scale=-0.5)" in again.out
    assert "control_vector_layers=(1, 2)" in again.out
    new = driven(tiny, "run", "tiny", "--continue", "-p", "config", *ALL).out
    assert "control_vectors=()" in new, "whoever names a model names what leads it"
    own = driven(tiny, "run", "--continue", "-p", "config", *ALL, "--control-vector", "v.gguf").out
    assert "control_vectors=(ControlVector(path='v.gguf', scale=1.0),)" in own


def test_results_of_another_vector_are_not_lost(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "v.gguf").write_bytes((tiny / "v.gguf").read_bytes())
    (tmp_path / "in.jsonl").write_text('{"prompt": "say one"}\n')

    def asked(*flags: str) -> Result:
        return driven(tmp_path, "run", "tiny", "--batch", "in.jsonl", "-o", "out.jsonl", *flags)

    assert asked(*VECTOR).code == 0
    assert "1 of 1 results are there already" in asked(*VECTOR).err
    for other in ([], ["--control-vector-scaled", "v.gguf:2"], [*VECTOR, RANGE, "1", "2"]):
        refused = asked(*other)
        assert (refused.code, "another model or other settings" in refused.err) == (2, True), other
    (tmp_path / "v.gguf").write_bytes(b"another one")
    assert asked(*VECTOR).code == 2


def test_a_project_does_not_say_which_files_are_read(tiny: Path, tmp_path: Path) -> None:
    for key, value in (("control-vector", f"{tiny}/v.gguf"), ("control-vector-scaled", f"{tiny}/v.gguf:1")):
        (tmp_path / "nanovllm.toml").write_text(f'[default]\n{key} = ["{value}"]\n')
        refused = driven(tmp_path, "run", "tiny", "hello")
        assert refused.code == 2
        assert key in refused.err


def test_settings_may_name_the_layers(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "nanovllm.toml").write_text("[run]\ncontrol-vector-layer-range = [1, 3]\n")
    done = driven(tmp_path, "run", "tiny", "config", *ALL, "--control-vector", str(tiny / "v.gguf"))
    assert (done.code, "control_vector_layers=(1, 3)" in done.out) == (0, True), done.err


def test_a_server_with_one(tiny: Path) -> None:
    """Behind HTTP it is the same model."""
    given = (ControlVector(str(tiny / "v.gguf"), -2.0),)
    with LLM("tiny", config=EngineConfig(control_vectors=given, max_model_len=256)) as llm:
        wanted = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=16))[0].outputs[0].text
    with live_server("tiny", "--control-vector-scaled", f"{tiny / 'v.gguf'}:-2", "-c", "256") as server:
        status, answer = server.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0})
        assert (status, answer["choices"][0]["text"]) == (200, wanted)
