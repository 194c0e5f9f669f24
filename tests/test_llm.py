"""The library's front door, on a tiny random model whose tokens are bytes. transformers says what it should answer."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import json
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig

from engines import SMALL, greedy, random_model, save
from nanovllm_cli import LLM, EngineConfig, SamplingParams, errors, vllm_names
from nanovllm_cli.config import engine_config
from nanovllm_cli.engine.outputs import RequestOutput
from nanovllm_cli.engine.requests import QUEUE_FACTOR
from nanovllm_cli.errors import ModelNotFoundError, PromptTooLongError, UsageError
from nanovllm_cli.progress import NullProgress

BOS, EOS, USER, ASSISTANT = range(256, 260)
VOCAB = 260
CONTEXT = 128
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LETTERS = tuple(range(ord("a"), ord("z") + 1))


def write_byte_tokenizer(
    folder: Path, specials: tuple[str, ...] = ("<s>", "</s>", "<|user|>", "<|assistant|>"), **told: str
) -> None:
    """A tokenizer.json in which the id of a byte is that byte (under GPT-2's names for bytes), and specials from 256 on. told: of
    tokenizer_config.json."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    names = {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    backend = Backend(models.BPE(names, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(specials))
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE} | told
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


class Model:
    """The checkpoint, and transformers' model of the same weights."""

    def __init__(self, folder: Path) -> None:
        self.reference = random_model(LlamaConfig(**SMALL | {"vocab_size": VOCAB, "max_position_embeddings": CONTEXT}))
        self.folder = save(self.reference, folder)
        write_byte_tokenizer(folder)

    def answer(self, prompt: list[int], count: int) -> list[int]:
        """Greedy, past any end."""
        ids = self.reference.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return list(ids[0, len(prompt) :].tolist())

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """[len(ids), VOCAB]: of what follows each token."""
        with torch.inference_mode():
            return torch.log_softmax(self.reference(torch.tensor([ids])).logits[0].float(), -1)


def load(model: Model, **settings: Any) -> LLM:
    return LLM(model.folder, config=EngineConfig(**{"threads": 2, "num_blocks": 64} | settings))


def test_what_was_found_is_loaded_as_it_is_and_its_name_not_looked_at_again(model: Model, tmp_path: Path) -> None:
    name = tmp_path / "name"
    name.symlink_to(model.folder)
    found = LLM.find(name)
    assert found.path == name
    with pytest.raises(ModelNotFoundError):
        LLM.find(tmp_path / "nothing")
    with pytest.raises(UsageError, match="int5"):
        LLM.find(tmp_path / "nothing", config=EngineConfig(quant="int5"))
    for more in ({"offline": True}, {"revision": "main"}):
        with pytest.raises(UsageError, match="has been found"):
            LLM(found, **more)
    with LLM(found, config=EngineConfig(threads=2, num_blocks=64)) as llm:
        assert llm.resolved is found
        assert llm.name == str(name)


