"""LLM: a model by name, ready to generate. The library's front door; the command line stands on it too.

    from nanovllm_cli import LLM, SamplingParams

    llm = LLM("tiny")
    for output in llm.generate(["Once upon a time", "The end"], SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)
    for output in llm.stream("Once upon a time"):
        print(output.outputs[0].delta_text, end="")
    llm.chat([{"role": "user", "content": "hello"}])

Threads may share one: their requests run together, each thread gets its own answers. What a stream yields is for one thread.
Not covered: which flags a person typed, how an answer is shown.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, NoReturn, Self

import torch

from nanovllm_cli.config import EngineConfig, engine_config
from nanovllm_cli.engine.answer import detokenizers_of
from nanovllm_cli.engine.checked_images import seeing_of
from nanovllm_cli.engine.draft import check_vocabulary
from nanovllm_cli.engine.engine import Engine
from nanovllm_cli.engine.kv_file import program_digest
from nanovllm_cli.engine.memory import with_room_for_leads
from nanovllm_cli.engine.outputs import EngineStats, RequestOutput
from nanovllm_cli.engine.placement import Placement
from nanovllm_cli.engine.requests import Requests
from nanovllm_cli.engine.worker import Worker
from nanovllm_cli.errors import NanovllmError, UsageError
from nanovllm_cli.hearing_spec import Senses
from nanovllm_cli.judging import Judging
from nanovllm_cli.progress import Counted, LoadProgress, NullProgress, counting
from nanovllm_cli.prompts import Prompt, listed, text_of, token_ids
from nanovllm_cli.quant.format import Format
from nanovllm_cli.quant.format_names import parse_format
from nanovllm_cli.sampling_params import SamplingParams, params_for
from nanovllm_cli.senses import kinds_of, read_parts
from nanovllm_cli.text.answer_format import model_format
from nanovllm_cli.text.chat_template import ChatTemplate, encode_chat
from nanovllm_cli.text.content_parts import ImagePart
from nanovllm_cli.text.image_tokens import asked_ids, in_vocabulary
from nanovllm_cli.text.messages import template_messages, template_tools
from nanovllm_cli.text.tokenizer import Tokenizer
from nanovllm_cli.vision_spec import TokenIds
from nanovllm_cli.vllm_names import absent, refuse_others
from nanovllm_cli.weights.checkpoint import open_checkpoint
from nanovllm_cli.weights.classes import classes_of
from nanovllm_cli.weights.fingerprint import file_stamps, fingerprint
from nanovllm_cli.weights.further import read_further
from nanovllm_cli.weights.loader import read_spec
from nanovllm_cli.weights.mmproj import with_mmproj
from nanovllm_cli.weights.pooling import embedding_of, use_of
from nanovllm_cli.weights.quantized import open_reader
from nanovllm_cli.weights.reading import own_settings
from nanovllm_cli.weights.scoring import scoring_of, second_text_of
from nanovllm_cli.weights.source import ResolvedModel, files_for, find_parts, resolve
from nanovllm_cli.weights.tokenizer import check_size, end_ids, load_tokenizer

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
Params = SamplingParams | Sequence[SamplingParams] | None
MESSAGES_HINT = 'for example: [{"role": "user", "content": "hello"}]'


class LLM(Judging):
    """A loaded model with its tokenizer and engine.

    model: a path, a hub name or an alias (see weights/source.py), or what `find` has found. config: memory, context, batching,
    dtype; settings: the same by name, LLM("tiny", max_model_len=512). chat_template: the source of one, instead of the model's
    own; tool_format, reasoning_format: by name, instead of what it says. shows_calls: special tokens of tool calls stay in the
    text, for a parser of `answer_format`. progress: told about download and loading.
    Its `engine` is for who has a loop of its own; nothing else of this object may generate meanwhile.
    lora, lora_modules, control_vectors, draft_model, mmproj (what images are read by): by their paths. mtp: whether its own layer
    guesses. dtype: of weights and activations. vision: of a model that reads images, which messages have as data URLs
    (`image_url`); hearing: of one that hears sounds (`input_audio`); sense: either.
    max_model_len: longest prompt plus answer, in tokens; context_len: as far as the KV cache goes.
    read_bytes: what a step reads of the weights, however many sequences are in it; expert_bytes: of these, those of experts, of
    which a token takes a share.
    formats: how many numbers of the matrices are kept in which format; None is the compute type. embedding: what its files say of
    vectors of texts. scoring: of a reranker, what it reads of a query and a document; of that a chat_template may be, too.
    classes: of a model that has labels.

    Raises ModelNotFoundError, AccessRefusedError, DownloadError, CheckpointError, UnsupportedError, DoesNotFitError.
    """

    def __init__(
        self,
        model: str | Path | ResolvedModel,
        *,
        config: EngineConfig | None = None,
        offline: bool = False,
        revision: str | None = None,
        chat_template: str | None = None,
        tool_format: str | None = None,
        reasoning_format: str | None = None,
        shows_calls: bool = False,
        progress: LoadProgress | None = None,
        **settings: Any,
    ) -> None:
        config = engine_config(config, settings)
        progress = progress or NullProgress()
        if not isinstance(model, ResolvedModel):
            model = self.find(model, config=config, offline=offline, revision=revision, progress=progress)
        elif offline or revision is not None:
            raise UsageError(f"offline and revision say how a name is found, and {model.name} has been found")
        config = find_parts(config, offline=offline, progress=progress)
        self.lora, self.lora_modules = config.lora, config.lora_modules
        self.tensor_parallel_size: int = config.tensor_parallel_size
        self.draft_model, self.mtp, self.control_vectors = config.draft_model, config.mtp, config.control_vectors
        self.resolved = model
        self.name: str = self.resolved.name
        with open_checkpoint(self.resolved.path, overrides=config.overrides) as checkpoint:
            self._stamps = file_stamps(self.resolved.path)
            spec, self.tokenizer = read_spec(checkpoint, open_reader(checkpoint)), load_tokenizer(checkpoint)
            self.embedding = use_of(embedding_of(checkpoint), spec)
            self.scoring = scoring_of(checkpoint, self.tokenizer, chat_template)
            self.classes = classes_of(checkpoint)
            further = read_further(checkpoint, self.embedding.layers)
            check_size(self.tokenizer, spec.vocab_size)
            config = with_room_for_leads(config, spec)
            if config.draft_model is not None:
                check_vocabulary(config.draft_model, self.tokenizer)
            config = with_mmproj(config, model.mmproj, checkpoint, spec.hidden_size, self.tokenizer.control_tokens, progress)
            encode = partial(self.tokenizer.encode, add_special_tokens=False, parse_special=False)
            self._worker = worker = Worker(checkpoint, config, encode, self._token_bytes, self.tokenizer.control_ids, progress)
            generation_config = own_settings(checkpoint, self.tokenizer.languages)
        self.mmproj: str | None = config.mmproj
        self.spec, self.sight = worker.spec, worker.sight
        self.senses = None if self.sight is None else in_vocabulary(self.sight.senses, self.tokenizer)
        self.vision, self.hearing, _ = self.senses or Senses()
        self.dtype, self.max_model_len = worker.dtype, worker.max_model_len
        self.num_parameters, self.weight_bytes = worker.num_parameters, worker.weight_bytes + worker.draft_bytes
        self.read_bytes, self.expert_bytes = worker.read_bytes, worker.expert_bytes
        self.placement: Placement = worker.placement
        self.formats: Mapping[Format | None, int] = worker.formats
        self.chat_template: ChatTemplate | None = None
        if chat_template is not None or "default" in self.tokenizer.chat_templates:
            self.chat_template = ChatTemplate.of(self.tokenizer, chat_template)
        self.answer_format = model_format(self.tokenizer, self.chat_template, tool_format, reasoning_format)
        if self.answer_format is None and (tool_format or reasoning_format):
            progress.note("the parsers of tool calls and reasoning change nothing: this model has no chat template")
        self.default_params = SamplingParams.from_generation_config(generation_config, vocab_size=self.spec.vocab_size)
        visible = self.answer_format.visible_ids(calls=shows_calls) if self.answer_format is not None else []
        self.engine = Engine(
            worker,
            config,
            detokenizer_factory=detokenizers_of(self.tokenizer, [*visible, *asked_ids(self.senses, self.tokenizer)]),
            vocab_size=self.spec.vocab_size,
            max_model_len=config.max_model_len or self.spec.max_position,  # not what there was memory for
            num_blocks=worker.num_blocks,
            ahead=worker.ahead,
            prepare=worker.prepare,
            draws=self.spec.has_head,
            embeds_whole=self.spec.reads_both_ways,
            embedding_refusal=None if self.embedding.judges else self.embedding.refusal,
            further=further,
            second_text=second_text_of(self.embedding, self.tokenizer, self.spec),
            seeing=seeing_of(self.senses, self.tokenizer, self.spec),
            eos_ids=end_ids(generation_config, self.tokenizer, self.spec.vocab_size),
        )
        self.context_len = self.engine.context_len
        self._requests = Requests(self.engine, self.cache_salt, config.max_num_seqs)
        dtype, where = str(self.dtype).removeprefix("torch."), "a GPU" if self.threads is None else f"{self.threads} threads"
        logger.info("%s on %s; context of %s tokens, KV cache of %.1f MiB", dtype, where, self.context_len, self.kv_bytes / 2**20)

    @staticmethod
    def find(
        model: str | Path,
        *,
        config: EngineConfig | None = None,
        offline: bool = False,
        revision: str | None = None,
        progress: LoadProgress | None = None,
    ) -> ResolvedModel:
        """The first half of loading: what a name means, downloaded where it is not here. `LLM(LLM.find(name))` is `LLM(name)`.
        Raises what that raises for names and downloads, and UsageError for a config.quant that there is not."""
        for quant in (config.quant, config.draft_quant) if config is not None else ():
            if quant is not None:
                parse_format(quant)  # before anything is downloaded
        pick = files_for(config or EngineConfig())
        return resolve(str(model), offline=offline, revision=revision, progress=progress, pick=pick)

    # ---- what it is ----

    @property
    def threads(self) -> int | None:
        """Of the CPU, where it computes; None on a GPU."""
        return self._worker.num_threads

    @property
    def multiplies_whole(self) -> bool:
        """Whether most of the matrices are multiplied as whole numbers, int8 by int8."""
        return 2 * self._worker.num_multiplied_whole > sum(self.formats.values())

    @property
    def kv_bytes(self) -> int:
        """Size of the KV cache when full."""
        return self._worker.kv_bytes

    @property
    def vector_size(self) -> int:
        """Numbers that it makes of a text."""
        return self.embedding.width(self.spec.hidden_size)

    @property
    def kv_dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """What keys and values are kept as."""
        return self._worker.model.backend.cache_dtypes

    def check(self) -> None:
        """Raises LostError if nothing can be generated any more: one of several processes has ended, or the GPU is lost."""
        self._worker.check()

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def get_tokenizer(self) -> Tokenizer:
        """`tokenizer`, which encodes and decodes; messages become token ids by `encode_chat`."""
        return self.tokenizer

    if not TYPE_CHECKING:  # for which every name would be one

        def __getattr__(self, name: str) -> NoReturn:
            raise absent(type(self).__name__, name)

    # ---- generating ----

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        progress: Counted | None = None,
        use_tqdm: bool = False,
        **others: Never,
    ) -> list[RequestOutput]:
        """One output per prompt, in their order; all run together.

        prompts: see `Prompt`, or a list of these. sampling_params: for all, or one for each; None takes the model's own defaults.
        progress: told of each that is finished; use_tqdm: a line on stderr is. Raises UsageError and PromptTooLongError before
        anything runs, and UsageError for arguments that vLLM has.
        """
        refuse_others("generate", others)
        asked, progress = listed(prompts), counting("prompts", progress, use_tqdm)
        outputs = self._generate([token_ids(prompt, self.tokenizer.encode) for prompt in asked], sampling_params, progress)
        return [output._replace(prompt=text_of(prompt)) for output, prompt in zip(outputs, asked, strict=True)]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        progress: Counted | None = None,
        use_tqdm: bool = False,
        **others: Never,
    ) -> list[RequestOutput]:
        """The next turn of one conversation, or of several at once, or what follows in their last messages, answers that were
        begun. Messages are {"role": …, "content": …}; the rest as `generate`."""
        refuse_others("chat", others, ("chat_template_kwargs",))
        if not isinstance(messages, Sequence):
            raise UsageError(f"messages are a list, not {type(messages).__name__}", MESSAGES_HINT)
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = messages if several else [messages]
        begun = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        each = {"tools": tools, "chat_template_kwargs": chat_template_kwargs, **begun}
        encoded = [self.encode_chat(conversation, **each) for conversation in conversations]  # type: ignore[arg-type]
        return self._generate(encoded, sampling_params, counting("conversations", progress, use_tqdm))

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[RequestOutput, None, None]:
        """The output after every step that changed it, prefill included; `delta_text` is what is new. Closing the iterator
        aborts the request. Nothing runs, and nothing is refused, before the first output is asked for."""
        (params,) = params_for(self.default_params if sampling_params is None else sampling_params, 1)
        self.prepare([params])
        for output in self._requests.stream(token_ids(prompt, self.tokenizer.encode), params):
            yield output._replace(prompt=text_of(prompt))

    def generate_iter(
        self, requests: Iterable[tuple[str, Sequence[int], SamplingParams]]
    ) -> Generator[RequestOutput, None, None]:
        """Finished outputs as they finish, of (request id, token ids, params) taken from an iterable as room appears.

        A request that is refused raises when it is taken; check lengths with `max_model_len` first. Closing the iterator
        aborts what is unfinished.
        """
        return self._requests.iterate(requests)

    def prepare(self, each: Sequence[SamplingParams]) -> None:
        """Waits until the constraints of such requests are compiled. Raises UsageError for one that can't be had."""
        for future in [self._worker.prepare(params) for params in each]:
            if future is not None:
                future.result()

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> TokenIds:
        """Token ids of a conversation up to where the model answers, and its images. Control tokens inside messages stay text."""
        if self.chat_template is None:
            raise UsageError(f"{self.name} has no chat template", "use --raw for plain text, or --chat-template NAME")
        template, known = self.chat_template.for_tools(tools), None if self.answer_format is None else self.answer_format.tools
        if continue_final_message and not (messages and messages[-1].get("role") == "assistant"):
            raise UsageError("the last message is not the assistant's, and can't be continued")
        senses, parts = self.senses, list[ImagePart]()
        told = template_messages(messages, template, parts, kinds_of(senses), tools=tools or (), known=known)
        shaped = template_tools(tools, template, known) if tools else None
        read = read_parts(parts, senses)
        return encode_chat(
            self.tokenizer, template, told, tools=shaped, images=read, senses=senses, variables=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
        )  # fmt: skip

    # ---- keeping what was read ----

    def save_kv(self, ids: Prompt | None, path: Path) -> int:
        """Writes what the prefix cache holds of the beginning of `ids`, or all of it, to a file that only this user can use.

        Returns how many tokens that are: full blocks, of `ids` up to the first that the cache lacks. 0 writes nothing. Raises
        OutputError and DoesNotFitError (the disk is full), and what opening the model's files raises.
        """
        prompt = None if ids is None else token_ids(ids, self.tokenizer.encode)
        own = () if prompt is None else (prompt, self.cache_salt(len(prompt)))
        return self._requests.readers.use(lambda engine: engine.kv_files.save(Path(path), self._kv_identity, *own))

    def load_kv(self, path: Path, wanted: Prompt | None = None) -> int:
        """Makes what `save_kv` wrote findable; of `wanted`, a prompt, only what that begins with.

        Returns how many tokens that are. 0, with the reason in the log, where the file is missing or damaged, or was saved with
        another model, other settings, or by somebody else. Files are no reason to fail: the tokens can be computed.
        """
        try:
            args = Path(path), self._kv_identity, None if wanted is None else token_ids(wanted, self.tokenizer.encode)
            return self._requests.readers.use(lambda engine: engine.kv_files.load(*args))
        except NanovllmError as error:
            logger.warning("%s: not used: %s", path, error.message)
            return 0

    def __getstate__(self) -> NoReturn:
        raise TypeError("an LLM can't be pickled or copied: load it in each process, and send prompts and outputs")

    def close(self) -> None:
        """Lets go of model and cache."""
        self._requests.readers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- inside ----

    def _generate(self, prompts: Sequence[Sequence[int]], params: Params, progress: Counted | None) -> list[RequestOutput]:
        each = params_for(self.default_params if params is None else params, len(prompts))
        self.prepare(each)
        return self._requests.generate(prompts, each, progress)

    def cache_salt(self, prompt_len: int, own: str | None = None) -> str | None:
        """What the engine is given with a prompt: a caller's own salt, and what keeps prompts apart whose cached keys were
        rotated by other frequencies (see ModelSpec.rope_regime)."""
        regime = self.spec.rope_regime(prompt_len)
        return f"rope:{regime}:{own or ''}" if regime else own

    @cached_property
    def _kv_identity(self) -> str:
        """Digest of all that the KV of given tokens depends on: the weights as they were loaded, settings, and this program."""
        with open_checkpoint(self.resolved.path) as checkpoint:
            weights = fingerprint(checkpoint)
        facts = [weights, self._stamps, self._worker.cache_kind, program_digest()]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def _token_bytes(self) -> list[bytes]:
        return [self.tokenizer.id_to_bytes(i) for i in range(self.spec.vocab_size)]
