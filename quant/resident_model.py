"""Runs a whole model in memory by the passes that answer prompts: they have the same bits on every CPU."""

import torch
from torch import Tensor

from mycli.quant.progress import ReportProgress, silent
from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.device.placement import Placement
from mycli.runtime.engine.loading.loader import load_model
from mycli.runtime.layers.vocabulary import finish_logits


class ResidentModel:
    """The model of a folder, loaded; `quant.evaluate` measures it as it does a `StreamedModel`."""

    def __init__(self, folder: ModelFolder, placement: Placement) -> None:
        self.folder, self.placement, self.config = folder, placement, folder.config
        self._runner = load_model(folder, placement)

    @torch.inference_mode()
    def hidden(self, tokens: Tensor, progress: ReportProgress = silent) -> Tensor:
        """The input of the head for int64 [windows, context]."""
        rows: list[Tensor] = []
        for index, window in enumerate(tokens.tolist()):
            rows.append(self._runner.hidden_states(window))
            progress("sequences", index + 1, len(tokens))
        return torch.stack(rows)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits fp32 [rows, vocabulary] for hidden states [rows, hidden]."""
        model = self._runner.model
        return finish_logits(model.head(hidden), self.config, model.portable)
