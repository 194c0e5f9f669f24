"""Which files make a model: decided by their names, for folders here and for listings of the hub alike.

No tensors, no network, and no heavy import: the command line asks this module while it completes names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple, Protocol

from nanovllm_cli.errors import CheckpointError, UnsupportedError, UsageError
from nanovllm_cli.weights.json_file import read_json_file

MAX_INDEX_BYTES = 100_000_000
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
MMPROJ = "mmproj-….gguf"
DRAFTERS = ("eagle3-", "mtp-", "dflash-", "dspark-")
"""What names of files begin with that llama.cpp's converter makes of what guesses, beside the model."""
_TOWER_QUANTS = ("BF16", "F16", "F32")  # llama.cpp's choice, of files that are usual
PREFERRED_QUANTS = ("Q4_K_M", "Q8_0")  # of a repository that has only GGUF files, when nobody says which

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"  # of a model that embeds

TEKKEN = "tekken.json"  # Mistral's own vocabulary, which is read where there is no other
# What a Hugging Face model has beside its weights and is read here
_SETTINGS = {
    MODULES,
    PROMPTS,
    "sentence_bert_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "source.spm",
    "sentencepiece.bpe.model",
    TEKKEN,
    "tiktoken.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "rwkv_vocab_v20230424.txt",
    "chat_template.jinja",
    "chat_template_generation.jinja",
    "chat_template.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
}
_LONGEST_NAME, _LONGEST_PART = 1024, 255  # characters of a path, bytes between its slashes, as most file systems have it
_PAPERS = ("README.md", "LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE", "quality.json")
_WEIGHTS = (".safetensors", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json", *PICKLES)
_MODULE = re.compile(r"\d{1,2}_\w{1,40}/config\.json", re.ASCII)
_MODULE_WEIGHTS = re.compile(r"[1-9]\d?_\w{1,40}/model\.safetensors", re.ASCII)  # 0_… is the model itself
_SPLIT_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_QUANT = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|FP?16|FP?32|F64|MXFP4\w*|NVFP4\w*))(?=[-.]|$)", re.IGNORECASE
)

_QUANT_AT_END = re.compile(r"[-.](?:bf16|f16|f32|i?q\d\w*|mxfp4\w*|tq\d\w*)$", re.IGNORECASE)


class Weights(NamedTuple):
    """What to fetch for one model: `files` are all names, `entry` is the one to open (None: the whole folder).

    `index_file`, where given, is among `files` and names further files, which can be known only when it is here.
    `quant` is the quantization of GGUF files; `note` is what a user should hear about the choice. `mmproj`, among `files`, is
    what a GGUF model sees by.
    """

    files: tuple[str, ...]
    entry: str | None = None
    index_file: str | None = None
    quant: str | None = None
    note: str | None = None
    mmproj: str | None = None

    def with_shards(self, folder: Path) -> Weights:
        """`files` and those that the index in `folder` names. Raises what `read_index` raises."""
        if self.index_file is None:
            return self
        return self._replace(files=(*self.files, *dict.fromkeys(read_index(folder / self.index_file).values())))


class Choose(Protocol):
    """`choose`, or what chooses otherwise."""

    def __call__(self, names: Collection[str], where: str, *, quant: str | None, file: str | None) -> Weights: ...


def choose(names: Collection[str], where: str, *, quant: str | None = None, file: str | None = None) -> Weights:
    """The files of the model among `names`, paths with `/` below a repository or snapshot that is called `where`.

    `file` picks a GGUF by its path, `quant` by its quantization, whatever the case. Otherwise safetensors come before
    GGUF, one file before shards, and consolidated.safetensors last. Raises UsageError when there is no such file or
    quantization (what is there is listed), UnsupportedError when nothing here can be read.
    """
    names = [name for name in names if stays_inside(name)]
    if (picked := _picked(names, where, quant, file)) is not None:
        return picked
    settings = sorted(
        name for name in names
        if is_setting(name) or name == "README.md" or name.startswith("additional_chat_templates/")
    )  # fmt: skip
    if "tokenizer.json" in settings and TEKKEN in settings:
        settings.remove(TEKKEN)
    top = sorted(name for name in names if "/" not in name)
    tensors = [name for name in top if name.endswith(".safetensors")]
    indexes = [name for name in top if name.endswith(".safetensors.index.json")]
    if "config.json" in names:
        if "model.safetensors" in tensors:
            return Weights((*settings, "model.safetensors"))
        index = "model.safetensors.index.json"
        if index in indexes or len(indexes) == 1:
            index = index if index in indexes else indexes[0]
            return Weights((*settings, index), index_file=index)
        others = [name for name in tensors if name != "consolidated.safetensors"]
        if len(others) == 1 or (tensors and not others):
            return Weights((*settings, (others or tensors)[0]))
    if models := _gguf_models(names):
        return _default_quant(names, models, where)
    raise _nothing_to_read(names, where)