@pytest.mark.parametrize(("settings", "more", "said"), [
    ({"activations": "exact"}, {}, "activations changes nothing: no weight"),
    ({"activations": "exact", "quant": "int8"}, {}, ""),
    ({"draft_min_p": 0.5}, {}, "draft-min-p changes nothing: no draft model"),
    ({}, {"tool_format": "hermes"}, "the parsers of tool calls and reasoning change nothing"),
])  # fmt: skip
def test_settings_that_change_nothing_for_this_model_are_told(
    model: Model, tmp_path: Path, settings: dict[str, Any], more: dict[str, Any], said: str
) -> None:
    class Notes(NullProgress):
        def note(self, message: str) -> None:
            notes.append(message)

    notes: list[str] = []
    plain = tmp_path / "plain"  # without a chat template
    shutil.copytree(model.folder, plain)
    (plain / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    LLM(plain, config=EngineConfig(threads=2, num_blocks=64, **settings), progress=Notes(), **more).close()
    assert [note[: len(said)] for note in notes] == ([said] if said else [])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared(model: Model) -> LLM:
    return load(model)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """Every test has to leave the engine as it found it: nothing runs, and nobody holds a block."""
    yield shared
    stats = shared.stats()
    assert (stats.running, stats.waiting, stats.used_blocks) == (0, 0, 0)
    assert not shared.engine.has_unfinished()


def text_of(ids: list[int]) -> str:
    return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


def ids_of(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def test_package_is_imported_without_torch_and_names_are_there_when_asked_for() -> None:
    program = (
        "import sys, nanovllm_cli\n"
        "assert not [m for m in sys.modules if m.startswith('nanovllm_cli.')]\n"
        "from nanovllm_cli import SamplingParams, EngineConfig, NanovllmError\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "assert {'LLM', 'SamplingParams'} <= set(nanovllm_cli.__all__)\n"
        "assert not hasattr(nanovllm_cli, 'nothing')\n"
        "assert {'LLM', 'SamplingParams', '__version__'} <= set(dir(nanovllm_cli))\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_texts_and_ids_one_or_several_give_what_transformers_gives(model: Model, llm: LLM) -> None:
    prompts: list[Any] = ["Once upon a time", list(b"Once"), "zażółć gęślą jaźń", tuple(range(40, 99))]
    expected = [model.answer(list(p.encode()) if isinstance(p, str) else list(p), 16) for p in prompts]
    together = llm.generate(prompts, greedy(16))
    assert [ids_of(output) for output in together] == expected
    assert [output.outputs[0].text for output in together] == [text_of(ids) for ids in expected]
    assert [output.prompt_token_ids for output in together[:2]] == [tuple(b"Once upon a time"), tuple(b"Once")]
    for prompt, ids in zip(prompts[:2], expected, strict=False):
        (alone,) = llm.generate(prompt, sampling_params=greedy(16))
        assert ids_of(alone) == ids
        assert alone.finished
        assert alone.outputs[0].finish_reason == "length"
    assert llm.generate([], greedy()) == []


def test_what_the_model_is(model: Model, llm: LLM) -> None:
    assert llm.num_parameters == sum(p.numel() for p in model.reference.parameters())
    assert (llm.dtype, llm.spec.vocab_size, llm.max_model_len) == (torch.float32, VOCAB, CONTEXT)
    assert llm.name == str(model.folder)
    assert llm.weight_bytes >= 4 * sum(p.numel() for p in model.reference.parameters() if p.dim() > 1)
    per_token = 2 * SMALL["num_hidden_layers"] * SMALL["num_key_value_heads"] * SMALL["head_dim"] * 4
    assert 1.0 <= llm.kv_bytes / (64 * 16 * per_token) < 1.2  # heads of 24 are padded to whole vectors


def test_outputs_come_in_the_order_of_the_prompts_whatever_each_asks_for(llm: LLM) -> None:
    each = [greedy(12), greedy(1), SamplingParams(seed=5, max_tokens=7, ignore_eos=True), greedy(3)]
    prompts = ["first", "second", "third", "fourth"]
    outputs = llm.generate(prompts, each)
    assert [bytes(output.prompt_token_ids).decode() for output in outputs] == prompts
    assert [len(ids_of(output)) for output in outputs] == [12, 1, 7, 3]
    for prompt, params, output in zip(prompts, each, outputs, strict=True):
        assert ids_of(llm.generate(prompt, params)[0]) == ids_of(output)


def test_as_many_params_as_prompts_or_one(llm: LLM) -> None:
    with pytest.raises(UsageError, match="2 prompts and 3 sampling parameters"):
        llm.generate(["a", "b"], [greedy(1)] * 3)
    with pytest.raises(UsageError, match="1 prompts and 0"):
        llm.generate("a", [])


def test_what_a_model_suppresses_is_not_drawn(model: Model) -> None:
    path = model.folder / "generation_config.json"
    before = path.read_text()
    first = model.answer(list(b"Once"), 1)[0]
    path.write_text(json.dumps({"do_sample": False, "max_new_tokens": 4, "suppress_tokens": [first, 10**9]}))
    try:
        with load(model) as llm:
            drawn = ids_of(llm.generate("Once")[0])
            assert drawn
            assert first not in drawn
            lifted = llm.default_params.under({"logit_bias": {first: 0.0}})
            assert ids_of(llm.generate("Once", lifted)[0])[0] == first
    finally:
        path.write_text(before)


def test_without_params_the_models_own_defaults_count(model: Model) -> None:
    path = model.folder / "generation_config.json"
    before = path.read_text()
    path.write_text(json.dumps({"do_sample": False, "max_new_tokens": 5, "eos_token_id": [EOS, 10**9]}))
    try:
        with load(model) as llm:
            assert (llm.default_params.temperature, llm.default_params.max_tokens) == (0.0, 5)
            expected = model.answer(list(b"Once"), 5)
            assert ids_of(llm.generate("Once")[0]) == expected[: [*expected, EOS].index(EOS) + 1]
    finally:
        path.write_text(before)


def test_an_end_that_config_json_alone_names_ends_an_answer(model: Model) -> None:
    path, own = model.folder / "generation_config.json", model.folder / "config.json"
    before, config = path.read_text(), own.read_text()
    last = model.answer(list(b"Once"), 3)[2]
    path.unlink()
    own.write_text(json.dumps({**json.loads(config), "eos_token_id": [last, 10**9]}))
    try:
        with load(model) as llm:
            answer = model.answer(list(b"Once"), 3)
            params = SamplingParams(temperature=0.0, max_tokens=24)
            assert ids_of(llm.generate("Once", params)[0]) == answer[: answer.index(last) + 1]
    finally:
        path.write_text(before)
        own.write_text(config)


def test_stream_says_the_same_piece_by_piece(model: Model, llm: LLM) -> None:
    expected = model.answer(list(b"Once"), 24)
    parts = list(llm.stream("Once", greedy(24)))
    assert "".join(part.outputs[0].delta_text for part in parts) == text_of(expected) == parts[-1].outputs[0].text
    assert [i for part in parts for i in part.outputs[0].delta_ids] == expected
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts) == 24


def test_closing_a_stream_aborts_its_request(llm: LLM) -> None:
    stream = llm.stream("Once upon", greedy(100))
    for _ in range(3):
        next(stream)
    assert llm.stats().used_blocks > 0
    stream.close()  # type: ignore[attr-defined]
    assert llm.stats().used_blocks == 0


def test_streams_in_step_with_one_another_lose_nothing(model: Model, llm: LLM) -> None:
    """Two streams, and a generate between their parts: every step serves all of them."""
    first, second = llm.stream("Once", greedy(10)), llm.stream("The end", greedy(6))
    parts: dict[str, list[RequestOutput]] = {"Once": [next(first)], "The end": []}
    assert ids_of(llm.generate("between", greedy(20))[0]) == model.answer(list(b"between"), 20)
    for pair in itertools.zip_longest(first, second):
        for prompt, part in zip(parts, pair, strict=True):
            parts[prompt] += [part] if part else []
    for prompt, found in parts.items():
        expected = model.answer(list(prompt.encode()), 10 if prompt == "Once" else 6)
        assert [i for part in found for i in part.outputs[0].delta_ids] == expected


def test_chat_renders_the_template_and_answers(model: Model, llm: LLM) -> None:
    hello = [{"role": "user", "content": "hi"}]
    longer = [*hello, {"role": "assistant", "content": "yes?"}, {"role": "user", "content": "no"}]
    prompt = [USER, *b"hi", EOS, ASSISTANT]
    assert llm.encode_chat(hello) == prompt
    (alone,) = llm.chat(hello, greedy(8))
    assert ids_of(alone) == model.answer(prompt, 8)
    one, other = llm.chat([hello, longer], greedy(8))
    assert ids_of(one) == ids_of(alone)
    assert list(other.prompt_token_ids) == [*prompt, *b"yes?", EOS, USER, *b"no", EOS, ASSISTANT]


def test_control_tokens_in_a_message_stay_text(llm: LLM) -> None:
    encoded = llm.encode_chat([{"role": "user", "content": "</s><|assistant|>"}])
    assert encoded == [USER, *b"</s><|assistant|>", EOS, ASSISTANT]


def test_variables_of_a_template_are_its_own(llm: LLM) -> None:
    hello = [{"role": "user", "content": "hi"}]
    assert llm.encode_chat(hello, chat_template_kwargs={"tone": "dry"}) == llm.encode_chat(hello)
    for name in ("messages", "tokenizer", "self"):
        with pytest.raises(UsageError, match=name):
            llm.encode_chat(hello, chat_template_kwargs={name: 1})


def test_chat_needs_a_template(model: Model, tmp_path: Path) -> None:
    for file in model.folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "tokenizer_config.json").unlink()
    with LLM(tmp_path, config=EngineConfig(threads=2, num_blocks=8)) as llm:
        with pytest.raises(UsageError, match="has no chat template") as raised:
            llm.chat([{"role": "user", "content": "hi"}])
        assert "--raw" in (raised.value.hint or "")
    with LLM(tmp_path, config=EngineConfig(threads=2, num_blocks=8), chat_template="{{ messages[0].content }}!") as llm:
        assert llm.encode_chat([{"role": "user", "content": "hi"}]) == list(b"hi!")


def test_an_answer_that_was_begun_is_gone_on_with(model: Model, llm: LLM) -> None:
    """vLLM's two switches, of which one alone says it here."""
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "we"}]
    for switches in ({"continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": False}):
        (output,) = llm.chat(begun, greedy(4), **switches)  # type: ignore[arg-type]
        assert list(output.prompt_token_ids) == [USER, *b"hi", EOS, ASSISTANT, *b"we"]
        assert ids_of(output) == model.answer(list(output.prompt_token_ids), 4)
    assert llm.encode_chat(begun, add_generation_prompt=False) == [USER, *b"hi", EOS, ASSISTANT, *b"we", EOS]
    for wrong in (begun[:1], []):
        with pytest.raises(UsageError, match="the last message is not the assistant's"):
            llm.chat([wrong, begun], greedy(1), continue_final_message=True)


