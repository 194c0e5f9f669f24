"""Heads that make a number for each label in place of tokens: of a text, of a query and a document read together, or of each
token of a text.

    folders     *ForSequenceClassification, *ForTokenClassification, as transformers has them: see `_HEADS`
    GGUF        pooling_type rank: cls.output.weight, and for encoders cls.weight with an activation before it (llama.cpp)

A head is further layers of a pooled vector, or of each token's (`further.py`). One of a single label ranks: what becomes of its
number, and what the model reads, `scoring.py` says. All that have labels classify texts, `classes.py`, or tokens, `spans.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from gguf.constants import PoolingType

from nanovllm_cli.errors import CheckpointError, UnsupportedError
from nanovllm_cli.model_spec import Pooled, Pooling
from nanovllm_cli.models.classifiers import ENCODERS, OF_TEXTS, OF_TOKENS, SAME_LAYERS
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.files import PROMPTS, folder_of
from nanovllm_cli.weights.further import ACTIVATIONS, DenseLayer, Layer, Norm, activation_of, check_shapes, shapes_of
from nanovllm_cli.weights.json_file import MAX_CONFIG_BYTES, read_json_file

Outcome = Literal["yes", "sigmoid", "identity"]
"""Of a head's numbers: the probability of the first against the second, that of the only one, or the only one itself."""

Shares = Literal["softmax", "sigmoid", "identity"]
"""Of the numbers of labels: probabilities of which one it is, of each by itself, or the numbers."""

RANKS = "cls.output.weight"
"""The last rows of a reranker's head in GGUF files."""
_LABELS = ["yes", "no"]
_TEMPLATE = "tokenizer.chat_template.rerank"
QUERY, DOCUMENT = "{query}", "{document}"
_GGUF_ENCODERS = {"bert": "tanh", "jina-bert-v2": "tanh", "modern-bert": "gelu"}
"""Architectures that read both ways -> the activation behind cls.weight."""
_BROKEN = "the model is damaged: download it again"
_UNNAMED = "llama.cpp's files have labels in ARCHITECTURE.classifier.output_labels"
_WIDTHS = ("hidden_size", "dim", "n_embd")
MAX_LABELS = 1 << 16
_LONGEST_LABEL = 200
_OTHERS = "Qwen3-Reranker is; or take a model that embeds: /v1/rerank goes by its vectors"


class Head(NamedTuple):
    """pooling: the vector that goes through the layers. outcome: of one that ranks. pairs: whether two texts are a pair of the
    tokenizer's, as encoders are taught it. template: a text around them that has QUERY and DOCUMENT in it, each once. labels: of
    its numbers, in their order; none where it does nothing but rank."""

    pooling: Pooled
    layers: tuple[Layer, ...]
    outcome: Outcome
    pairs: bool = False
    template: str | None = None
    labels: tuple[str, ...] = ()
    shares: Shares = "softmax"

    @property
    def ranks(self) -> bool:
        """Whether what it says is how well a document answers a query."""
        return len(self.labels) < 2 and not self.tells_tokens

    @property
    def tells_tokens(self) -> bool:
        return self.pooling == "each"


class _Part(NamedTuple):
    """A layer by the prefix of its tensors. bias: whether it has one, or the key of the config that says so. activation: None is
    what the config says."""

    name: str
    bias: bool | str
    activation: str | None = "identity"
    norm: str | None = None