def choose_adapter(names: Collection[str], where: str, *, quant: str | None = None, file: str | None = None) -> Weights:
    """The same for a LoRA adapter: PEFT's two files, weights last, or the GGUF file, picked where there are several. Raises as
    `choose`."""
    names = [name for name in names if stays_inside(name)]
    if (picked := _picked(names, where, quant, file)) is not None:
        return picked
    if {ADAPTER_CONFIG, ADAPTER_WEIGHTS} <= set(names):
        return Weights((ADAPTER_CONFIG, ADAPTER_WEIGHTS))
    if (models := _gguf_models(names)) and len(models) == 1:
        return _chosen_file(names, where, models[0])
    if models:
        raise UsageError(f"{where} has several GGUF files: {some(models, 30)}", "name one of them")
    if pickles := sorted(name for name in names if name.endswith(PICKLES)):
        raise pickle_error(f"{where}: {pickles[0]}")
    lacking = ADAPTER_CONFIG if ADAPTER_WEIGHTS in names else ADAPTER_WEIGHTS
    raise UnsupportedError(f"{where}: no {lacking} in it, and no .gguf file: not an adapter")


def choose_seeing(names: Collection[str], where: str, *, quant: str | None = None, file: str | None = None) -> Weights:
    """As `choose`, and what a GGUF model sees by, too, where that is there."""
    weights = choose(names, where, quant=quant, file=file)
    found = None if weights.entry is None else mmproj_beside(filter(stays_inside, names), weights.entry)
    return weights if found is None else weights._replace(files=(*weights.files, found), mmproj=found)


def choose_mmproj(names: Collection[str], where: str, *, quant: str | None = None, file: str | None = None) -> Weights:
    """What a GGUF model sees by, alone: the file, or the one of that quantization. Raises as `choose`."""
    names = [name for name in names if stays_inside(name)]
    if file is not None:
        return _chosen_file(names, where, file)
    towers = sorted(filter(is_mmproj, names))
    if quant is not None:
        towers = [name for name in towers if quant_of(name).casefold() == quant.casefold()]
    found = towers[0] if len(towers) == 1 else mmproj_beside(towers, "model.gguf")
    if found is None:
        what = f"several files {MMPROJ}" if towers else f"no file {MMPROJ}" + (f" of {quant}" if quant else "")
        raise UsageError(f"{where} has {what}", f"name one of them: {some(towers, 30)}" if towers else None)
    return Weights((found,), entry=found, quant=quant_of(found))


def is_mmproj(name: str) -> bool:
    """Whether a file of this name is what a GGUF model sees by."""
    base = PurePosixPath(name).name.lower()
    return base.endswith(".gguf") and "mmproj" in base


def mmproj_beside(names: Iterable[str], model: str) -> str | None:
    """What the GGUF model of that name sees by, of these: in its folder, else in the nearest around it. Of several, the one whose
    numbers are plain, the shortest first; None where that leaves several."""
    towers = list(filter(is_mmproj, names))
    for folder in PurePosixPath(model).parents:
        own = [name for name in towers if PurePosixPath(name).parent == folder]
        if own:
            by_quant = ([name for name in own if quant_of(name) == quant] for quant in _TOWER_QUANTS)
            first = next(filter(None, by_quant), own)
            return first[0] if len(first) == 1 else None
    return None


def mmproj_of(path: Path) -> Path | None:
    """The same for a GGUF model that is here; around its folder only as far as the snapshot goes that it is in."""
    folder = folder_of(path)
    around = (folder, *folder.parents)
    root = next((each for each in around if each.parent.name == "snapshots"), folder)
    names = [file.relative_to(root).as_posix() for each in around if each.is_relative_to(root) for file in each.glob("*.gguf")]
    found = mmproj_beside(names, (folder.relative_to(root) / "model.gguf").as_posix())
    return None if found is None else root / found


