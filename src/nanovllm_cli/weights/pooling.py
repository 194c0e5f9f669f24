"""How a model makes one vector of a text, by what its files say.

    folders     modules.json and 1_Pooling/config.json, prompts in config_sentence_transformers.json (sentence-transformers)
    GGUF        {arch}.pooling_type

A model that embeds is often published without its head; whether this one is, `lacks_head` says. Vectors may pass through dense
layers behind the pooling (`further.py`); those of rerankers pass through a head, and are scores (`heads.py`, `scoring.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from gguf.constants import PoolingType

from nanovllm_cli.errors import CheckpointError, UnsupportedError, UsageError
from nanovllm_cli.model_spec import ModelSpec, Pooled, Pooling
from nanovllm_cli.models.registry import HF_BODIES
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.files import MODULES, PROMPTS, folder_of, some, stays_inside
from nanovllm_cli.weights.further import Layer, check_width, dense_module, gguf_dense, matrix_of
from nanovllm_cli.weights.heads import classifies, head_of
from nanovllm_cli.weights.json_file import MAX_CONFIG_BYTES, parse_json, read_json_file, reading
from nanovllm_cli.weights.random_weights import RandomCheckpoint
from nanovllm_cli.weights.tensor_names import is_bare, names_of, vector_name

GGUF_POOLINGS: dict[Pooling, PoolingType] = {"mean": PoolingType.MEAN, "cls": PoolingType.CLS, "last": PoolingType.LAST}
_POOLINGS: dict[str, Pooling] = {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last"}
"""In "pooling_mode_…" of a folder, and, without a second word, in the "pooling_mode" that newer ones have."""
_SHORT = {"mean": "mean_tokens", "cls": "cls_token"}
_MODE = "pooling_mode"
_KNOWN = ("Transformer", "Pooling", "Normalize", "Dense")
"""A Normalize at the end changes nothing here: vectors are normalised unless that is not wanted."""
_DEFAULT_FOLDER = "1_Pooling"
RANKING = "nanovllm embed MODEL -f FILE --query TEXT ranks texts, LLM.rank and /v1/rerank of a server do"
MARKING = "nanovllm redact MODEL, LLM.spans and /v1/spans of a server find what these mark"
CLASSIFYING = "nanovllm classify MODEL -f FILE tells classes of texts, LLM.classify and /classify of a server do"
_PLAIN = "take a reranker that is a transformer and its head alone"
_BROKEN = "the folder is incomplete or damaged: download it again"


class Embedding(NamedTuple):
    """pooling: None where the files say nothing. prompts: texts by name that stand before one to be embedded. default_prompt:
    the name of the one that does where none is named. pools_prompt: whether the mean goes over a prompt's tokens, too. refusal:
    why no vectors can be made, where they can't. ranks: scores are made instead, as `scoring_of` says. labels: and numbers of
    these, as `classes_of` says. layers: what a pooled vector goes through, whatever it becomes."""

    pooling: Pooled | None = None
    prompts: Mapping[str, str] = MappingProxyType({})
    default_prompt: str | None = None
    pools_prompt: bool = True
    refusal: UnsupportedError | None = None
    ranks: bool = False
    labels: tuple[str, ...] = ()
    layers: tuple[Layer, ...] = ()

    @property
    def pooling_of_texts(self) -> Pooling:
        """The mean where the files say nothing, or of each token."""
        return "mean" if self.pooling is None or self.pooling == "each" else self.pooling

    @property
    def judges(self) -> bool:
        """Whether scores or labels take the place of vectors."""
        return self.ranks or bool(self.labels)

    def width(self, hidden_size: int) -> int:
        """Numbers of a vector, of a model whose layers have so many."""
        return self.layers[-1].shape[0] if self.layers else hidden_size

    def prompt(self, name: str | None, pooling: Pooling) -> str:
        """What stands before a text: the prompt of that name, or the model's default. UsageError for one that there is not,
        UnsupportedError for one that is not to be pooled."""
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            there = f"there are: {some(sorted(self.prompts), 20)}" if self.prompts else "it has none at all"
            raise UsageError(f"the model has no prompt {name!r}", there)
        if self.prompts[name] and pooling == "mean" and not self.pools_prompt:
            raise UnsupportedError(f"the prompt {name!r} is not to be part of the mean, which is not supported", "leave it out")
        return self.prompts[name]


def embedding_of(checkpoint: Checkpoint) -> Embedding:
    """Of a model, by its files. CheckpointError for broken ones, UnsupportedError as `head_of`."""
    if isinstance(checkpoint, RandomCheckpoint):
        return Embedding()
    if (head := head_of(checkpoint)) is not None:
        if checkpoint.format == "hf":
            _check_ranks(folder_of(checkpoint.path))
        gives, instead = ("a reranker gives a score", RANKING) if head.ranks else ("a classifier gives labels", CLASSIFYING)
        if head.tells_tokens:
            gives, instead = "it gives each token a label", MARKING
        refusal = UnsupportedError(f"{checkpoint.path}: {gives} in place of a vector", instead)
        return Embedding(head.pooling, refusal=refusal, ranks=head.ranks, labels=head.labels, layers=head.layers)
    own = matrix_of(checkpoint, vector_name(checkpoint))  # of each token before the pooling, which is the same behind it
    if checkpoint.format == "gguf":
        pooling = _gguf_pooling(checkpoint)
        return Embedding(layers=own) if pooling is None else Embedding(pooling, layers=(*own, *gguf_dense(checkpoint)))
    folder = folder_of(checkpoint.path)
    prompts = _prompts(folder)
    try:
        config = _pooling_config(folder)
        pooling = None if config is None else _pooling(config, str(folder))
        layers = (*own, *_dense(folder))
    except UnsupportedError as refusal:
        return prompts._replace(refusal=refusal)
    pools_prompt = config is None or config.get("include_prompt") is not False
    return prompts._replace(pooling=pooling, pools_prompt=pools_prompt, layers=layers)


def use_of(embedding: Embedding, spec: ModelSpec) -> Embedding:
    """The same of a model that is of any use with it. Raises its refusal where it has no head either, and does not rank, and
    CheckpointError where what vectors go through does not take those of the model."""
    if spec.cross is not None and embedding.refusal is None:
        does = "writes down what is said" if spec.encoder is None else "answers what its encoder reads"
        refusal = UnsupportedError(f"a {spec.architecture} model {does}, and embeds nothing", "take another one")
        return embedding._replace(refusal=refusal)
    if embedding.refusal is not None and not (spec.has_head or embedding.judges):
        raise embedding.refusal
    check_width(embedding.layers, spec.hidden_size)
    return embedding


def lacks_head(checkpoint: Checkpoint) -> bool:
    """Whether it is of a model that embeds and has nothing to draw from, where its config does not tie a head to the embedding.
    Of a GGUF file, which does not say that: whether it pools, and has no head of its own."""
    if stores_head(checkpoint):
        return False
    if checkpoint.format == "gguf":
        return classifies(checkpoint) or _gguf_pooling(checkpoint) is not None
    architectures = checkpoint.config["architectures"]
    return architectures[0] in HF_BODIES or is_bare(checkpoint) or _pools(folder_of(checkpoint.path))


def stores_head(checkpoint: Checkpoint) -> bool:
    """Whether there are tensors of one; quantized, it may have others than its weight."""
    head = names_of(checkpoint)["head.weight"].removesuffix("weight")
    return any(name.startswith(head) for name in checkpoint.names())


def folder_files(pooling: Pooling, hidden_size: int) -> dict[str, bytes]:
    """The files of a folder that say how its model pools: name -> content."""
    kinds = {"": "Transformer", _DEFAULT_FOLDER: "Pooling"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    modes = {f"{_MODE}_{mode}": ours == pooling for mode, ours in _POOLINGS.items()}
    config = {"word_embedding_dimension": hidden_size, **modes, "include_prompt": True}
    return {MODULES: _json(modules), f"{_DEFAULT_FOLDER}/config.json": _json(config)}


def _gguf_pooling(checkpoint: Checkpoint) -> Pooling | None:
    key = f"{checkpoint.config.get('general.architecture')}.pooling_type"
    said = checkpoint.config.get(key, PoolingType.NONE)
    if said == PoolingType.NONE:
        return None
    for ours, theirs in GGUF_POOLINGS.items():
        if said == theirs:
            return ours
    raise CheckpointError(f"{checkpoint.path}: {key} is {said!r}, which is no way to pool", "the file is damaged, or too new")


def _pools(folder: Path) -> bool:
    try:
        return _pooling_config(folder) is not None
    except UnsupportedError:
        return True


def _pooling_config(folder: Path) -> dict[str, Any] | None:
    """None where the folder has none."""
    path: Any = _DEFAULT_FOLDER
    if (modules := folder / MODULES).is_file():
        found = [module for module in _modules(modules) if module["type"] == "Pooling"]
        if not found:
            return None
        path = found[0]["path"]
    elif not (folder / path / "config.json").is_file():
        return None
    return read_json_file(folder / path / "config.json", MAX_CONFIG_BYTES)


def _dense(folder: Path) -> tuple[Layer, ...]:
    """Dense modules, in their order. UnsupportedError for those that do not stand behind the only Pooling."""
    modules = _modules(folder / MODULES) if (folder / MODULES).is_file() else []
    kinds = [module["type"] for module in modules]
    if "Dense" not in kinds:
        return ()
    if kinds.count("Pooling") != 1 or kinds.index("Dense") < kinds.index("Pooling"):
        raise UnsupportedError(
            f"{folder}: its modules stand in an order that is not supported: {', '.join(kinds)[:80]}",
            "dense layers are for pooled vectors: Transformer, Pooling, Dense",
        )
    behind = modules[kinds.index("Pooling") + 1 :]
    layers = []
    for before, module in zip([modules[kinds.index("Pooling")], *behind], behind, strict=False):
        if module["type"] == "Dense":
            layers.append(dense_module(folder / module["path"], unit=before["type"] == "Normalize"))
    return tuple(layers)


def _check_ranks(folder: Path) -> None:
    """Raises UnsupportedError where the folder of a model with a head says that more is done than that does."""
    kinds = [module["type"] for module in _modules(folder / MODULES)] if (folder / MODULES).is_file() else []
    prompts = _prompts(folder)
    if kinds not in ([], ["Transformer"]):
        raise UnsupportedError(f"{folder}: its scores pass through other modules: {', '.join(kinds)[:80]}", _PLAIN)
    if prompts.default_prompt is not None and prompts.prompts[prompts.default_prompt]:
        raise UnsupportedError(f"{folder}: a reranker's default prompt is not supported: {prompts.default_prompt!r}", _PLAIN)


def _modules(path: Path) -> list[dict[str, str]]:
    """What a text goes through, in order, the last words of their types. Raises UnsupportedError for others than are known."""
    with reading(path), path.open("rb") as file:
        data = file.read(MAX_CONFIG_BYTES)
    listed = parse_json(b'{"modules":' + data.removeprefix(b"\xef\xbb\xbf") + b"}", str(path))["modules"]  # an array at its top
    found = []
    for module in listed if isinstance(listed, list) else [None]:
        kind, place = (module.get(key) for key in ("type", "path")) if isinstance(module, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(place, str) or (place and not stays_inside(place)):
            raise CheckpointError(f"{path}: not a list of modules with their types and folders", _BROKEN)
        kind = kind.rpartition(".")[2]
        if kind not in _KNOWN:
            raise UnsupportedError(
                f"{path.parent}: its vectors pass through a module that is not supported: {kind[:80]}",
                f"take a model that only pools; known: {', '.join(_KNOWN)}",
            )
        found.append({"type": kind, "path": place})
    return found


def _pooling(config: Mapping[str, Any], where: str) -> Pooling:
    """The mode, of which there must be one. Older files have a flag for each, newer ones the name."""
    said = config.get(_MODE)
    listed = [said] if isinstance(said, str) else said if isinstance(said, list) else []
    flags = [key.removeprefix(f"{_MODE}_") for key, flag in config.items() if key.startswith(f"{_MODE}_") and flag is True]
    modes = [_SHORT.get(str(mode), str(mode)) for mode in [*listed, *flags]]
    if not modes and f"{_MODE}_mean_tokens" not in config:
        return "mean"  # as sentence-transformers has it
    if not modes:
        raise CheckpointError(f"{where}: its pooling has no mode", _BROKEN)
    if len(modes) > 1 or modes[0] not in _POOLINGS:
        raise UnsupportedError(
            f"{where}: pooling by {' and '.join(modes)[:80]} is not supported", f"known: {', '.join(_POOLINGS)}, one of them"
        )
    return _POOLINGS[modes[0]]


def _prompts(folder: Path) -> Embedding:
    path = folder / PROMPTS
    if not path.is_file():
        return Embedding()
    config = read_json_file(path, MAX_CONFIG_BYTES)
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise CheckpointError(f"{path}: 'prompts' must be texts by name", _BROKEN)
    if default is not None and not (isinstance(default, str) and default in prompts):
        raise CheckpointError(f"{path}: 'default_prompt_name' is none of its prompts", _BROKEN)
    return Embedding(prompts=prompts, default_prompt=default)


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