_ROW = (_Part("score", False),)
_ROBERTA = (_Part("classifier.dense", True, "tanh"), _Part("classifier.out_proj", True))
_EACH_ROW = (_Part("score", True),)
_MODERN = (_Part("head.dense", "classifier_bias", None, "head.norm"), _Part("classifier", True))
_REWARD = (_Part("score.0", True, "relu"), _Part("score.2", True))
_HEADS: dict[str, tuple[_Part, ...]] = {
    "BertForSequenceClassification": (_Part("bert.pooler.dense", True, "tanh"), _Part("classifier", True)),
    "CamembertForSequenceClassification": _ROBERTA,
    "GteForSequenceClassification": (_Part("gte.pooler.dense", True, "tanh"), _Part("classifier", True)),
    "NewForSequenceClassification": (_Part("new.pooler.dense", True, "tanh"), _Part("classifier", True)),
    "DistilBertForSequenceClassification": (_Part("pre_classifier", True, "relu"), _Part("classifier", True)),
    "MPNetForSequenceClassification": _ROBERTA,
    "RobertaForSequenceClassification": _ROBERTA,
    "XLMRobertaForSequenceClassification": _ROBERTA,
    "ModernBertForSequenceClassification": _MODERN,
    "Qwen2ForRewardModel": _REWARD,
    **{f"{name}ForTokenClassification": (_Part("classifier", True),) for name in ENCODERS},
    "ModernBertForTokenClassification": _MODERN,
}
"""Encoders have layers for the first token, or for the mean; decoders, if they are not here, a row a label for the last one."""
_OF_THE_LAST = (_ROW, _REWARD)


def classifies(checkpoint: Checkpoint) -> bool:
    """Whether it says that it has such a head, of however many labels, in place of one that draws tokens."""
    config = checkpoint.config
    if checkpoint.format == "gguf":
        return bool(config.get(f"{config.get('general.architecture')}.pooling_type") == PoolingType.RANK)
    names = config.get("architectures")
    return isinstance(names, list) and bool(names) and isinstance(names[0], str) and names[0] in SAME_LAYERS


def head_of(checkpoint: Checkpoint) -> Head | None:
    """None of a model without one. UnsupportedError for one that is used otherwise, CheckpointError for a broken one."""
    if not classifies(checkpoint):
        return None
    return _of_gguf(checkpoint) if checkpoint.format == "gguf" else _of_folder(checkpoint)


def head_tensors(checkpoint: Checkpoint) -> set[str]:
    """Names that belong to its head, if they are there."""
    if not classifies(checkpoint):
        return set()
    if checkpoint.format == "gguf":
        encodes = checkpoint.config["general.architecture"] in _GGUF_ENCODERS
        return {RANKS} | ({f"cls.{name}" for name in ("weight", "bias", "norm.weight", "output.bias")} if encodes else set())
    config = checkpoint.config
    found = set()
    for part in _parts(config):
        found |= _names(part.name, part.bias, config)
        found |= set() if part.norm is None else _names(part.norm, "norm_bias", config)
    return found


def gguf_head(checkpoint: Checkpoint, layers: Sequence[DenseLayer], arch: str) -> dict[str, torch.Tensor]:
    """A folder's head as the tensors of a GGUF file of this architecture. UnsupportedError where that would say another."""
    head = head_of(checkpoint)
    assert head is not None
    *inner, last = layers
    activation, pooling = _GGUF_ENCODERS.get(arch), _gguf_pooling(arch)
    alike = all(layer.activation == activation and layer.shift is None and not layer.unit for layer in inner)
    usual = head.outcome == "sigmoid" if head.ranks else head.shares == "softmax"
    if not head.pairs or activation is None or not alike or head.pooling != pooling or not usual or len(inner) > 1:
        does = "ranks" if head.ranks else "tells classes"
        raise UnsupportedError(f"{checkpoint.path}: GGUF has no place for how it {does}", "keep the model as a folder")
    named = {RANKS: last.weight, "cls.output.bias": last.bias}
    for layer in inner:
        named |= {"cls.weight": layer.weight, "cls.bias": layer.bias, "cls.norm.weight": layer.gain}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _gguf_pooling(arch: str) -> Pooling:
    """Files don't say; so llama.cpp has it."""
    return "mean" if arch == "modern-bert" else "cls"


def _names(prefix: str, bias: bool | str, config: Mapping[str, Any]) -> set[str]:
    return {f"{prefix}.weight"} | ({f"{prefix}.bias"} if _said(bias, config) else set())


