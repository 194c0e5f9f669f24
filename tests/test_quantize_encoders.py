"""Calibration of models whose tokens see those behind them: what layers read against transformers' by hooks, what AWQ leaves as
it is, and what each algorithm loses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, ModernBertConfig, MPNetConfig, NomicBertConfig, XLMRobertaConfig

from embedders import END, write_pooling, write_tokenizer
from engines import random_model
from nanovllm_cli.errors import UnsupportedError, UsageError
from nanovllm_cli.progress import NullProgress
from nanovllm_cli.quant import awq
from nanovllm_cli.quant.awq import scale_and_clip
from nanovllm_cli.quant.format import Integer
from nanovllm_cli.quantization.original import Original, open_original
from nanovllm_cli.quantization.pipeline import Method, Verification, plan_with_target, quantize_model
from nanovllm_cli.quantization.plan import Choices, make_plan
from nanovllm_cli.quantization.texts import NamedText, bundled_text, windows
from nanovllm_cli.quantization.vector_quality import VectorQuality
from nanovllm_cli.quantization.walk import Walk
from quantizing import TINY, quantize
from test_encoders import BEHIND_PADDING, CONFIGS, ENDS, SIZES
from test_vector_card import encoder

WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
CALIBRATION = bundled_text("calibration")
TEXTS = [torch.randint(5, 4100, (count,), generator=torch.Generator().manual_seed(count)).tolist() for count in (1, 30, 171, 300)]
BERT = {
    "qkv": "attention.self.query", "o": "attention.output.dense", "gate_up": "intermediate.dense", "down": "output.dense",
}  # fmt: skip
LLAMA = {"qkv": "self_attn.q_proj", "o": "self_attn.o_proj", "gate_up": "mlp.up_proj", "down": "mlp.down_proj"}
PLACES: dict[str, tuple[str, dict[str, str]]] = {
    "bert": ("encoder.layer", BERT),
    "roberta": ("encoder.layer", BERT),
    "distilbert": (
        "transformer.layer", {"qkv": "attention.q_lin", "o": "attention.out_lin", "gate_up": "ffn.lin1", "down": "ffn.lin2"},
    ),
    "modernbert": ("layers", {"qkv": "attn.Wqkv", "o": "attn.Wo", "gate_up": "mlp.Wi", "down": "mlp.Wo"}),
    "eurobert": ("layers", LLAMA),
    "gemma": ("layers", LLAMA),
}  # fmt: skip


@contextmanager
def walked(config: Any, folder: Path, texts: list[list[int]]) -> Iterator[tuple[Any, Walk, Original]]:
    """transformers' model and ours, whose norms and biases all matter."""
    from transformers import AutoModel

    model = random_model(config, auto=AutoModel)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    with open_original("m", folder) as original:
        yield model, Walk(original, texts, NullProgress()), original


@pytest.mark.parametrize("name", PLACES)
def test_layers_see_what_they_see_in_transformers(name: str, tmp_path: Path) -> None:
    """The whole text, behind positions, segments and their norm; of windows, those both ways."""
    layers, places = PLACES[name]
    with walked(CONFIGS[name], tmp_path, TEXTS) as (model, walk, _):
        seen: dict[tuple[int, str], list[torch.Tensor]] = {}

        def hook(key: tuple[int, str]) -> Any:
            return lambda _module, args: seen.setdefault(key, []).append(args[0][0].double())

        blocks = model.get_submodule(layers)
        for i, block in enumerate(blocks):
            for ours, theirs in places.items():
                block.get_submodule(theirs).register_forward_pre_hook(hook((i, ours)))
        with torch.no_grad():
            for ids in TEXTS:
                model(torch.tensor([ids]))
        assert walk.calibration.spec.num_layers == len(blocks)
        for i in range(len(blocks)):
            walk.enter(i)
            for ours, squares in walk.calibration.mean_squares().items():
                expected = torch.cat(seen[i, ours]).square().mean(0)
                torch.testing.assert_close(squares.double(), expected, rtol=1e-3, atol=1e-4 * float(expected.max()))


