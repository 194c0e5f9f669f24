"""--override-kv and --hf-overrides: what a model computes is what files with these settings say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from engines import SMALL, engine_for, greedy, random_model, run, save
from gguf_anew import written_anew
from nanovllm_cli.cli import parsers
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.errors import UsageError
from nanovllm_cli.llm import LLM
from nanovllm_cli.overrides import Override, as_overrides, check_asked, replaced
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.weights.checkpoint import open_checkpoint
from quantizing import TINY
from test_cli_driver import nanovllm
from test_convert import converted

PROMPT = [5, 9, 200, 31, 7, 7, 8]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
"""The bundled model's text."""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Qwen3MoeConfig(**SMALL, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=64, norm_topk_prob=True)
    return save(random_model(config), tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    converted(LLM.find("tiny").path, path, "gguf")
    return path


def tokens_of(path: Path, **overrides: Any) -> list[int]:
    config = EngineConfig(threads=2, num_blocks=64, dtype="float32", overrides=overrides)  # type: ignore[arg-type]
    with open_checkpoint(path, overrides=config.overrides) as checkpoint:
        worker = Worker(checkpoint, config)
    return list(run(engine_for(worker), [(PROMPT, greedy(12))])[0].outputs[0].token_ids)


@pytest.mark.parametrize("chosen", [1, 2])
def test_another_number_of_experts_is_what_transformers_computes(chosen: int, mixture: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(mixture, num_experts_per_tok=chosen, dtype=torch.float32)
    theirs = list(PROMPT)
    for _ in range(12):
        with torch.inference_mode():
            theirs.append(int(model(torch.tensor([theirs])).logits[0, -1].argmax()))
    assert tokens_of(mixture, num_experts_per_tok=chosen) == theirs[len(PROMPT) :]
    assert tokens_of(mixture) != theirs[len(PROMPT) :]


@pytest.mark.parametrize("changed", [{"rope_theta": 123.0}, {"num_attention_heads": 6, "rms_norm_eps": 0.1}])
def test_a_folder_is_what_it_would_be_with_these_settings(changed: dict[str, Any], tmp_path: Path, mixture: Path) -> None:
    folder = Path(shutil.copytree(mixture, tmp_path / "copy"))
    said = json.loads((folder / "config.json").read_text())
    said.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps({"rope_theta": 10000.0, **said}))
    plain = tokens_of(folder, **changed)
    (folder / "config.json").write_text(json.dumps({"rope_theta": 10000.0, **said, **changed}))
    assert tokens_of(folder) == plain


@pytest.mark.parametrize(
    "changed",
    [
        {"qwen3.rope.freq_base": 77.0},
        {"qwen3.attention.layer_norm_rms_epsilon": 0.25},
        {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 40},
        {"tokenizer.chat_template": "{{ messages[0].content }} {{ messages[0].content }}"},
    ],
)
def test_a_gguf_file_is_what_it_would_be_with_these_settings(changed: dict[str, Any], tmp_path: Path, tiny_gguf: Path) -> None:
    def said(path: Path, **overrides: Any) -> list[object]:
        llm = LLM(path, config=EngineConfig(threads=2, num_blocks=64, overrides=overrides))  # type: ignore[arg-type]
        answer = llm.generate(["Once upon a time", "The dog"], GREEDY)
        chat = llm.chat([[{"role": "user", "content": "Hello"}]], GREEDY)
        return [(each.prompt_token_ids, each.outputs[0].text) for each in (*answer, *chat)]

    with_it = said(tiny_gguf, **changed)
    assert with_it == said(written_anew(tiny_gguf, tmp_path / "anew.gguf", changed))
    assert with_it != said(tiny_gguf)


def test_what_a_gguf_file_says_of_sampling_can_be_replaced(tiny_gguf: Path) -> None:
    llm = LLM(tiny_gguf, config=EngineConfig(num_blocks=64, overrides={"general.sampling.temp": 0.125}))  # type: ignore[arg-type]
    assert llm.default_params.temperature == 0.125


def test_nested_settings_lie_beside_those_that_are_there() -> None:
    config = {"a": 1, "inner": {"b": 2, "deep": {"c": [3]}}}
    given = {"inner": {"deep": {"c": [4, 5], "new": None}}, "a": 2}
    found = replaced(config, as_overrides(given))
    assert json.loads(json.dumps(found)) == {"a": 2, "inner": {"b": 2, "deep": {"c": [4, 5], "new": None}}}
    assert config == {"a": 1, "inner": {"b": 2, "deep": {"c": [3]}}}, "what was read of the file stays as it is"
    assert as_overrides(as_overrides(given)) == as_overrides(given)
    assert as_overrides({"a": {}}) == (Override(("a",), "{}"),)


@pytest.mark.parametrize(
    ("old", "new"),
    [(1, "1"), (1, True), (True, 1), ("x", 1.5), ([1], 1), (1, [1]), ({"b": 1}, 2), (1.5, False), ("x", {"y": 1})],
)
def test_values_of_another_kind_are_refused(old: Any, new: Any) -> None:
    with pytest.raises(UsageError, match="in the model's files"):
        replaced({"a": old}, as_overrides({"a": new}))


@pytest.mark.parametrize(("old", "new"), [(1, 2.0), (1.5, 2), (None, "x"), ("x", None), ([1], [2.5, "y"])])
def test_numbers_are_of_one_kind_and_null_of_any(old: Any, new: Any) -> None:
    assert replaced({"a": old}, as_overrides({"a": new}))["a"] == new


@pytest.mark.parametrize("given", [[1], "a=1", {1: 2}, {"": 2}, {"a": float("nan")}, {"a": object()}, {"a": {"b": b"c"}}, None])
def test_what_no_settings_are(given: object) -> None:
    with pytest.raises(UsageError):
        EngineConfig(overrides=given)  # type: ignore[arg-type]


def test_settings_lie_in_a_bounded_number_of_others() -> None:
    deep: Any = 1
    for _ in range(9):
        deep = {"a": deep}
    with pytest.raises(UsageError, match="at most 8"):
        as_overrides(deep)


def test_what_nobody_asks_for_is_refused_and_the_nearest_name_told(mixture: Path) -> None:
    with pytest.raises(UsageError, match="'num_experts_per_tokn'") as caught:
        tokens_of(mixture, num_experts_per_tokn=2)
    assert caught.value.hint == "did you mean num_experts_per_tok?"
    with pytest.raises(UsageError, match=r"'qwen3moe\.expert_used_count'") as caught:
        tokens_of(mixture, **{"qwen3moe.expert_used_count": 2})
    assert "config.json" in str(caught.value.hint)


def test_who_goes_through_all_settings_may_have_asked_for_each() -> None:
    settings = replaced({"a": 1, "b": 2}, as_overrides({"a": 3, "c": 4}))
    assert {**settings} == dict(settings) == settings | {} == {} | settings == {"a": 3, "b": 2, "c": 4}
    assert [note.split()[0] for note in check_asked(settings)] == ["c"], "a is in the files: nobody mistyped it"
    for ask in (lambda s: s["c"], lambda s: s.get("c"), lambda s: "c" in s):
        settings = replaced({"a": 1}, as_overrides({"c": 4}))
        ask(settings)
        assert check_asked(settings) == []
    assert check_asked({"a": 1}) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a.b=int:4", (("a.b", 4),)),
        ("a=int:-4,b=bool:false,c=str:x,y=z,d=float:1e-5", (("a", -4), ("b", False), ("c", "x,y=z"), ("d", 1e-5))),
        ("a=str:", (("a", ""),)),
        ("a=str:one:two=three", (("a", "one:two=three"),)),
    ],
)
def test_words_of_llama_cpp(text: str, found: object) -> None:
    assert parsers.override_kv(text) == found


