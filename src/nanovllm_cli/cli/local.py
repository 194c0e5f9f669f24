"""A model in this process as `run` and `chat` see it: questions become token ids, steps of the engine become pieces."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm_cli.cli import records
from nanovllm_cli.cli.answering import Answer, Answering, Answers, Given, Piece, Result, Results, Settled, Usage
from nanovllm_cli.cli.model import Loaded, MakeSplitter, Prompting, Splitter, find
from nanovllm_cli.cli.question import Question
from nanovllm_cli.errors import DoesNotFitError, NanovllmError, RequestError, UsageError
from nanovllm_cli.vision_spec import TokenIds

if TYPE_CHECKING:
    from nanovllm_cli.chat.toolbox import Toolbox
    from nanovllm_cli.cli.options import ModelOptions
    from nanovllm_cli.cli.output import Console
    from nanovllm_cli.cli.prompt_cache import PromptCache
    from nanovllm_cli.cli.shared_options import Choice
    from nanovllm_cli.config import EngineConfig
    from nanovllm_cli.engine.outputs import CompletionOutput, RequestOutput
    from nanovllm_cli.llm import LLM
    from nanovllm_cli.sampling_params import SamplingParams

Encoded = tuple[list[int], "SamplingParams"]

logger = logging.getLogger(__name__)


class LocalAnswering(Answering):
    """One request in the engine. make_splitter: None for text that has neither reasoning nor calls of tools in it."""

    def __init__(
        self,
        llm: LLM,
        ids: Sequence[int],
        params: SamplingParams,
        make_splitter: MakeSplitter | None = None,
        load_seconds: float | None = None,
    ) -> None:
        self.answers = Answers()
        self._llm = llm
        self._prompt_ids = ids if isinstance(ids, TokenIds) else TokenIds(ids)
        self._load_seconds = load_seconds
        self._make_splitter = make_splitter
        self._splitters: dict[int, Splitter] = {}
        self._output: RequestOutput | None = None
        self._steps = llm.stream(ids, params)

    @property
    def began(self) -> bool:
        return bool(self.answers.first.num_tokens)

    @property
    def finished(self) -> bool:
        return self._output is not None and self._output.finished

    @property
    def prompt_len(self) -> int:
        return len(self._prompt_ids)

    @property
    def num_read(self) -> int:
        return self._output.metrics.num_computed_prompt_tokens if self._output is not None else 0

    @property
    def ids(self) -> TokenIds:
        """What the engine has read and drawn, and the images in it."""
        drawn = self._output.outputs[0].token_ids if self._output is not None else ()
        return self._prompt_ids + list(drawn)

    @property
    def read(self) -> tuple[Sequence[int], int, Sequence[int]]:
        """The prompt, how many of its tokens the cache had, and what was drawn."""
        assert self._output is not None, "there has been a step"
        return self._prompt_ids, self._output.metrics.num_cached_tokens, self._output.outputs[0].token_ids

    @property
    def result(self) -> Result:
        cached = self._output.metrics.num_cached_tokens if self._output is not None else 0
        answers = self.answers.in_order()
        usage = Usage(self.prompt_len, cached, sum(answer.num_tokens or 0 for answer in answers))
        return Result(answers, usage, self._make_splitter is not None)

    def __next__(self) -> list[Piece]:
        self._output = next(self._steps)
        return [piece for output in self._output.outputs if (piece := self._take(output)) is not None]

    def flush(self) -> str:
        first = self.answers.first
        splitter = self._splitters.get(0)
        if splitter is None or first.finish_reason is not None:
            return ""
        content = splitter.finish().content
        first.content += content
        return content

    def statistics(self, now: float) -> records.Statistics:
        assert self._output is not None, "there has been a step"
        return records.Statistics.of(self._output, self._llm, self._load_seconds, now)

    def close(self) -> None:
        self._steps.close()

    def _take(self, output: CompletionOutput) -> Piece | None:
        """What is new of one answer, if anything is."""
        answer = self.answers.at(output.index)
        ends = output.finish_reason is not None and answer.finish_reason is None
        if not (output.delta_text or output.delta_ids or ends):
            return None
        reasoning, content = self._split(answer, output, ends)
        answer.reasoning += reasoning
        answer.content += content
        answer.num_tokens = output.num_tokens
        answer.finish_reason, answer.stop_reason = output.finish_reason, output.stop_reason
        answer.error, answer.unmeetable = output.error, output.unmeetable
        new = None
        if output.delta_logprobs is not None:
            new = records.logprob_records(output.delta_logprobs, self._llm)
            answer.logprobs = answer.logprobs or []
            answer.logprobs += new
        return Piece(answer, reasoning, content, output.delta_ids, new)

    def _split(self, answer: Answer, output: CompletionOutput, ends: bool) -> tuple[str, str]:
        if self._make_splitter is None:
            return "", output.delta_text
        splitter = self._splitters.get(output.index)
        if splitter is None:
            splitter = self._splitters[output.index] = self._make_splitter()
        reasoning, content = "", ""
        for delta in (splitter.push(output.delta_text), *([splitter.finish()] if ends else [])):
            reasoning, content = reasoning + delta.reasoning, content + delta.content
            answer.calls += getattr(delta, "calls", ())
        return reasoning, content


def open_local(
    name: str,
    options: ModelOptions,
    config: EngineConfig,
    screen: Console,
    *,
    raw: bool,
    system: str | None,
    think: Choice | None,
    kwargs: dict[str, Any],
    prompt_cache: PromptCache | None = None,
    tools: Toolbox | None = None,
) -> LocalAnswerer:
    """Loads a model. tools: that it may call, which come meanwhile. Raises NanovllmError, and UsageError where something was
    asked for that only a template could give."""
    found = find(name, options, config, screen, shows_calls=tools is not None)
    if tools is not None:
        tools.source.check()
    loaded = found()
    try:
        offered = tools.for_template() if tools is not None else ()
        return LocalAnswerer(loaded, Prompting(loaded.llm, raw, system, think, kwargs, offered), config, prompt_cache)
    except BaseException:
        loaded.llm.close()
        raise


class LocalAnswerer:
    """A loaded model with the prompts that options ask for. config: what it was loaded with."""

    def __init__(
        self, loaded: Loaded, prompting: Prompting, config: EngineConfig, prompt_cache: PromptCache | None = None
    ) -> None:
        self._llm = loaded.llm
        self._config = config
        self._seconds = loaded.seconds
        self._prompting = prompting
        self._prompt_cache = prompt_cache
        self._asked: LocalAnswering | None = None

    @property
    def name(self) -> str:
        return self._llm.name

    @property
    def chats(self) -> bool:
        return self._prompting.chats

    @property
    def dictates(self) -> bool:
        return self._llm.hearing is not None and self._llm.hearing.leads

    @property
    def reads_alone(self) -> bool:
        return self._llm.spec.encoder is not None

    def asked_for_words(self, question: Question) -> Question:
        """By a Whisper as it is; else in a conversation, as the model's family is asked, and without times."""
        return question if self.dictates else self._prompting.for_words(question)

    def look(self, url: str) -> None:
        self._prompting.look(url)

    @property
    def identity(self) -> list[str]:
        """The model by its files, and the settings that decide an answer, "auto" as what it came to. How fast one comes, and how
        much memory that takes, decides nothing."""
        llm, config = self._llm, self._config
        own = [str(getattr(llm.resolved, name, None)) for name in ("path", "repo", "revision", "quant")]
        own += [f"{name} {scale}" for name, scale in self.adapters]
        own += [f"{name}={Path(path).resolve()}" for name, path in llm.lora_modules]
        own += [str(self.changes)] if self.changes else []
        beside = [path for path, _ in (*llm.lora, *config.control_vectors)]
        beside += [*(path for _, path in llm.lora_modules), *filter(None, [llm.mmproj])]
        own += [stamps_of(Path(path)) for path in (str(llm.resolved.path), *beside)]
        settings = {
            "on": "a GPU" if llm.threads is None else "a CPU",
            "dtypes": [str(dtype) for dtype in (llm.dtype, *llm.kv_dtypes)],
            "quant": config.quant,
            "activations": config.activations,
            "deterministic": config.deterministic,
            "max_model_len": config.max_model_len,  # not what there was memory for
            "image_max_tokens": None if llm.vision is None else config.image_max_tokens,
            "video": None if llm.vision is None else (config.video_fps, config.video_max_frames),
            "template": llm.chat_template.source if self.chats and llm.chat_template is not None else None,
        }
        return own + [f"{name}={value}" for name, value in settings.items()]

    @property
    def adapters(self) -> list[tuple[str, float]]:
        return [(str(Path(name).resolve()), scale) for name, scale in self._llm.lora]

    @property
    def changes(self) -> dict[str, Any]:
        config, found = self._config, dict[str, Any]()
        if config.control_vectors:
            found["control_vectors"] = [(str(Path(path).resolve()), scale) for path, scale in config.control_vectors]
            found["control_vector_layers"] = config.control_vector_layers
        if any(config.rope):
            found["rope"] = list(config.rope)
        if config.overrides:
            found["overrides"] = [list(each) for each in config.overrides]
        return found

    def settled(self, given: Given) -> Settled:
        return Settled(self._prompting.settled_for_all(given))

    def ask(self, question: Question, given: Given) -> Answering:
        if self.dictates:
            from nanovllm_cli.cli.dictating import DictationAnswering

            return DictationAnswering(self._llm, question, given, self._seconds)
        ids, params = self._encode(question, given)
        if self._prompt_cache is not None:
            self._prompt_cache.read(self._llm, ids)
        self._asked = LocalAnswering(self._llm, ids, params, self._prompting.parser_for(ids), self._seconds)
        return self._asked

    def ask_all(self, questions: Iterable[tuple[int, Question, Given]]) -> Results:
        waiting = iter(questions)
        again: deque[tuple[int, Encoded]] = deque()
        running: dict[int, Encoded] = {}  # in the order in which the engine took them
        failed: list[tuple[int, Exception]] = []
        cache = self._prompt_cache
        if cache is not None:
            cache.read(self._llm)

        def requests() -> Iterator[tuple[str, list[int], SamplingParams]]:
            """What is left to run, encoded when the engine asks for it."""
            while again:
                key, encoded = again.popleft()
                running[key] = encoded
                yield str(key), *encoded
            for key, question, given in waiting:
                try:
                    encoded = self._checked(question, given)
                except Exception as failure:  # whatever is wrong with one question is that question's matter
                    failed.append((key, failure))
                    continue
                running[key] = encoded
                yield str(key), *encoded

        while True:
            try:
                for output in self._llm.generate_iter(requests()):
                    yield from failed
                    failed.clear()
                    key = int(output.request_id)
                    ids, _ = running.pop(key)
                    if cache is not None:
                        cache.note(ids, output.metrics.num_cached_tokens)
                    yield key, self._result(output)
                break
            except (UsageError, DoesNotFitError) as failure:
                if not running:
                    raise
                # The last one taken was refused at the engine's door; those inside came out with it and go in again.
                failed.append((running.popitem()[0], failure))
                again.extend(running.items())
                running.clear()
        yield from failed
        for key in running:
            yield key, RequestError("the engine gave no answer")

    def limit(self, given: Given) -> str:
        most = given.get("max_tokens", self._llm.default_params.max_tokens)
        if most is not None:
            return f"the model's own limit is {most} tokens; -n raises it"
        return f"the context of {self._llm.max_model_len} tokens is full"

    def close(self) -> None:
        """Keeps what was read, where that is wanted, too. Raises OutputError and DoesNotFitError."""
        try:
            if self._prompt_cache is not None:
                if self._asked is not None and self._asked.began:
                    self._prompt_cache.note(*self._asked.read)
                self._prompt_cache.write(self._llm)
        finally:
            self._llm.close()

    def _encode(self, question: Question, given: Given) -> Encoded:
        if question.begins:
            assert question.messages is not None
            ids = self._prompting.encode(question.messages) + list(question.begins)
        elif question.messages is None:
            ids = self._llm.tokenizer.encode(question.text)
        elif question.goes_on:
            ids = self._prompting.encode_unfinished(question.messages)
        else:
            ids = self._prompting.encode(question.messages)
        return ids, self._prompting.params_for(ids, given, goes_on=question.goes_on)

    def _checked(self, question: Question, given: Given) -> Encoded:
        """The same, refused here where the engine would refuse it."""
        if self.dictates:
            raise UsageError(f"{self._llm.name} writes down sounds, of which --batch has none", "run MODEL --audio FILE does")
        if question.messages is not None and self._prompting.raw:
            raise UsageError("messages need a chat template, and --raw leaves it out", "use prompt, or leave --raw out")
        if question.messages is not None and not self.chats:
            raise UsageError("messages need a model with a chat template", "use prompt")
        try:
            ids, params = self._encode(question, given)
        except NanovllmError:
            raise
        except Exception:
            logger.warning("a question failed", exc_info=True)
            raise
        self._llm.engine.check_length(len(ids))
        params.check_vocabulary(self._llm.spec.vocab_size)
        return ids, params

    def _result(self, output: RequestOutput) -> Result:
        """Of a finished request. A splitter that sees the whole text does better than one that sees pieces."""
        known = self._prompting.reasoning()
        answers = []
        for each in output.outputs:
            reasoning, content = "", each.text
            if known is not None:
                from nanovllm_cli.text.reasoning import split

                reasoning, content = split(each.text, known, self._prompting.tail(list(output.prompt_token_ids)))
            elif (make := self._prompting.parser_for(list(output.prompt_token_ids))) is not None:
                parser = make()
                content = parser.push(each.text).content + parser.finish().content
            logprobs = None if each.logprobs is None else records.logprob_records(each.logprobs, self._llm)
            reasons = each.finish_reason, each.stop_reason, each.error, each.unmeetable
            answers.append(Answer(each.index, content, reasoning, each.num_tokens, logprobs, *reasons))
        total = sum(each.num_tokens for each in output.outputs)
        usage = Usage(len(output.prompt_token_ids), output.metrics.num_cached_tokens, total)
        prompt = None
        if output.prompt_logprobs is not None:
            asked = output.prompt_logprobs
            prompt = [None if each is None else records.logprob_records([each], self._llm)[0] for each in asked]
        return Result(answers, usage, known is not None, prompt)


def stamps_of(path: Path) -> str:
    """Of the files that lie there now. Raises NanovllmError where they are gone."""
    from nanovllm_cli.weights.fingerprint import file_stamps, setting_stamps
    from nanovllm_cli.weights.json_file import reading

    with reading(path):
        return str(file_stamps(path) + setting_stamps(path))