def quants(names: Iterable[str]) -> list[str]:
    """The quantizations of the GGUF models among `names`, as their files spell them."""
    return sorted({quant_of(first) for first in _gguf_models(names)})


def quant_of(name: str) -> str:
    """The quantization in a GGUF's name: Q4_K_M of `m-q4_k_m-00001-of-00002.gguf`; where there is none, the stem."""
    match = _SPLIT_NAME.fullmatch(name)
    stem = PurePosixPath(match["prefix"] if match else name.removesuffix(".gguf")).name
    found = _QUANT.findall(stem)
    return str(found[-1]).upper() if found else stem


def without_quant(stem: str) -> str:
    """A name that may end in a quantization, without that."""
    return _QUANT_AT_END.sub("", stem)


def split_parts(name: str) -> list[str]:
    """All parts of the split GGUF that `name` (a path, or a name) belongs to; [name] when it is not split."""
    match = _SPLIT_NAME.fullmatch(name)
    count = int(match["count"]) if match else 0
    if not match or not count:
        return [name]
    return [f"{match['prefix']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def gguf_models(folder: Path) -> list[Path]:
    """The GGUF models in a folder: one path for each, the first part of those that are split."""
    return [folder / name for name in _gguf_models(file.name for file in folder.glob("*.gguf"))]


def read_index(index_path: Path, kinds: tuple[str, ...] = (".safetensors",)) -> dict[str, str]:
    """The weight map of a `*.index.json`: tensor name -> shard, a name that stays inside the folder and ends as `kinds` do."""
    hint = "the file is damaged or incomplete: download it again"
    weight_map = read_json_file(index_path, MAX_INDEX_BYTES, unique_keys=True).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: no weight_map in it", hint)
    for name, shard_name in weight_map.items():
        if not isinstance(shard_name, str) or not stays_inside(shard_name):
            raise CheckpointError(
                f"{index_path}: tensor {name!r} is said to be in {shard_name!r}, which is not a file of this folder",
                "do not use this model: its index points outside its folder",
            )
        if not shard_name.endswith(kinds):
            raise UnsupportedError(
                f"{index_path}: tensor {name!r} is in {shard_name!r}, which is not a {' or '.join(kinds)} file",
                "use a repository or a copy that has .safetensors or .gguf files",
            )
    return weight_map


def stays_inside(name: str) -> bool:
    """Whether a file name from a downloaded file stays below the folder it is relative to, by its text alone
    (the Hugging Face cache's own files are symbolic links that lead out of theirs, and are fine), and could be one."""
    windows = PureWindowsPath(name)
    return bool(
        name.isprintable()
        and len(name) <= _LONGEST_NAME
        and max(map(len, name.encode().split(b"/"))) <= _LONGEST_PART
        and not windows.drive
        and not windows.root
        and ".." not in windows.parts
        and windows.parts
    )


def folder_of(path: Path) -> Path:
    """Where the files of a model lie that is opened by this path: a folder, or a file in it."""
    return path if path.is_dir() else path.parent


def is_setting(name: str) -> bool:
    """Whether a file of this name is one of those that a Hugging Face model has beside its weights."""
    return name in _SETTINGS or any(pattern.fullmatch(name) for pattern in (_MODULE, _MODULE_WEIGHTS))


def is_of_embedding(name: str) -> bool:
    """Whether a file of this name says how a model makes vectors of texts."""
    return name in (MODULES, PROMPTS) or _MODULE.fullmatch(name) is not None


class Beside(NamedTuple):
    """The small files of a folder. kept: that belong to its model whatever its weights become, and their names in a copy;
    left: names of others, but for weights in any format."""

    kept: list[tuple[Path, str]]
    left: list[str]


def beside_weights(folder: Path) -> Beside:
    """A link to nowhere counts as the setting that it is called: without its tokenizer a model is not the same."""
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    names = sorted(entry.name for entry in entries if entry.is_file() or (entry.is_symlink() and not entry.exists()))
    kept = [name for name in names if is_setting(name) or name in _PAPERS]
    left = [name for name in names if name not in kept and not name.endswith(_WEIGHTS)]
    inner = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    for path in sorted(folder.glob("[0-9]*_*/*")):  # what a text passes through behind a model that embeds
        name = f"{path.parent.name}/{path.name}"
        if is_setting(name):
            inner.append(path)
        elif not path.name.startswith("."):
            left.append(name)
    return Beside([(folder / name, name) for name in kept] + [(path, f"{path.parent.name}/{path.name}") for path in inner], left)


def some(names: list[str], limit: int = 5) -> str:
    """The first few of `names` for a message, and how many more there are."""
    listed = ", ".join(name if name.isprintable() else repr(name) for name in names[:limit])
    return listed + (f" and {len(names) - limit} more" if len(names) > limit else "")


def told_bytes(num_bytes: int) -> str:
    """For a message: 1.20 GB, 7.7 MB."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def pickle_error(where: str) -> UnsupportedError:
    return UnsupportedError(
        f"{where}: pickled weights, which can run any code when they are read, are never opened",
        "use a copy that has .safetensors or .gguf files, or make one of a folder of yours: nanovllm convert FOLDER",
    )


def adapter_error(where: str) -> UnsupportedError:
    return UnsupportedError(f"{where}: an adapter, not a model", f"name its base model first, and then --lora {where}")


def mmproj_error(where: str) -> UnsupportedError:
    return UnsupportedError(f"{where}: what a model sees by, not a model", f"name the model first, and then --mmproj {where}")


def _gguf_models(names: Iterable[str]) -> list[str]:
    """The first part of each model, in order; what models see by and importance matrices are none, nor what guesses, unless there
    is nothing else."""
    models: dict[str, str] = {}
    for name in sorted(names):
        base = PurePosixPath(name).name.lower()
        if base.endswith(".gguf") and not base.startswith("imatrix") and not is_mmproj(base):
            models.setdefault(split_parts(name)[0], name)
    by_themselves = [name for name in models.values() if not PurePosixPath(name).name.lower().startswith(DRAFTERS)]
    return by_themselves or list(models.values())


def _picked(names: list[str], where: str, quant: str | None, file: str | None) -> Weights | None:
    """What was asked for by name; None where nobody says which."""
    if file is not None:
        return _chosen_file(names, where, file)
    return None if quant is None else _chosen_quant(names, where, quant)


def _chosen_file(names: list[str], where: str, file: str) -> Weights:
    if not file.endswith(".gguf"):
        raise UsageError(f"{file}: only a .gguf file can be picked from {where}", "name the repository alone")
    parts = split_parts(file)
    missing = [part for part in parts if part not in names]
    if missing:
        models = _gguf_models(names)
        raise UsageError(
            f"{where} has no file {missing[0]}", f"there are: {some(models, 30)}" if models else "it has no GGUF files"
        )
    return Weights(tuple(parts), entry=parts[0], quant=quant_of(file))


def _chosen_quant(names: list[str], where: str, quant: str) -> Weights:
    models = _gguf_models(names)
    if not models:
        raise UsageError(
            f"{where} has no GGUF files to choose {quant} from",
            "leave the part after the colon out",
        )
    fitting = [name for name in models if quant_of(name).casefold() == quant.casefold()]
    if not fitting:
        raise UsageError(f"{where} has no quantization {quant}", f"there are: {some(quants(names), 40)}")
    weights = _chosen_file(names, where, fitting[0])
    if len(fitting) > 1:
        weights = weights._replace(note=f"{where} has {len(fitting)} files of {quant}: took {fitting[0]}")
    return weights


def _default_quant(names: list[str], models: list[str], where: str) -> Weights:
    by_quant = {quant_of(name): name for name in reversed(models)}
    quant = next((quant for quant in PREFERRED_QUANTS if quant in by_quant), quant_of(models[0]))
    weights = _chosen_file(names, where, by_quant[quant])
    if len(models) > 1:
        others = [other for other in by_quant if other != quant]
        weights = weights._replace(note=f"{where}: took {quant}; there are also {some(others, 30)}" if others else None)
    return weights


def _nothing_to_read(names: list[str], where: str) -> UnsupportedError:
    if ADAPTER_CONFIG in names:
        return adapter_error(where)
    if pickles := sorted(name for name in names if name.endswith(PICKLES)):
        return pickle_error(f"{where}: {pickles[0]}")
    if any(name.endswith(".safetensors") for name in names):
        if "config.json" not in names:
            return UnsupportedError(f"{where}: no config.json beside the weights: not a language model?")
        return UnsupportedError(f"{where}: several .safetensors files and no index that names them")
    return UnsupportedError(f"{where}: no .safetensors or .gguf weights in it", "look for a conversion of this model")