def test_generate_iter_takes_requests_as_room_appears(model: Model) -> None:
    count, taken, finished = 30, 0, 0

    def requests() -> Iterator[tuple[str, list[int], SamplingParams]]:
        nonlocal taken
        for i in range(count):
            taken += 1
            yield f"r{i}", list(b"request %d" % i), greedy(1 + i % 5)

    with load(model, max_num_seqs=2) as llm:
        found = {}
        for output in llm.generate_iter(requests()):
            assert taken - finished <= 2 * QUEUE_FACTOR
            finished += 1
            found[output.request_id] = output
        assert list(found) != [f"r{i}" for i in range(count)]  # in the order in which they finished
        assert {name: len(ids_of(output)) for name, output in found.items()} == {
            f"r{i}": 1 + i % 5 for i in range(count)
        }
        assert ids_of(found["r29"]) == model.answer(list(b"request 29"), 5)


def test_generate_iter_aborts_what_is_unfinished_when_it_is_left(llm: LLM) -> None:
    endless = llm.generate_iter((str(i), list(b"abc"), greedy(2 + i)) for i in range(100))
    next(endless)
    assert llm.stats().used_blocks > 0
    endless.close()  # type: ignore[attr-defined]
    assert not llm.engine.has_unfinished()
    refused = llm.generate_iter([("a", list(b"abc"), greedy(50)), ("b", [VOCAB], greedy(1))])
    with pytest.raises(UsageError, match="not in the vocabulary"):
        next(refused)


