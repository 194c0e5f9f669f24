"""What crosses between the server and an engine's process: msgspec structs, as msgpack behind their length in four bytes.

Both sides are the same program on the same machine, over a socket pair that nobody else can open. Nothing is pickled.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from nanovllm_cli.config import EngineConfig, Lora
from nanovllm_cli.cross_spec import Alignment
from nanovllm_cli.engine.outputs import EngineStats, FinishReason
from nanovllm_cli.engine.plan import TokenLogprobs
from nanovllm_cli.hearing_spec import HearingSpec, Senses
from nanovllm_cli.model_spec import Pooled
from nanovllm_cli.sampling_fields import LogitBias
from nanovllm_cli.sampling_params import SamplingParams
from nanovllm_cli.vision_spec import PlacedImage, VisionSpec

HEADER = struct.Struct("<I")
MAX_MESSAGE_BYTES = 1 << 30


class Message(msgspec.Struct, tag=True, array_like=True):
    """The base of all; told apart by their names."""


# ---- to the engine ----


class Start(Message):
    """The first message: what to load. model: a path on this machine. Template and formats count instead of what the model says.
    kept: the file for what it has read."""

    model: str
    config: EngineConfig
    chat_template: str | None = None
    tool_format: str | None = None
    reasoning_format: str | None = None
    kept: str | None = None


class Generate(Message):
    """Ids below are the server's, and never used twice. tells_reading: outputs tell how far the prompt is read."""

    request_id: int
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    images: list[PlacedImage] = []
    tells_reading: bool = False


class Embed(Message):
    """One text's pooled hidden state, not normalised. mean: over its tokens; last, cls: of its last or first token. An Alignment:
    when the tokens of a text are said, behind a sound that is its only image."""

    request_id: int
    prompt_ids: list[int]
    pooling: Pooled | Alignment
    priority: int = 0
    lora: list[Lora] = []
    cache_salt: str | None = None
    images: list[PlacedImage] = []


class Abort(Message):
    request_id: int


class Keep(Message):
    """What the model has read is to be written to its file."""


# ---- from the engine ----


class Facts(Message):
    """What a loaded model can do. context_len: most tokens of prompt and answer together, in this KV cache. vector_size: numbers
    that it makes of a text. pooling: of texts that are embedded, where a request doesn't say. has_head: whether it answers at
    all, and does not embed alone. ranks: whether it is a reranker, which does not even that; classifies: whether it has labels,
    for texts or, where pooling is "each", for tokens. vision: of one that reads images; hearing: of one that hears."""

    context_len: int
    vocab_size: int
    vector_size: int
    block_size: int
    num_parameters: int
    weight_bytes: int
    kv_bytes: int
    dtype: str
    device: str
    max_num_seqs: int
    pooling: Pooled = "mean"
    has_head: bool = True
    ranks: bool = False
    classifies: bool = False
    vision: VisionSpec | None = None
    hearing: HearingSpec | None = None

    @property
    def senses(self) -> Senses | None:
        return Senses(self.vision, self.hearing) if self.vision or self.hearing else None


class Loading(Message):
    """How far loading is, in `unit`s; total 0 where that is not known. Or, without a stage, a `note` for who loads."""

    stage: str = ""
    done: int = 0
    total: int = 0
    unit: str = ""
    note: str = ""


class Ready(Message):
    facts: Facts


class Failed(Message):
    """Loading failed: the name of the error's class, what it says, and what to do."""

    kind: str
    message: str
    hint: str | None


class Refused(Message):
    """A request was not taken. kind: the name of the error's class."""

    request_id: int
    kind: str
    message: str
    hint: str | None


class Piece(Message):
    """What one answer of a request got in a step. unmeetable: the error is what the request asked for."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    unmeetable: bool = False


class Output(Message):
    """What a request got in a step. finished: nothing follows. num_preemptions, the guesses and the times are so far.

    times: seconds from arrival in the engine to when its prompt first ran, to its first token, to its end; None until then.
    reading: of a prompt that is being read, without pieces: tokens so far, cached ones included, and seconds since it first ran.
    """

    request_id: int
    pieces: list[Piece]
    finished: bool
    num_cached_tokens: int
    num_preemptions: int = 0
    num_guessed_tokens: int = 0
    num_held_tokens: int = 0
    times: tuple[float | None, float | None, float | None] = (None, None, None)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    reading: tuple[int, float] | None = None


class Step(Message):
    outputs: list[Output]
    stats: EngineStats


class Embedded(Message):
    """vector: float32 numbers in this machine's order."""

    request_id: int
    vector: bytes


class Kept(Message):
    """That has been done: so many tokens, all of them; 0 where nothing is new. error: why it could not be."""

    num_tokens: int
    error: str | None = None


class Alive(Message):
    """The engine's loop went round: every second where nothing else is said. In a long step it does not."""

    stats: EngineStats


ToEngine = Start | Generate | Embed | Abort | Keep
FromEngine = Loading | Ready | Failed | Refused | Step | Embedded | Kept | Alive

_encoder = msgspec.msgpack.Encoder(enc_hook=lambda value: _plain(value))
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def encode(message: ToEngine | FromEngine) -> bytes:
    """A message as it goes over the wire, its length before it."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(body)} bytes")
    return HEADER.pack(len(body)) + body


def _plain(value: Any) -> Any:
    if isinstance(value, LogitBias):
        return dict(value)
    raise TypeError(f"{type(value).__name__} does not cross")