def _said(flag: bool | str, config: Mapping[str, Any]) -> bool:
    return flag if isinstance(flag, bool) else config.get(flag, False) is True


def _parts(config: Mapping[str, Any]) -> tuple[_Part, ...]:
    name = config["architectures"][0]
    return _HEADS.get(name, _ROW if name in OF_TEXTS else _EACH_ROW)


def _of_folder(checkpoint: Checkpoint) -> Head:
    config, path = checkpoint.config, checkpoint.path
    parts = _parts(config)
    last = f"{parts[-1].name}.weight"
    rows = max([1, *shapes_of(checkpoint, [last]).get(last, ())[:1]])
    width, layers = next((config[key] for key in _WIDTHS if key in config), None), []
    if type(width) is not int:
        raise CheckpointError(f"{path}: config.json has no 'hidden_size'", _BROKEN)
    for part in parts:
        layer = _layer(part, config, rows if part is parts[-1] else width, width, path)
        check_shapes(layer, shapes_of(checkpoint, layer.shapes), path)
        layers.append(layer)
    pooling = _pooling(config, parts, path)
    outcome: Outcome = "identity" if rows > 1 or parts is _REWARD or pooling == "each" else _outcome(checkpoint)
    labels, shares = _labels(config.get("id2label"), rows, f"{path}: config.json"), _shares(config, outcome, rows)
    return Head(pooling, tuple(layers), outcome, parts not in _OF_THE_LAST, labels=labels, shares=shares)


def _labels(said: object, rows: int, where: str) -> tuple[str, ...]:
    """By their numbers, as transformers calls them where nothing is said. Nothing of theirs does anything in a terminal."""
    if rows > MAX_LABELS:
        raise UnsupportedError(f"{where}: {rows} labels", f"at most {MAX_LABELS}")
    if said is None:
        return tuple(f"LABEL_{i}" for i in range(rows))
    named = [said.get(str(i)) for i in range(rows)] if isinstance(said, Mapping) and len(said) == rows else [None]
    if not all(isinstance(name, str | int | float) for name in named):
        told = f"has {len(said)} labels" if isinstance(said, Mapping) else "has no table of labels"
        raise CheckpointError(f"{where} {told}, and its head {rows} row{'s' if rows > 1 else ''}", _BROKEN)
    return tuple("".join(char if char.isprintable() else " " for char in str(name)[:_LONGEST_LABEL]) for name in named)


def _shares(config: Mapping[str, Any], outcome: Outcome, rows: int) -> Shares:
    """As transformers' pipeline has it; of a single label what its score is."""
    kind = config.get("problem_type")
    if kind == "regression" or (rows == 1 and outcome == "identity"):
        return "identity"
    return "softmax" if rows > 1 and kind != "multi_label_classification" else "sigmoid"


def _layer(part: _Part, config: Mapping[str, Any], rows: int, width: int, path: Path) -> Layer:
    activation, norm = part.activation, None
    if activation is None:
        activation = config.get("classifier_activation", "gelu")
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise UnsupportedError(f"{path}: classifier_activation {str(activation)[:80]!r} is not supported",
                                   f"known: {', '.join(ACTIVATIONS)}")  # fmt: skip
    if part.norm is not None:
        shift = f"{part.norm}.bias" if _said("norm_bias", config) else None
        norm = Norm(f"{part.norm}.weight", shift, _eps(config, "norm_eps", path))
    bias = f"{part.name}.bias" if _said(part.bias, config) else None
    return Layer(f"{part.name}.weight", bias, (rows, width), activation, norm)


def _eps(config: Mapping[str, Any], key: str, path: Path) -> float:
    eps = config.get(key, 1e-5)
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise CheckpointError(f"{path}: {key} is {eps!r}", _BROKEN)
    return eps