def test_progress_hears_of_every_request_that_finishes(llm: LLM) -> None:
    heard: list[tuple[int, int]] = []
    llm.generate(["a", "b", "c"], [greedy(3), greedy(1), greedy(2)], progress=lambda *counts: heard.append(counts))
    assert heard == [(1, 3), (2, 3), (3, 3)]


def test_a_line_on_stderr_counts_what_is_finished(llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    llm.generate(["a", "b"], greedy(1))
    assert capsys.readouterr().err == ""
    llm.generate(["a", "b"], greedy(1), use_tqdm=True)
    assert re.fullmatch(r"prompts: 2 of 2, \d+\.\d a second\n", capsys.readouterr().err)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    llm.embed(["a", "b"], use_tqdm=True)
    assert re.fullmatch(r"\rtexts: 1 of 2, .* a second\rtexts: 2 of 2, .* a second\n", capsys.readouterr().err)
    with pytest.raises(UsageError, match="use_tqdm is True or False"):
        llm.generate("a", greedy(1), use_tqdm=print)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="tell the same"):
        llm.chat([{"role": "user", "content": "hi"}], greedy(1), use_tqdm=True, progress=lambda done, of: None)


@pytest.mark.parametrize(("method", "name", "hint"), [
    ("generate", "lora_request", "SamplingParams(lora=NAME)"), ("generate", "prompt_token_ids", "a list of ids is a prompt"),
    ("chat", "chat_template", "LLM(…, chat_template=SOURCE)"), ("chat", "template_kwargs", "chat_template_kwargs"),
    ("embed", "pooling_params", "pooling names one"), ("generate", "sampling_param", "did you mean sampling_params?"),
    ("chat", "zzz", "help(LLM.chat) lists what it takes"),
])  # fmt: skip
def test_arguments_of_vllm_are_told_what_serves_instead(llm: LLM, method: str, name: str, hint: str) -> None:
    asked = [{"role": "user", "content": "hi"}] if method == "chat" else "a"
    with pytest.raises(UsageError, match=f"{method} has no argument '{name}'") as refused:
        getattr(llm, method)(asked, **{name: 1})
    assert hint in str(refused.value.hint)


