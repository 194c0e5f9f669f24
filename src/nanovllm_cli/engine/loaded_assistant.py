"""An assistant with its weights, which guesses out of what a loaded model keeps."""

from __future__ import annotations

from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.loaded_model import LoadedModel
from nanovllm_cli.engine.memory import check_weights_fit
from nanovllm_cli.models.assistant import Assistant
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.quant.format_names import parse_format
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.loader import WeightFormats, load_weights, read_assistant
from nanovllm_cli.weights.quantized import open_reader


class LoadedAssistant(LoadedModel):
    """For `loaded`, whose embedding and cache it reads. config: its own. UnsupportedError where it is made for another model;
    otherwise as LoadedModel."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, loaded: LoadedModel, progress: LoadProgress) -> None:
        self.platform, self._group, self._beside, self._chosen = loaded.platform, None, {}, None
        reader = open_reader(checkpoint)
        self.spec = self.own_spec = read_assistant(checkpoint, reader, loaded.spec)
        self.dtype = loaded.dtype
        self._formats = WeightFormats(checkpoint, reader, None if config.quant is None else parse_format(config.quant))
        check_weights_fit(self._formats.num_bytes(self.dtype, self.platform.dense_bytes), self.platform.available_bytes())
        self.model = Assistant(self.spec, self._kit(), loaded.model)
        load_weights(self.model, checkpoint, reader, progress)
        self._count()
