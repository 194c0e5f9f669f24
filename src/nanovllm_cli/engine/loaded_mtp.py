"""The layer behind a model's own that predicts further tokens, loaded from the model's checkpoint."""

from __future__ import annotations

from nanovllm_cli.config import EngineConfig
from nanovllm_cli.engine.loaded_model import LoadedModel
from nanovllm_cli.engine.memory import check_weights_fit
from nanovllm_cli.errors import UnsupportedError
from nanovllm_cli.models.mtp import MTP, mtp_spec
from nanovllm_cli.progress import LoadProgress
from nanovllm_cli.quant.format_names import parse_format
from nanovllm_cli.weights.checkpoint import Checkpoint
from nanovllm_cli.weights.loader import WeightFormats, head_name, load_mtp
from nanovllm_cli.weights.quantized import open_reader
from nanovllm_cli.weights.tensor_names import mtp_names_of, of_that_layer


class LoadedMTP(LoadedModel):
    """Of `loaded`, whose embedding and head it has. UnsupportedError where the checkpoint has no such layer, or one of a family
    whose is not known; otherwise as LoadedModel."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig, loaded: LoadedModel, progress: LoadProgress) -> None:
        table = mtp_names_of(checkpoint)
        if table is None:
            hint = "leave --mtp out; --speculate N and --draft-model NAME guess without one"
            if loaded.spec.architecture.startswith("gemma4"):
                hint = "Gemma 4's is a model of its own: --draft-model NAME-assistant, such as google/gemma-4-E2B-it-assistant"
            raise UnsupportedError(f"{checkpoint.path} has no layer that predicts further tokens (MTP)", hint)
        self.platform, self._group, self._beside, self._chosen = loaded.platform, None, {}, None
        self.spec = self.own_spec = mtp_spec(loaded.spec)
        self.dtype = loaded.dtype
        reader = open_reader(checkpoint)
        wanted = None if config.quant is None else parse_format(config.quant)
        self._formats = WeightFormats(checkpoint, reader, wanted, table)
        names = of_that_layer(table, reader.names())
        needed = self._formats.num_bytes(self.dtype, self.platform.dense_bytes, names)
        head = self._formats.num_bytes(self.dtype, self.platform.dense_bytes, [head_name(table, self.spec)])
        needed += head * self.spec.vocab_size // loaded.spec.vocab_size
        check_weights_fit(needed, self.platform.available_bytes())
        self.model = MTP(self.spec, self._kit(), loaded.model)
        load_mtp(self.model, checkpoint, reader, table, progress)
        self._count()
