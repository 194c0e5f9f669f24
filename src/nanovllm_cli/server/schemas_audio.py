"""Bodies and answers of /v1/audio, as OpenAI has them. Forms know texts alone: numbers are read out of them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from nanovllm_cli.sampling_params import MAX_TOKENS
from nanovllm_cli.server.api_error import ApiError
from nanovllm_cli.server.schemas_common import STRICT, ModelName, ShortText, StrictModel, Tolerated, Unsupported
from nanovllm_cli.server.schemas_sampling import bounded

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "num_beams", "length_penalty",
)  # fmt: skip
"""Fields of a request that SamplingParams has."""


def _told(value: object) -> object:
    if value == "diarized_json":
        told = f"response_format {value!r} has speakers, which no model here tells"
        raise ApiError(400, told, code="unsupported", param="response_format")
    return value


Form = Literal["json", "text", "srt", "vtt", "verbose_json"]


class SoundRequest(StrictModel):
    """What both kinds of requests have. language: of the sound, a code of ISO 639 or a name. prompt: names and words that may
    come up, to a model that was trained to be told them; to one that chats, what to do instead. temperature: 0 where it is
    left out; a Whisper goes on to higher ones where that gives nothing good. max_completion_tokens: of a Whisper for each
    half minute."""

    model_config = ConfigDict(**{**STRICT, "strict": False})

    file: Annotated[bytes, Field(json_schema_extra={"format": "binary"})]
    model: ModelName | None = None
    language: ShortText | None = None
    prompt: Annotated[str, Field(max_length=1 << 20)] | None = None
    response_format: Annotated[Form, BeforeValidator(_told)] = "json"
    stream: bool | None = None
    temperature: float | None = bounded("temperature")
    top_p: float | None = bounded("top_p")
    top_k: int | None = bounded("top_k")
    min_p: float | None = bounded("min_p")
    seed: int | None = Field(default=None, ge=0, le=2**64 - 1)
    repetition_penalty: float | None = bounded("repetition_penalty")
    presence_penalty: float | None = bounded("presence_penalty")
    frequency_penalty: float | None = bounded("frequency_penalty")
    num_beams: int | None = bounded("num_beams")
    length_penalty: float | None = bounded("length_penalty")
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    chunking_strategy: Tolerated = None
    timestamp_granularities: list[Literal["segment", "word"]] | None = None
    include: Unsupported = None
    languages: Unsupported = None
    keywords: Unsupported = None
    known_speaker_names: Unsupported = None
    known_speaker_references: Unsupported = None


class TranscriptionRequest(SoundRequest):
    """POST /v1/audio/transcriptions."""


class TranslationRequest(SoundRequest):
    """POST /v1/audio/translations: into English, by a Whisper."""


class TranscriptUsage(BaseModel):
    type: Literal["tokens"]
    input_tokens: int
    output_tokens: int
    total_tokens: int


class TranscriptSegment(BaseModel):
    """start, end: seconds. seek: frames of 10 ms in front of the half minute that it is part of, of which the last four tell."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class TranscriptWord(BaseModel):
    """start, end: seconds."""

    word: str
    start: float
    end: float


class VerboseUsage(BaseModel):
    type: Literal["duration"]
    seconds: int


class VerboseAnswer(BaseModel):
    """With response_format verbose_json. language: its English name. duration: seconds. words: with timestamp_granularities
    "word"; segments: without, or with "segment" beside it."""

    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: list[TranscriptSegment] | None = None
    words: list[TranscriptWord] | None = None
    usage: VerboseUsage


class TranscriptionAnswer(BaseModel):
    """With response_format json; with text, srt and vtt the body is the transcript alone, with verbose_json a VerboseAnswer."""

    text: str
    usage: TranscriptUsage


class TranscriptEvent(BaseModel):
    """delta: a piece of the text; done brings all of it, and the usage."""

    type: Literal["transcript.text.delta", "transcript.text.done"]
    delta: str | None = None
    text: str | None = None
    usage: TranscriptUsage | None = None