def test_scales_leave_the_vectors_of_an_encoder_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By transformers, with the changed weights put into its model. What reads the stream, or comes through a GELU, stays."""
    monkeypatch.setattr(awq, "_clip", lambda weight, *_: weight)
    places = {"v": "attention.self.value", "o": "attention.output.dense"}
    form = Integer(4, 16)
    with walked(CONFIGS["bert"], tmp_path, TEXTS) as (model, walk, original):
        ids = torch.tensor([TEXTS[2]])
        with torch.no_grad():
            before = model(ids).last_hidden_state
        for i, block in enumerate(original.spec.blocks):
            weights = walk.enter(i)
            formats = {f"{part}.weight": form for part in ("q", "k", "v", "o", "up", "down")}
            after = scale_and_clip(weights, walk.calibration.observe(), block, 0.0, formats)
            changed = {name for name in weights if not torch.equal(after[name], weights[name])}
            assert changed == {"v.weight", "v.bias", "o.weight"}
            for name in changed:
                part, _, kind = name.rpartition(".")
                getattr(model.encoder.layer[i].get_submodule(places[part]), kind).data.copy_(after[name])
        with torch.no_grad():
            found = model(ids).last_hidden_state
    assert float((found - before).abs().max()) < 1e-4 * float(before.abs().max())


# ---- what it reads ----


def test_an_encoder_is_calibrated_with_whole_texts_that_fit_its_positions(tmp_path: Path) -> None:
    """Each ends as the tokenizer ends one; a decoder with a head is still read in windows of 512 that go on."""
    with walked(CONFIGS["roberta"], tmp_path, TEXTS[:1]) as (_, _, original):
        found = Method("gptq", CALIBRATION, 5).sequences(original)
        assert [len(ids) for ids in found] == [300] * 5
        assert all(ids[-1] == END for ids in found)
        plain = original.tokenizer().encode(CALIBRATION.text, add_special_tokens=False)
        assert [token for ids in found for token in ids[:-1]] == plain[: 5 * 299]
        with pytest.raises(UsageError, match="context of 1 tokens has no room for a text"):
            next(windows(original.tokenizer(), CALIBRATION, 4100, size=1, ended=True))
    with open_original("tiny", TINY) as tiny:
        assert [len(ids) for ids in Method("gptq", CALIBRATION, 2).sequences(tiny)] == [512, 512]


# ---- what it loses ----


def made(config: Any, folder: Path) -> Path:
    from transformers import AutoModel

    random_model(config, auto=AutoModel).save_pretrained(folder)
    write_tokenizer(folder)
    write_pooling(folder, "mean")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    configs = {
        "bert": BertConfig(**SIZES | WIDE),
        "xlm-roberta": XLMRobertaConfig(**BEHIND_PADDING | WIDE | {"type_vocab_size": 1}),
        "modernbert": ModernBertConfig(**SIZES | ENDS | WIDE, local_attention=20, cls_token_id=1, sep_token_id=2),
        "mpnet": MPNetConfig(**BEHIND_PADDING | WIDE),
        "nomic-bert": NomicBertConfig(**SIZES | WIDE),
    }
    there: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in there:
            there[name] = made(configs[name], tmp_path_factory.mktemp("encoder") / "m")
        return there[name]

    return folder


def lost(to: str, output: Path, source: Path, algorithm: str = "rtn", **choices: Any) -> float:
    card = quantize(to, output, source, algorithm=algorithm, verify_tokens=600, num_samples=4, **choices)
    assert card is not None
    assert isinstance(card.quality, VectorQuality)
    return card.quality.loss[1]


@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "modernbert", "mpnet", "nomic-bert"])
def test_gptq_loses_less_of_an_encoder(name: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    source = folders(name)
    nearest = lost("int4", tmp_path / "a", source)
    assert 0 < lost("int4", tmp_path / "b", source, "gptq") < 0.6 * nearest


@pytest.mark.parametrize("name", ["bert", "xlm-roberta"])
def test_awq_of_an_encoder_that_has_no_norms_in_front(name: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    assert lost("int4:group=32", tmp_path / "b", folders(name), "awq") < lost("int4:group=32", tmp_path / "a", folders(name))


@pytest.mark.parametrize("name", ["modernbert", "nomic-bert"])
def test_awq_of_several_matrices_in_one_is_refused(name: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"awq of .*Wqkv\.weight, which is several matrices"):
        quantize("int4", tmp_path / "q", folders(name), algorithm="awq")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["modernbert", "nomic-bert"])
def test_an_importance_matrix_of_an_encoder(name: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    nearest = lost("q2_k", tmp_path / "a", folders(name), tensor_types=((".", "q2_k"),))
    assert lost("q2_k", tmp_path / "b", folders(name), "imatrix", tensor_types=((".", "q2_k"),)) < nearest


@pytest.mark.parametrize(("name", "to"), [("bert", "int4"), ("modernbert", "int4")])
def test_target_bpw_is_kept(name: str, to: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    with open_original("m", folders(name)) as original:
        plan, method = make_plan(original, Choices(to)), Method("rtn", CALIBRATION, 3)
        half = 8 * (plan.bytes_after - plan.other_bytes) / plan.num_weights
        more = plan_with_target(original, plan, half + 1, method, NullProgress())
        assert half < more.bits_a_weight <= half + 1
        verification = Verification(bundled_text("verification"), 600)
        card = quantize_model(original, more, method, tmp_path / "q", verification, NullProgress())
    assert card is not None
    assert card.quality.loss[1] < lost(to, tmp_path / "a", folders(name))


def test_a_reranker_is_calibrated_with_pairs_whose_second_text_is_marked(tmp_path: Path) -> None:
    """As transformers' layers see them; and that is what GPTQ goes by."""
    from transformers import AutoModelForSequenceClassification

    folder = encoder(tmp_path / "m", **WIDE)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder)
    seen: list[torch.Tensor] = []
    second = model.bert.encoder.layer[1].intermediate.dense
    second.register_forward_pre_hook(lambda _module, args: seen.append(args[0][0].double()))
    with open_original("m", folder) as original:
        sequences = Method("gptq", CALIBRATION, 3).sequences(original)
        assert 3 * 512 - 4 * 200 < sum(map(len, sequences)) <= 3 * 512
        tokenizer = original.tokenizer()
        walk = Walk(original, sequences, NullProgress())
        walk.enter(1)
        found = walk.calibration.mean_squares()["gate_up"].double()
    for ids in sequences:
        types = (torch.arange(len(ids)) >= tokenizer.second_text(ids)).long()
        assert 0 < int(types.sum()) < len(ids)
        with torch.no_grad():
            model(input_ids=torch.tensor([ids]), token_type_ids=types[None])
    expected = torch.cat(seen).square().mean(0)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.max()))
    cards = [quantize("int4", tmp_path / name, folder, algorithm=name, verify_tokens=1500) for name in ("rtn", "gptq")]
    nearest, gptq = (card.quality.loss[1] for card in cards if card is not None)
    assert 0 < gptq < nearest


def test_texts_that_are_nothing_are_told(tmp_path: Path) -> None:
    nothing = NamedText("a.txt", "")
    with walked(CONFIGS["bert"], tmp_path, TEXTS[:1]) as (_, _, original), pytest.raises(UsageError, match="nothing to calib"):
        Method("gptq", nothing).sequences(original)
    with open_original("m", encoder(tmp_path / "m")) as ranker, pytest.raises(UsageError, match="too short: 0 queries") as caught:
        Method("gptq", nothing).sequences(ranker)
    assert caught.value.hint == "give another --calibration"