def test_an_argument_of_vllm_that_asks_for_nothing_is_taken(llm: LLM) -> None:
    outputs = llm.generate(["a"], greedy(2), lora_request=None, priority=None)  # type: ignore[arg-type]
    assert outputs[0].outputs == llm.generate(["a"], greedy(2))[0].outputs
    with pytest.raises(UsageError, match="has no argument 'zzz'"):
        llm.generate(["a"], greedy(2), zzz=None)  # type: ignore[arg-type]


def test_methods_of_vllm_are_there_or_told_what_serves_instead(llm: LLM) -> None:
    assert llm.get_tokenizer().encode("Once") == list(b"Once")
    for name in ("beam_search", "score", "sleep", "llm_engine"):
        with pytest.raises(UsageError, match=f"LLM has no '{name}'") as refused:
            getattr(llm, name)
        assert refused.value.hint
        assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'scoer'"):
        llm.scoer  # noqa: B018
    with pytest.raises(ImportError, match=r"has no LoRARequest: SamplingParams\(lora=NAME\)"):
        from nanovllm_cli import LoRARequest  # type: ignore[attr-defined]  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'Zzz'"):
        from nanovllm_cli import Zzz  # type: ignore[attr-defined]  # noqa: F401


def test_no_name_of_vllm_that_is_told_off_is_one_of_ours(llm: LLM) -> None:
    settings = {field.name for field in dataclasses.fields(EngineConfig)}
    own = {*settings, *inspect.signature(LLM.__init__).parameters}
    assert not own & (vllm_names.SETTINGS.keys() | vllm_names.SETTING_HINTS.keys())
    assert set(vllm_names.SETTINGS.values()) <= settings
    assert vllm_names.AS_IT_IS.keys() <= vllm_names.SETTING_HINTS.keys()
    assert not {name for name in vllm_names.METHOD_HINTS if hasattr(llm, name)}
    taken = {name for method in (LLM.generate, LLM.chat, LLM.embed) for name in inspect.signature(method).parameters}
    assert not taken & vllm_names.ARGUMENT_HINTS.keys()


def test_an_answer_has_the_sum_of_its_logprobs_and_what_was_cached(model: Model, llm: LLM) -> None:
    prompt = list(b"cumulative, and of more than a block")
    outputs = [llm.generate([prompt], greedy(3, logprobs=0))[0] for _ in range(2)]
    (answer,) = outputs[1].outputs
    ids = [*prompt, *answer.token_ids]
    rows = model.logprobs(ids)[len(prompt) - 1 : -1]
    expected = float(sum(row[token] for row, token in zip(rows, answer.token_ids, strict=True)))
    assert answer.cumulative_logprob == pytest.approx(expected, abs=0.05)
    assert [each.num_cached_tokens for each in outputs] == [0, 32]
    assert llm.generate([prompt], greedy(1))[0].outputs[0].cumulative_logprob is None


def test_what_a_callback_raises_ends_everything_cleanly(llm: LLM) -> None:
    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], [greedy(2), greedy(50)], progress=stop)


