"""Speculation by a small model that reads what layers of the large one read (EAGLE-3, `models/eagle.py`).

It goes on as a layer of the model's own does (`mtp.py`): its K and V lie beside the model's, and before a step it is fed what the
last one was fed, with the rows that the model's taps made of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm_cli.attention.kv_cache import KVCache
from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.drafting import LoadedGuesser
from nanovllm_cli.engine.loaded_model import LoadedModel
from nanovllm_cli.engine.memory import check_weights_fit
from nanovllm_cli.engine.mtp import Fed, MTPDraft
from nanovllm_cli.engine.plan import Drawn, NewSequence
from nanovllm_cli.models.eagle_layer import Eagle
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.eagle import eagle_names, guessed_ids, load_eagle, read_eagle


class LoadedEagle(LoadedGuesser):
    """For `loaded`, whose layers get taps. UnsupportedError where it is made for another model; otherwise as LoadedModel.
    token_ids: the model's token for each of its own; None: they are the same."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, loaded: LoadedModel, progress: LoadProgress) -> None:
        names = eagle_names(checkpoint)
        super().__init__(checkpoint, config, loaded, names)
        eagle = read_eagle(checkpoint, self._reader, names, loaded.model)
        self.spec = self.own_spec = eagle.spec
        self.token_ids = guessed_ids(checkpoint, eagle, loaded.spec)
        aside = set() if eagle.own_embedding else {names["embedding.weight"]}
        check_weights_fit(self._num_bytes(self._reader.names() - aside), self.platform.available_bytes())
        self.model = Eagle(eagle, self._kit(), loaded.model)
        self.platform.compile(self.dtype)
        load_eagle(self.model, checkpoint, self._reader, names, progress)
        self._count()
        loaded.recordable = loaded.recordable and self.recordable
        loaded.model.taps = self.model.fuses


class EagleDraft(MTPDraft):
    """cache: of as many blocks as the model's."""

    def __init__(self, loaded: LoadedEagle, cache: KVCache, config: EngineConfig) -> None:
        super().__init__(loaded, cache, config)
        self._token_ids = loaded.token_ids

    def _run(self, feeding: list[Fed], new: Sequence[NewSequence] = ()) -> list[Drawn]:
        drawn, ids = super()._run(feeding, new), self._token_ids
        if ids is None:
            return drawn
        return [each._replace(token_ids=[ids[token] for token in each.token_ids]) for each in drawn]