@pytest.mark.parametrize("text", ["", "a", "a=4", "a=int", "a=int:x", "a=float:x", "a=bool:1", "a=bool:True", "=int:4", "a=u8:1"])
def test_what_is_none_of_these_words(text: str) -> None:
    with pytest.raises(ValueError, match=r"KEY=TYPE:VALUE|is no"):
        parsers.override_kv(text)


@pytest.mark.parametrize("words", [["--override-kv", "rms_norm_eps=float:0.1"], ["--hf-overrides", '{"rms_norm_eps": 0.1}']])
def test_what_other_settings_cost_is_measured(words: list[str], tmp_path: Path) -> None:
    shutil.copytree(TINY, changed := tmp_path / "changed")
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))

    def measured(*models: str) -> dict[str, Any]:
        done = nanovllm(tmp_path, "perplexity", *models, "--chunks", "1", "--json")
        assert done.code == 0, done.err
        found: dict[str, Any] = json.loads(done.out)
        return found

    own, other = measured("tiny"), measured(str(changed))
    assert measured("tiny", *words)["perplexity"] == other["perplexity"] != own["perplexity"]
    both = measured("tiny", "tiny", *words)["quality"]
    assert both == measured("tiny", str(changed))["quality"]
    assert nanovllm(tmp_path, "perplexity", "tiny", "tiny", "--override-kv", "rms_norm_epsi=float:0.1").code == 2


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--override-kv", "num_hidden_layers=int:2,rope_theta=float:5e5", "--json"], 0, '"layers": 2'),
        (["--override-kv", "hidden_layers=int:2"], 2, "hint: did you mean num_hidden_layers?"),
        (["--override-kv", "rope_theta=float:5e5,rope_theta=float:4e5"], 2, "rope_theta has two other values"),
        (["--override-kv", "rope_theta=float:5e5", "--hf-overrides", '{"rope_theta": 4e5}'], 2, "has two other values"),
        (["--override-kv", "num_hidden_layers=2"], 2, "KEY=TYPE:VALUE"),
        (["--override-kv", "vocab_size=int:-1"], 1, "hint: the files may be sound: they have another vocab_size"),
        (["--hf-overrides", '{"num_attention_heads": 7, "rope_theta": 5e5}'], 1, "another num_attention_heads and rope_theta"),
        (["--hf-overrides", '{"num_hidden_layers": "two"}'], 2, "num_hidden_layers is a whole number in the model's files"),
        (["--hf-overrides", "num_hidden_layers=2"], 2, "--hf-overrides is not"),
    ],
)
def test_from_the_command_line(words: list[str], code: int, told: str) -> None:
    command = [sys.executable, "-m", "nanovllm_cli", "plan", "tiny", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"NO_COLOR": "1"})
    assert done.returncode == code
    assert told in " ".join((done.stdout if code == 0 else done.stderr).split())