def test_context_manager_closes_the_worker(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    with load(model, num_blocks=4) as llm:
        monkeypatch.setattr(llm._worker, "close", lambda: closed.append(True))
    assert closed == [True]


def test_prompt_that_leaves_no_room_is_refused_before_anything_runs(llm: LLM) -> None:
    before = llm.stats().steps
    with pytest.raises(PromptTooLongError) as raised:
        llm.generate(["short", "x" * CONTEXT], greedy(4))
    assert (raised.value.prompt_len, raised.value.limit) == (CONTEXT, CONTEXT)
    assert "--ctx-size" in str(raised.value.hint)
    with pytest.raises(PromptTooLongError):
        next(llm.stream("x" * 1000))
    with pytest.raises(UsageError, match="empty"):
        llm.generate("")
    assert llm.stats().steps == before
    assert len(ids_of(llm.generate("x" * (CONTEXT - 3), greedy(50))[0])) == 3


def test_cache_that_holds_less_than_the_context_limits_prompts(model: Model) -> None:
    with load(model, num_blocks=3) as llm:
        assert llm.max_model_len == 48
        with pytest.raises(PromptTooLongError) as raised:
            llm.generate("x" * 48)
        assert raised.value.hint == "that fills the KV cache: give it more memory", "a longer context would have no room"
        answers = llm.generate(["x" * 40, "y" * 20], greedy(50))
        assert [len(ids_of(answer)) for answer in answers] == [8, 28]


def test_several_answers_have_seeds_of_their_own(llm: LLM) -> None:
    params = SamplingParams(seed=11, max_tokens=8, ignore_eos=True)
    (one,) = llm.generate("Once", params)
    (three,) = llm.generate("Once", SamplingParams(seed=11, max_tokens=8, ignore_eos=True, n=3))
    assert [answer.index for answer in three.outputs] == [0, 1, 2]
    assert three.outputs[0].token_ids == one.outputs[0].token_ids
    assert len({answer.token_ids for answer in three.outputs}) == 3
    (same,) = llm.generate("Once", greedy(8, n=2))
    assert same.outputs[0].token_ids == same.outputs[1].token_ids


def test_logprobs_are_those_of_transformers(model: Model, llm: LLM) -> None:
    params = SamplingParams(seed=3, temperature=0.7, max_tokens=6, ignore_eos=True, logprobs=4, prompt_logprobs=1)
    (output,) = llm.generate("Once upon", params)
    expected = model.logprobs([*output.prompt_token_ids, *ids_of(output)])
    answer = output.outputs[0].logprobs
    assert answer is not None
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    entries = [*output.prompt_logprobs[1:], *answer]
    assert len(entries) == len(expected) - 1
    for entry, row, token_id in zip(entries, expected, [*output.prompt_token_ids, *ids_of(output)][1:], strict=False):
        assert entry is not None
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-3)
        assert entry.rank == 1 + int((row > row[token_id]).sum())
    for entry, row in zip(answer, expected[len(output.prompt_token_ids) - 1 :], strict=False):
        assert [i for i, _ in entry.top] == row.topk(4).indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-3)


def test_stop_string_over_several_tokens_is_never_shown(llm: LLM) -> None:
    options: dict[str, Any] = {"seed": 4, "max_tokens": 30, "allowed_token_ids": LETTERS}
    whole = llm.generate("Once", SamplingParams(**options))[0].outputs[0].text
    assert len(whole) == 30
    stop = whole[9:12]
    at = whole.index(stop)
    params = SamplingParams(**options, stop=("nowhere", stop))
    parts = list(llm.stream("Once", params))
    last = parts[-1].outputs[0]
    assert "".join(part.outputs[0].delta_text for part in parts) == last.text == whole[:at]
    assert (last.finish_reason, last.stop_reason, len(last.token_ids)) == ("stop", stop, at + 3)
    kept = llm.generate("Once", SamplingParams(**options, stop=(stop,), include_stop_str_in_output=True))
    assert kept[0].outputs[0].text == whole[: at + 3]


def test_end_of_the_model_ends_an_answer_unless_it_is_ignored(llm: LLM) -> None:
    ends = {EOS: 100.0}
    (output,) = llm.generate("Once", SamplingParams(temperature=0.0, max_tokens=5, logit_bias=ends))
    assert (output.outputs[0].finish_reason, output.outputs[0].text, ids_of(output)) == ("stop", "", [EOS])
    (output,) = llm.generate("Once", greedy(5, logit_bias=ends))
    assert (output.outputs[0].finish_reason, ids_of(output)) == ("length", [EOS] * 5)


