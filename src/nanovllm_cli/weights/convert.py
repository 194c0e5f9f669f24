"""Conversions between formats: what will be written (`plan`), and writing it (`write`).

    Hugging Face folder -> GGUF         names, row order, header and tokenizer as llama.cpp's converter writes them
    GGUF -> Hugging Face folder         the way back: config, tokenizer and templates out of the header
    GGUF -> GGUF                        other types, parts into one file, one file into parts
    folder or pickles -> folder         other dtypes, shards into one, .bin into safetensors; any architecture

Reading is `checkpoint.py` and `pickled.py`, writing `writer.py` and `gguf_writer.py`. What cannot be carried is in `Plan.notes`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from gguf.constants import GGUFValueType, Keys
from gguf.gguf_writer import GGUFValue

from nanovllm_cli.errors import CheckpointError, OutputError, UnsupportedError, UsageError
from nanovllm_cli.model_spec import ModelSpec
from nanovllm_cli.models.family import Family
from nanovllm_cli.models.mtp import mtp_spec
from nanovllm_cli.models.registry import hf_family
from nanovllm_cli.progress import LoadProgress, NullProgress
from nanovllm_cli.text.gguf_export import same_tokens
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.weights.checkpoint import Checkpoint, open_checkpoint
from nanovllm_cli.weights.convert_delta import as_llama_cpp_has_it
from nanovllm_cli.weights.convert_gguf import gguf_header
from nanovllm_cli.weights.convert_hf import hf_files
from nanovllm_cli.weights.convert_latent import with_pairs_as_in_files
from nanovllm_cli.weights.convert_mmproj import tower_or_note
from nanovllm_cli.weights.convert_names import (
    attention_of,
    gguf_family_of,
    halves_to_pairs,
    hf_family_of,
    mtp_on_both_sides,
    named_on_both_sides,
    pairs_to_halves,
    rotary_dims,
    rotary_heads,
    text_alone,
    unread_on_both_sides,
)
from nanovllm_cli.weights.convert_stacked import by_head, stacked, with_ba_as_one
from nanovllm_cli.weights.convert_tensors import (
    PLAIN_TYPES,
    Step,
    as_many_rows,
    dtype_of,
    file_type,
    gguf_type,
    in_float32,
    is_blocks,
    main_type,
    narrowed_vectors,
    safetensors_type,
    slices,
)
from nanovllm_cli.weights.convert_towers import TowerFile
from nanovllm_cli.weights.convert_wkv import with_shares_as_one
from nanovllm_cli.weights.files import beside_weights, folder_of, some, split_parts
from nanovllm_cli.weights.folder_config import as_published, quantization_of
from nanovllm_cli.weights.gguf_writer import GGUFPartWriter, GGUFTensor, Header, header_of, part_names
from nanovllm_cli.weights.heads import head_tensors
from nanovllm_cli.weights.json_file import reading
from nanovllm_cli.weights.loader import GGUF_EXTRAS, check_tensors, read_spec
from nanovllm_cli.weights.mlx_names import is_quantized_by_mlx
from nanovllm_cli.weights.pickled import PickledCheckpoint, is_pickled, pickled_modules
from nanovllm_cli.weights.quantized import without_codes
from nanovllm_cli.weights.quantized_gguf import GGUFNumbers
from nanovllm_cli.weights.safetensors import DTYPES
from nanovllm_cli.weights.stacked import unstacked
from nanovllm_cli.weights.tensor_names import (
    bare_names,
    family_of,
    left_aside,
    mtp_gguf_names,
    mtp_names_of,
    names_of,
    that_guess,
    vector_name,
)
from nanovllm_cli.weights.weight_reader import PlainReader, refuse_factors
from nanovllm_cli.weights.writer import (
    SHARD_BYTES,
    OutputFile,
    OutputFolder,
    TensorOut,
    as_json,
    check_replaceable,
    check_room,
    exists_already,
    shards,
    write_shards,
)

Target = Literal["gguf", "hf"]

_HEADER_BYTES = 1 << 20


@dataclass
class Plan:
    """What a conversion will write. `files`: small ones of a folder, by name. `copies`: taken over as they are.

    `split_bytes`: most bytes of a file; for GGUF, None is one file. `notes`: what cannot be carried, a line each. `is_known`: the
    output has been made for an architecture that can be loaded here. `has_family`: the input is of one. `has_head`: tokens can be
    drawn from it, as far as is known. `tower`: what it sees by, for a file of its own.
    """

    target: Target
    steps: list[Step]
    notes: list[str] = field(default_factory=list)
    header: Header = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    copies: list[tuple[Path, str]] = field(default_factory=list)
    split_bytes: int | None = None
    tokenizer: Tokenizer | None = None
    is_known: bool = False
    has_family: bool = True
    has_head: bool = True
    tower: TowerFile | None = None

    @property
    def num_bytes(self) -> int:
        """Of the output, without what a header adds. Raises CheckpointError for a file that is gone."""
        copied = 0
        for source, _ in self.copies:
            with reading(source):
                copied += source.stat().st_size
        return sum(step.num_bytes for step in self.steps) + sum(map(len, self.files.values())) + copied

    @property
    def type_name(self) -> str:
        """The type that most bytes of the output have."""
        return main_type(self.steps)

    @property
    def requantized(self) -> list[Step]:
        """Blocks that become blocks of another type, and lose twice."""
        return [step for step in self.steps if is_blocks(step.before) and is_blocks(step.after) and not step.copied]

    def gguf_tensors(self) -> list[GGUFTensor]:
        return [step.gguf() for step in self.steps]

    @property
    def is_folder(self) -> bool:
        return self.target == "hf" or self.split_bytes is not None


def open_source(path: Path) -> Checkpoint:
    """What `open_checkpoint` opens, and pickled weights."""
    if path.exists() and is_pickled(path):
        return PickledCheckpoint(path)
    return open_checkpoint(path)


def plan(
    source: Checkpoint, target: Target, outtype: str = "auto", split_bytes: int | None = None, *, name: str | None = None
) -> Plan:
    """How `source` becomes a model in `target`'s format, its matrices in `outtype` (auto: as they are). `name`: of the model,
    where that is not its folder's.

    Raises UnsupportedError for what the format cannot say, CheckpointError for what contradicts itself.
    """
    source = taken_apart(source, target)
    if target == "hf" or outtype != "auto":
        refuse_factors(source)
    if source.format == "hf" and target == "hf":
        result = _folder_to_folder(source, outtype)
    elif source.format == "hf":
        result = _folder_to_gguf(source, outtype, name or folder_of(source.path).resolve().name)
    elif target == "hf":
        result = _gguf_to_folder(source, outtype)
    else:
        result = _gguf_to_gguf(source, outtype)
    result.split_bytes = split_bytes
    result.has_family = _has_family(source)
    return result


def check_output(source: Checkpoint, made: Plan, output: Path, *, replace: bool) -> None:
    """Raises UsageError where `output` exists, is the input or would take it along, or is called what it is not;
    DoesNotFitError where it has no room."""
    inside = Path(os.path.realpath(source.path))
    target = Path(os.path.realpath(output))
    if target == inside or (made.is_folder and target in inside.parents) or is_input_file(source, target):
        raise UsageError(f"{output} is the input", "-o names another output")
    _check_name(made, output)
    if os.path.lexists(target) and not replace:
        raise exists_already(output)
    if made.is_folder and os.path.lexists(target):
        check_replaceable(target)
    if not target.parent.is_dir():
        raise OutputError(f"cannot write {output}: {target.parent} is no folder", "create it first")
    check_room(output, made.num_bytes + (0 if made.tower is None else made.tower.num_bytes) + _HEADER_BYTES)


def write(
    source: Checkpoint, made: Plan, output: Path, *, replace: bool = False, progress: LoadProgress | None = None
) -> None:
    """Writes the plan to `output`, which appears whole or not at all, and has been read again before it does."""
    progress = progress or NullProgress()
    source = taken_apart(source, made.target)
    progress.stage("converting", sum(step.num_bytes for step in made.steps), "B")
    try:
        if made.is_folder:
            with OutputFolder(output, replace=replace) as folder:
                if made.target == "hf":
                    _write_folder(source, made, folder, progress)
                else:
                    _write_parts(source, made, folder, output.name, progress)
                _read_again(made, folder.path)
                folder.commit()
        else:
            with OutputFile(output, replace=replace) as file:
                GGUFPartWriter(file.file, made.header, made.gguf_tensors()).write_all(_slices(source, made), progress)
                file.file.flush()
                _read_again(made, file.temporary)
                file.commit()
    finally:
        progress.done()


def taken_apart(source: Checkpoint, target: Target) -> Checkpoint:
    """Where it gets other names, with matrices that it has as one as the ones that the model has, and codes and scales of gpt-oss
    and others as the blocks that GGUF makes of them, or numbers."""
    return source if source.format == target else without_codes(unstacked(source))


def _folder_to_gguf(source: Checkpoint, outtype: str, model_name: str) -> Plan:
    family = hf_family(source.config)
    spec = read_spec(source, PlainReader(source))
    family = gguf_family_of(family, spec)
    named = named_on_both_sides(spec, names_of(source), family.names("gguf"))
    named |= unread_on_both_sides(spec, names_of(source), family, source.names())
    whole, further = spec, mtp_names_of(source)
    if further is not None:
        ahead = mtp_spec(spec)
        whole = replace(spec, blocks=(*spec.blocks, *ahead.blocks))
        named |= mtp_on_both_sides(ahead, further, mtp_gguf_names(family, spec.num_layers))
    tower, notes = tower_or_note(source, outtype, model_name)
    notes += _check_names(source, {name: shape for name, (_, shape) in named.items()}, spec, tower)
    if isinstance(source, GGUFNumbers) and outtype == "auto":
        notes += source.told
    steps = []
    for name, (theirs, shape) in with_ba_as_one(named, source).items():
        info = source.info(name)
        stays = is_blocks(info.dtype_name) and (outtype == "auto" or info.dtype_name == "MXFP4") and not in_float32(theirs)
        after = info.dtype_name if stays else gguf_type(theirs, shape, info.dtype_name, outtype)
        norm = spec.last_norm or spec.norm if theirs == "output_norm.weight" else spec.norm
        missing = norm.offset - norm.stored_offset  # llama.cpp's Gemma has it in the gains
        added = missing if theirs.endswith("norm.weight") and not theirs.endswith("ssm_norm.weight") else 0.0
        step = Step.of(info, after, theirs)._replace(shape=shape, added=added)
        step = with_pairs_as_in_files(_turned(step, spec, family, to_gguf=True), whole, family)
        steps.append(as_llama_cpp_has_it(step, whole, family))
    steps = with_shares_as_one(stacked(by_head(steps, spec, outtype, family), family), family)
    steps = [as_many_rows(step, spec) for step in steps]
    names, kind = {step.name for step in steps}, _file_type(outtype, steps)
    header = gguf_header(source, folder_of(source.path), model_name, spec, family, names, kind, further is not None)
    if family.gguf_name in ("qwen3vl", "qwen3vlmoe"):
        deep = GGUFValue(0 if tower is None else tower.num_deep, GGUFValueType.UINT32)
        header.header[f"{family.gguf_name}.n_deepstack_layers"] = deep
    steps += [Step.made(name, tensor) for name, tensor in header.tensors.items()]
    return Plan("gguf", steps, notes + header.notes, header.header, is_known=True, has_head=spec.has_head, tower=tower)


def _gguf_to_folder(source: Checkpoint, outtype: str) -> Plan:
    spec, sees = text_alone(read_spec(source, PlainReader(source)))
    family = hf_family_of(family_of(source), spec)
    names = family.names("hf")
    both = named_on_both_sides(spec, names if spec.has_head else bare_names(names, family), names_of(source))
    named = {theirs: name for name, (theirs, _) in both.items()}
    notes = sees + _check_names(source, dict(both.values()), spec)
    vectors = narrowed_vectors(source, list(named)) if outtype == "auto" else None
    steps = []
    for theirs, name in named.items():
        info = source.info(theirs)
        after = safetensors_type(info.dtype_name, outtype)
        if vectors is not None and (len(info.shape) < 2 or in_float32(theirs)):
            after = vectors
        steps.append(_turned(Step.of(info, after, name), spec, family, to_gguf=False))
    blocks = sorted(
        {step.before for step in steps if not step.copied and step.after == "F32" and step.before not in DTYPES}
    )
    if blocks and outtype == "auto":
        notes.append(
            f"the blocks of {', '.join(blocks)}: their numbers become float32, exactly; --outtype bf16 rounds them to 16 bits"
        )
    files = hf_files(source, spec, family, dtype_of(main_type(steps)))
    tokenizer = files.tokenizer.tokenizer
    return Plan("hf", steps, notes + files.notes, files=files.files, tokenizer=tokenizer, is_known=True, has_head=spec.has_head)


def _gguf_to_gguf(source: Checkpoint, outtype: str) -> Plan:
    steps = []
    for name in source.names():
        info = source.info(name)
        keeps = outtype == "auto" or len(info.shape) < 2 or name in GGUF_EXTRAS
        steps.append(Step.of(info, info.dtype_name if keeps else gguf_type(name, info.shape, info.dtype_name, outtype)))
    header = header_of(source.config, source.metadata_types)
    if outtype != "auto":
        header[Keys.General.FILE_TYPE] = GGUFValue(_file_type(outtype, steps), GGUFValueType.UINT32)
    return Plan("gguf", steps, [], header)


def _folder_to_folder(source: Checkpoint, outtype: str) -> Plan:
    """Tensor by tensor, whatever the architecture is."""
    if is_quantized_by_mlx(source):
        raise UnsupportedError(f"{source.path}: MLX's weights in another folder", "convert it --to gguf")
    if quantization_of(source.config) is not None and outtype != "auto":
        raise UnsupportedError(
            f"{source.path}: its weights are quantized, and so have no other dtype", "leave --outtype out"
        )
    steps = [Step.of(info, safetensors_type(info.dtype_name, outtype)) for info in map(source.info, source.names())]
    kept, left = beside_weights(folder_of(source.path))
    modules = pickled_modules(folder_of(source.path))
    left = [name for name in left if f"{Path(name).parent}/model.safetensors" not in modules]
    made = Plan("hf", steps, [f"files: {some(left)}"] if left else [], files=modules, copies=kept)
    if outtype != "auto":
        config = {key: value for key, value in as_published(source.config).items() if key != "dtype"}
        made.files["config.json"] = as_json(
            config | {"torch_dtype": str(dtype_of(outtype.upper())).removeprefix("torch.")}
        )
        made.copies = [(path, name) for path, name in made.copies if name != "config.json"]
    return made


def _check_names(
    source: Checkpoint, wanted: dict[str, tuple[int, ...]], spec: ModelSpec, tower: TowerFile | None = None
) -> list[str]:
    """Raises CheckpointError where tensors are not those of the model; a line for each that is left out."""
    there = {name: source.info(name).shape for name in source.names()}
    head = {"lm_head.weight", "output.weight", names_of(source).get("head.weight", "")} if spec.tied_head else set()
    others = left_aside(source, there)
    check_tensors(source.path, spec, wanted, there, head | others, misshapen="misshapen")
    notes = [f"{name}: the config ties the head to the embedding, so nothing reads it" for name in sorted(there.keys() & head)]
    others -= frozenset() if tower is None else tower.names
    guess = that_guess(source, others) - wanted.keys()
    of_senses = source.config.get("vision_config") is not None or not family_of(source).aside
    rest = "of what sees or hears" if of_senses else "for other tasks"
    behind = head_tensors(source) | {vector_name(source)}
    apart = {rest: others - guess - wanted.keys() - behind, "that guess further tokens": guess}
    return notes + [f"{len(own)} tensors {what}: {some(sorted(own))}" for what, own in apart.items() if own]


def _turned(step: Step, spec: ModelSpec, family: Family, *, to_gguf: bool) -> Step:
    """`step`, with the rows of q and k in the order of the other side; where nothing rotates, too, as llama.cpp has them. Those
    that turn backwards are mirrored, and turn forwards."""
    turns = family.interleaved_gguf != family.interleaved or family.mirrored_gguf
    heads = rotary_heads(step.name if to_gguf else step.source or "", spec) if turns else None
    if heads is None or step.name.endswith("_norm.weight"):
        return step
    head_dim, rotary_dim = rotary_dims(attention_of(spec))
    if family.mirrored_gguf:
        return step._replace(mirrors=head_dim, rows_together=head_dim)
    to_pairs = to_gguf == family.interleaved_gguf
    turn = partial(halves_to_pairs if to_pairs else pairs_to_halves, head_dim=head_dim, rotary_dim=rotary_dim)
    return step._replace(reorder=turn, rows_together=head_dim)


def _write_folder(source: Checkpoint, made: Plan, folder: OutputFolder, progress: LoadProgress) -> None:
    for name, data in made.files.items():
        folder.write(name, data)
    for path, name in made.copies:
        folder.copy(path, name)
    if made.tokenizer is not None:
        text = same_tokens(made.tokenizer, Tokenizer.from_folder(folder.path))
        if text is not None:
            raise UnsupportedError(
                f"the tokenizer has no equal in tokenizer.json: {text[:60]!r} would become other tokens",
                "keep the model as GGUF",
            )
    tensors = [step.safetensors() for step in made.steps]
    write_shards(folder, tensors, _slices(source, made), progress, made.split_bytes or SHARD_BYTES)


def _write_parts(source: Checkpoint, made: Plan, folder: OutputFolder, stem: str, progress: LoadProgress) -> None:
    assert made.split_bytes is not None
    groups = shards(made.gguf_tensors(), made.split_bytes)
    for number, (name, group) in enumerate(zip(part_names(stem, len(groups)), groups, strict=True)):
        with (folder.path / name).open("wb") as file:
            writer = GGUFPartWriter(file, made.header, group, number, len(groups), len(made.steps))
            writer.write_all(_slices(source, made), progress)


def _slices(source: Checkpoint, made: Plan) -> Callable[[TensorOut | GGUFTensor], Iterator[torch.Tensor]]:
    by_name = {step.name: step for step in made.steps}
    return lambda tensor: slices(source, by_name[tensor.name])


def _read_again(made: Plan, path: Path) -> None:
    """What was written is read as anybody will read it. A failure here is a fault of the writing, or of the disk."""
    with open_checkpoint(path) as written:
        found = {name: (written.info(name).shape, written.info(name).dtype_name) for name in written.names()}
        if found != {step.name: (step.shape, step.after) for step in made.steps}:
            raise OutputError(f"{path}: what was written is not what was meant", "check the disk, and report this")
        if made.is_known:
            read_spec(written, PlainReader(written))


def _file_type(outtype: str, steps: list[Step]) -> int:
    """What was asked for, where a tensor has it; else what most bytes have. As llama.cpp's converter has it, MXFP4 beside plain
    numbers counts for more than those."""
    asked = outtype.upper()
    if asked.lower() in ("auto", *PLAIN_TYPES) and any(step.after == "MXFP4" for step in steps):
        asked = "MXFP4"
    return file_type(asked if any(step.after == asked for step in steps) else main_type(steps))


def _check_name(made: Plan, output: Path) -> None:
    """A name's ending says what it is, to us as well when it is opened again."""
    if made.is_folder and output.suffix in (".gguf", ".safetensors", ".bin"):
        kind = "a Hugging Face model is a folder" if made.target == "hf" else "parts of a GGUF file make a folder"
        raise UsageError(f"{output} is the name of a file, and {kind}", f"-o {output.with_suffix('')}")
    if not made.is_folder and output.suffix in (".safetensors", ".bin"):
        hint = f"-o {output.with_suffix('.gguf')}, or --to safetensors for a folder"
        raise UsageError(f"{output} is no name for a GGUF file", hint)


def _has_family(source: Checkpoint) -> bool:
    try:
        family_of(source)
    except (CheckpointError, UnsupportedError):
        return False
    return True


def is_input_file(source: Checkpoint, target: Path) -> bool:
    """Whether `target` is the input, also under another name (a link), or lies among a folder's own files."""
    if not target.exists() or not target.is_file():
        return False
    if source.format == "gguf":
        inputs = [source.path.with_name(part) for part in split_parts(source.path.name)]
    else:
        inputs = [entry for entry in folder_of(source.path).iterdir() if entry.suffix != ".gguf"]
    return any(entry.is_file() and entry.samefile(target) for entry in inputs)