def _pooling(config: Mapping[str, Any], parts: tuple[_Part, ...], path: Path) -> Pooled:
    if config["architectures"][0] in OF_TOKENS:
        return "each"
    if parts in _OF_THE_LAST:
        return "last"
    said: Any = config.get("classifier_pooling", "cls")
    if said not in ("cls", "mean"):
        raise UnsupportedError(f"{path}: classifier_pooling {str(said)[:80]!r} is not supported", "known: cls, mean")
    pooling: Pooling = said
    return pooling


def _outcome(checkpoint: Checkpoint) -> Outcome:
    """What the files say of sentence-transformers' `activation_fn`, whose default is the sigmoid of one label."""
    path = folder_of(checkpoint.path) / PROMPTS
    newer = read_json_file(path, MAX_CONFIG_BYTES) if path.is_file() else {}
    inner = checkpoint.config.get("sentence_transformers")
    said = [
        newer.get("activation_fn"),
        inner.get("activation_fn") if isinstance(inner, Mapping) else None,
        checkpoint.config.get("sbert_ce_default_activation_function"),
    ]
    name = next((each for each in said if each is not None), None)
    found = "sigmoid" if name is None else activation_of(name, checkpoint.path)
    if found not in ("sigmoid", "identity"):
        raise UnsupportedError(f"{checkpoint.path}: scores by {found} are not supported", "known: Sigmoid, Identity")
    return "identity" if found == "identity" else "sigmoid"


def _of_gguf(checkpoint: Checkpoint) -> Head:
    config, arch = checkpoint.config, checkpoint.config["general.architecture"]
    hidden, names = config.get(f"{arch}.embedding_length"), set(checkpoint.names())
    shape = checkpoint.info(RANKS).shape if RANKS in names else ()
    if type(hidden) is not int:
        raise CheckpointError(f"{checkpoint.path}: {arch}.embedding_length is {hidden!r}", _BROKEN)
    if (activation := _GGUF_ENCODERS.get(arch)) is None:
        template, labels = config.get(_TEMPLATE), config.get(f"{arch}.classifier.output_labels")
        fits = isinstance(template, str) and template.count(QUERY) == template.count(DOCUMENT) == 1
        if not fits or not isinstance(labels, Sequence) or list(labels) != _LABELS or shape != (2, hidden):
            raise UnsupportedError(
                f"{checkpoint.path}: a reranker that does not answer yes or no, in a prompt of its own, is not supported", _OTHERS
            )
        return Head("last", (Layer(RANKS, None, (2, hidden)),), "yes", template=template)
    rows, said = next(iter(shape), 0), config.get(f"{arch}.classifier.output_labels")
    if shape != (rows, hidden) or rows < 1:
        raise CheckpointError(f"{checkpoint.path}: {RANKS} is {list(shape)}, and should be [labels, {hidden}]", _BROKEN)
    if rows > 1 and said is None:
        raise UnsupportedError(f"{checkpoint.path}: a head of {rows} labels that have no names", _UNNAMED)
    layers = []
    if "cls.weight" in names:
        norm = None
        if "cls.norm.weight" in names:
            norm = Norm("cls.norm.weight", None, _eps(config, f"{arch}.attention.layer_norm_epsilon", checkpoint.path))
        layers.append(Layer("cls.weight", "cls.bias" if "cls.bias" in names else None, (hidden, hidden), activation, norm))
    layers.append(Layer(RANKS, "cls.output.bias" if "cls.output.bias" in names else None, (rows, hidden)))
    for layer in layers:
        check_shapes(layer, shapes_of(checkpoint, layer.shapes), checkpoint.path)
    listed = {str(i): name for i, name in enumerate(said)} if isinstance(said, list) else said
    labels = _labels(listed, rows, str(checkpoint.path))
    outcome: Outcome = "sigmoid" if rows == 1 else "identity"
    return Head(_gguf_pooling(arch), tuple(layers), outcome, True, labels=labels, shares="sigmoid" if rows == 1 else "softmax")