def test_nan_in_the_logits_of_one_request_ends_that_one_alone(
    model: Model, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = llm._worker.runner.sampler
    draws = sampler.sample
    victims: set[int] = set()

    def poisoned(seq_ids: list[int], logits: torch.Tensor, rows: Any = None, masks: Any = None) -> Any:
        rows = range(len(seq_ids)) if rows is None else rows
        victims.add(min(seq_ids))  # the request that was added first
        logits = logits.clone()
        for seq_id, row in zip(seq_ids, rows, strict=True):
            if seq_id == min(victims):
                logits[row, 7] = torch.nan
        return draws(seq_ids, logits, rows, masks)

    monkeypatch.setattr(sampler, "sample", poisoned)
    prompts = ["the victim", "beside it", "and behind"]
    bad, *good = llm.generate(prompts, [greedy(9), greedy(9), SamplingParams(seed=1, max_tokens=9, ignore_eos=True)])
    assert (bad.outputs[0].finish_reason, bad.outputs[0].token_ids) == ("error", ())
    assert "NaN" in (bad.outputs[0].error or "")
    assert [output.outputs[0].finish_reason for output in good] == ["length", "length"]
    assert ids_of(good[0]) == model.answer(list(b"beside it"), 9)


@pytest.mark.parametrize("prompts", [None, 5, 1.5, [None], ["a", 7.5], b"bytes", [b"bytes"], {"a"}])
def test_prompts_that_are_none_are_refused_by_name(llm: LLM, prompts: Any) -> None:
    with pytest.raises(UsageError, match=r"^(a prompt is|prompts are) .*, not \w+(\n|$)"):
        llm.generate(prompts, greedy(1))


@pytest.mark.parametrize("make_number", [numpy.int64, numpy.int32, numpy.uint8])
def test_ids_are_whole_numbers_of_any_kind(llm: LLM, make_number: Any) -> None:
    ids = list(b"the cat")
    numbers = [make_number(each) for each in ids]
    [one], [other] = llm.generate(numbers, greedy(3)), llm.generate(ids, greedy(3))
    assert (one.prompt_token_ids, ids_of(one)) == (other.prompt_token_ids, ids_of(other))
    assert len(llm.generate([numbers, numbers], greedy(1))) == 2
    assert next(llm.stream(numbers, greedy(1))).prompt_token_ids == tuple(ids)


@pytest.mark.parametrize("messages", [{"role": "user", "content": "hi"}, 5, None, {"a"}, iter([{"role": "user"}])])
def test_messages_that_are_no_list_are_refused_by_name(llm: LLM, messages: Any) -> None:
    with pytest.raises(UsageError, match=r"^messages are a list, not \w+\n"):
        llm.chat(messages, greedy(1))


def test_numbers_of_numpy_are_numbers_in_settings() -> None:
    config = EngineConfig(max_model_len=numpy.int64(64), memory_utilization=numpy.float32(0.5))
    assert (type(config.max_model_len), type(config.memory_utilization)) == (int, float)
    assert config == EngineConfig(max_model_len=64, memory_utilization=0.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_model_len", "32K"),
        ("max_num_seqs", 1.5),
        ("max_num_seqs", True),
        ("threads", [2]),
        ("block_size", None),
        ("memory_utilization", "0.5"),
        ("aging_seconds", None),
        ("aging_seconds", float("nan")),
        ("eager", "yes"),
        ("device", None),
        ("device", 0),
        ("quant", 8),
        ("cache_salt_secret", "secret"),
        ("kv_cache_dtype", ["int8"]),
        ("dtype", torch.float32),
        ("dtype", "float64"),
        ("dtype", None),
    ],
)
def test_settings_of_another_type_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name):
        EngineConfig(**{name: value})


def test_a_config_that_is_none_is_refused_by_name() -> None:
    for config in ({"max_model_len": 64}, {}, "x"):
        with pytest.raises(UsageError, match="config is an EngineConfig, not "):
            LLM("tiny", config=config)  # type: ignore[arg-type]


def test_settings_by_name_are_a_config(llm: LLM) -> None:
    """As vLLM has them, and some by its names."""
    settings = {"max_model_len": 64, "dtype": "float32", "enforce_eager": True, "quantization": "int8"}
    settings |= {"num_gpu_blocks_override": 8, "hf_overrides": {"rms_norm_eps": 1e-4}}
    changed: Any = {"rms_norm_eps": 1e-4}
    wanted = EngineConfig(max_model_len=64, dtype="float32", eager=True, quant="int8", num_blocks=8, overrides=changed)
    assert engine_config(None, settings) == wanted
    as_it_is = {"trust_remote_code": False, "swap_space": 0, "pipeline_parallel_size": 1, "tokenizer_mode": "auto", "seed": None}
    for dtype in ("float", torch.float32):
        assert engine_config(None, {**settings, **as_it_is, "dtype": dtype}) == wanted
    others = engine_config(None, {"dtype": "half", "kv_cache_dtype": "fp8_e4m3"})
    assert (others.dtype, others.kv_cache_dtype) == ("float16", "fp8")
    assert engine_config(wanted, {}) is wanted
    with LLM("tiny", max_model_len=48, tensor_parallel_size=1) as short:
        assert short.max_model_len == 48


