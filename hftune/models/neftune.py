"""NEFTune: uniform noise on the input embeddings while training. Knows neither tasks nor processes.

Source: Jain et al. 2023, "NEFTune: Noisy Embeddings Improve Instruction Finetuning", algorithm 1: to each number of a text's
embeddings, one from [-1, 1] is added, times alpha / sqrt(L D).
"""

# Shapes: B texts, T tokens of the longest, L real tokens of one, D width of an embedding.

from __future__ import annotations

import math
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from hftune.errors import ConfigError
from hftune.models.kinds import is_of_transformers
from hftune.models.packing import MASK


class Noise:
    """The noise of ``train.neftune_alpha``, drawn for each text by its tokens, the seed and the step.

    So it depends neither on processes nor on micro-batches nor on padding; texts of the same tokens in one step get the same.

    Raises:
        ConfigError: the model is not one of transformers' that reads tokens.
    """

    def __init__(self, model: nn.Module, alpha: float):
        self.alpha = alpha
        self.key: tuple[int, int] | None = None
        """Seed and step. None: no noise, as for what is computed before training."""
        self._given: tuple[Tensor | None, Tensor | None] = None, None
        embeddings = None
        if is_of_transformers(model):
            with suppress(NotImplementedError):  # as models of images say
                embeddings = (model.get_encoder() if model.config.is_encoder_decoder else model).get_input_embeddings()
        bare = getattr(embeddings, "original_module", getattr(embeddings, "base_layer", embeddings))  # within peft's
        if embeddings is None or not isinstance(bare, nn.Embedding):
            raise ConfigError(
                f"train.neftune_alpha={alpha:g} needs a model of transformers that reads tokens, unlike {type(model).__name__}."
            )
        self._is_added = True
        model.register_forward_pre_hook(self._note, with_kwargs=True)
        embeddings.register_forward_hook(self._add)

    def _note(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not self._is_added:
            raise ConfigError(
                f"train.neftune_alpha: {type(model).__name__} does not embed its input_ids as they are. Leave it out."
            )
        self._given, self._is_added = (kwargs.get("input_ids"), kwargs.get(MASK)), self.key is None or not model.training

    def _add(self, embeddings: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        ids_BT, mask_BT = self._given
        is_input = ids_BT is not None and args[0].data_ptr() == ids_BT.data_ptr()  # and no tokens of a decoder, which have none
        if self.key is None or not embeddings.training or not is_input:
            return output
        self._is_added = True
        mask_BT = torch.ones_like(ids_BT) if mask_BT is None else mask_BT
        ids_BT, mask_BT = ids_BT.flatten(0, -2), mask_BT.flatten(0, -2)  # of multiple choice (B, 1, T)
        noise_BTD = torch.zeros_like(output, dtype=torch.float32)
        generator = torch.Generator(output.device)
        for row, (ids_T, mask_T) in enumerate(zip(ids_BT.cpu(), mask_BT.bool().cpu(), strict=True)):
            real_L = ids_T[mask_T]
            what = blake2b(repr((*self.key, real_L.tolist())).encode(), digest_size=8).digest()
            generator.manual_seed(int.from_bytes(what, "big") >> 1)
            drawn_LD = torch.rand((len(real_L), output.shape[-1]), generator=generator, device=output.device)
            noise_BTD[row, mask_T.to(output.device)] = (2 * drawn_LD - 1) * (self.alpha / math.sqrt(max(1, drawn_LD.numel())))
        return output + noise_BTD.to(output.dtype)