@pytest.mark.parametrize(
    ("config", "settings", "message", "hint"),
    [
        (None, {"max_len": 5}, "there is no setting 'max_len'", "max_model_len"),
        (None, {"dtype": torch.int8}, "unknown dtype 'int8'", "known: auto"),
        (None, {"pipeline_parallel_size": 2}, "there is no setting 'pipeline_parallel_size'", "tensor_parallel_size"),
        (None, {"swap_space": False}, "there is no setting 'swap_space'", "leave it out"),
        (None, {"trust_remote_code": True}, "there is no setting 'trust_remote_code'", "leave it out"),
        (None, {"seed": 0}, "there is no setting 'seed'", "SamplingParams"),
        (None, {"enable_lora": True}, "there is no setting 'enable_lora'", "lora_modules"),
        (None, {"zzz": 0}, "there is no setting 'zzz'", "known: dtype"),
        (None, {"eager": True, "enforce_eager": True}, "eager is given twice", None),
        (None, {"max_model_len": 0}, "max_model_len must be at least 1", None),
        (EngineConfig(), {"dtype": "float32"}, "config is given, and dtype beside it", "EngineConfig"),
    ],
)
def test_settings_that_there_are_not(
    config: EngineConfig | None, settings: dict[str, Any], message: str, hint: str | None
) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        LLM("nowhere/at-all", config=config, **settings)
    assert hint is None or hint in str(refused.value.hint)


def test_prompts_as_vllm_has_them(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Once")
    answers = [llm.generate(each, greedy(4))[0] for each in ("Once", {"prompt": "Once"}, {"prompt_token_ids": ids})]
    answers += llm.generate([{"prompt": "Once"}, {"prompt_token_ids": ids}, "Once"], greedy(4))
    assert len({(each.prompt_token_ids, each.outputs[0].text) for each in answers}) == 1
    assert [each.prompt for each in answers] == ["Once", "Once", None, "Once", None, "Once"]
    assert {each.prompt for each in llm.stream({"prompt": "Once"}, greedy(4))} == {"Once"}


@pytest.mark.parametrize("prompt", [
    {}, {"a": 1}, {"prompt": [1]}, {"prompt_token_ids": "a"}, {"role": "user", "content": "a"},
    {"prompt": "a", "multi_modal_data": {}},
])  # fmt: skip
def test_mappings_that_are_no_prompts(prompt: dict[str, Any], llm: LLM) -> None:
    for each in (prompt, [prompt, "a"]):
        with pytest.raises(UsageError, match="a prompt's keys are 'prompt', a text, or 'prompt_token_ids'"):
            llm.generate(each, greedy(2))


@pytest.mark.parametrize("params", [5, "x", "", [], {}, {"temperature": 1}, [None, None], [greedy(1), {}]])
def test_params_that_are_none_are_refused(llm: LLM, params: Any) -> None:
    wrong = "params is a SamplingParams|sampling parameters"
    with pytest.raises(UsageError, match=wrong):
        llm.generate(["a", "b"], params)
    with pytest.raises(UsageError, match=wrong):
        next(llm.stream("a", params))


def test_errors_survive_a_pickle() -> None:
    """A pool of processes waits for ever for an error that cannot be read again."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.NanovllmError)]
    assert len(kinds) > 15
    made = [kind("what", "do this") for kind in kinds if kind is not PromptTooLongError]
    for error in [*made, PromptTooLongError(9, 8), PromptTooLongError(9, 8, "do this")]:
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
        assert getattr(again, "__notes__", []) == [again.hint for _ in [0] if again.hint]  # which an uncaught error shows


def test_outputs_survive_a_pickle(llm: LLM) -> None:
    """What a pool of processes hands back."""
    parts = list(llm.stream("Once", greedy(5, logprobs=1)))
    for part in parts:
        assert pickle.loads(pickle.dumps(part)) == part
    assert len(pickle.loads(pickle.dumps(parts[1])).outputs[0].token_ids) == 2


def test_other_doors_refuse_by_name_too_and_leave_nothing(llm: LLM) -> None:
    for conversations in ([], [[]], [[{"role": "user", "content": "hi"}], []]):
        with pytest.raises(UsageError, match="there are no messages"):
            llm.chat(conversations, greedy(1))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unknown pooling 'max'"):
        llm.embed("text", "max")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="params is a SamplingParams"):
        list(llm.generate_iter([("a", [1], greedy(1)), ("b", [1], None)]))  # type: ignore[list-item]


def test_outputs_go_to_other_processes_and_a_model_does_not(llm: LLM) -> None:
    [output] = llm.generate("Hello", SamplingParams(max_tokens=3, temperature=0, logprobs=1))
    assert pickle.loads(pickle.dumps(output)) == output
    for copied in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="load it in each process"):
            copied(llm)
