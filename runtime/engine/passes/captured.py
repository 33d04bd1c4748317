"""The captured plain pass: the modules of a model with every input on the device, for graphs of any family.

The plain pass knows positions and blocks on the host, and attends sequence by sequence. Here positions follow from
lengths on the device, keys and values are written by index, and one kernel attends for all sequences, so a CUDA graph
of the same operations serves any sequences. It serves the models that the fused kernels do not.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import PACKED, KVCache
from mycli.runtime.engine.passes.graphs import StepInput
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.paged import Ragged, Scoring
from mycli.runtime.kernels.registry import PAGED_ATTENTION, PROMPT_ATTENTION, VECTOR_PACKING
from mycli.runtime.kernels.routed import decline_routing
from mycli.runtime.kernels.triton.product.matmul import ACTIVATION_DTYPES, TritonMatmul
from mycli.runtime.layers.attention import KeyValue
from mycli.runtime.layers.feed_forward import Experts
from mycli.runtime.layers.layer_part import PassContext
from mycli.runtime.layers.rope import Rope, RopeTables
from mycli.runtime.layers.streamed_experts import StreamedExperts
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.layers.vocabulary import finish_logits
from mycli.runtime.memory.graphs import MOST_ROWS, PROMPT_ROWS
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.latent_spec import LatentAttentionSpec
from mycli.runtime.models.part_spec import AttentionSpec, RopeSpec


class _DeviceSequences:
    """The sequences of a pass as tensors, and their attention (`AttentionContext`)."""

    def __init__(self, inputs: StepInput, cache: KVCache) -> None:
        # Padding repeats the first sequence: it writes the same values to the same places, and no kernel needs a case
        # for it.
        (count, new), present = inputs.tokens.shape, inputs.lengths > 0
        lengths = torch.where(present, inputs.lengths, inputs.lengths[:1])
        table = torch.where(present[:, None], inputs.block_table, inputs.block_table[:1])
        self.tokens = torch.where(present[:, None], inputs.tokens, inputs.tokens[:1])
        positions = lengths.long()[:, None] + torch.arange(-new, 0, device=lengths.device)
        counts, self._rows = inputs.counts, None
        if counts is not None:
            # A row of padding stores the keys and values of the last token before it, at the same place.
            counts = torch.where(present, counts, counts[:1])
            row = torch.arange(new, device=lengths.device)[None].minimum(counts.long()[:, None] - 1)
            positions = positions.gather(1, row)
            self._rows = (row + new * torch.arange(count, device=lengths.device)[:, None]).flatten()
        self.positions = positions.flatten()
        self._cache = cache
        self._blocks = table.long().gather(1, positions // cache.block_size).flatten()
        self._offsets = self.positions % cache.block_size
        starts = torch.arange(0, (count + 1) * new, new, dtype=torch.int32, device=lengths.device)
        self._ragged = Ragged(starts, lengths, table, new, counts=counts)

    def attend_latent(self, layer: int, spec: LatentAttentionSpec, query: KeyValue, new: KeyValue) -> Tensor:
        raise AssertionError("`decline_captured` refuses latent attention")

    def attend(
        self, layer: int, query: Tensor, new: KeyValue | None, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        if new is not None:
            key, value = new[0][0], new[1][0]
            if self._rows is not None:
                key, value = key.index_select(0, self._rows), value.index_select(0, self._rows)
            if self._cache.dtype == PACKED:
                key, value = VECTOR_PACKING(key), VECTOR_PACKING(value)
            self._cache.write_at(layer, self._blocks, self._offsets, key, value)
        layer = layer if spec.kv_source is None else spec.kv_source
        scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        scoring = Scoring(scale, spec.window, spec.softcap or 0.0, sinks)
        if query.shape[1] > MOST_ROWS:
            attended = PROMPT_ATTENTION.attempt(query[0], *self._cache.all(layer), self._ragged, scoring)
            if attended is not None:
                return attended[None]
        return PAGED_ATTENTION(query[0], *self._cache.all(layer), self._ragged, scoring)[None]


def decline_captured(config: ModelConfig) -> Declined | None:
    """Return what in the declaration of a model cannot be captured, or None."""
    for spec in config.layer_specs:
        if spec.recurrent is not None:
            return Declined("layer-recurrent")  # its states are found by the host
        if spec.latent is not None:
            return Declined("latent-attention")
        if spec.mixer is not None and spec.attention.chunk is not None:
            return Declined("attention-chunks")
        if isinstance(spec.mlp, ExpertsSpec):  # what chooses in plain torch waits for the device
            if spec.mlp.routing.groups > 1:
                return Declined("expert-groups")
            if (declined := decline_routing(spec.mlp.routing)) is not None:
                return declined
    return None


def decline_waiting(model: Transformer) -> Declined | None:
    """Return which experts make the host wait for their route, which ends a capture, or None."""
    from mycli.runtime.kernels.triton.experts import ExpertTable

    for block in model.layers():
        for linears in (block.mlp.gate_up, block.mlp.down) if isinstance(block.mlp, Experts) else ():
            weights, _ = linears.operands(range(len(linears)))
            if weights is None or isinstance(ExpertTable.from_weights(weights), Declined):
                return Declined("experts-read-by-host")
    return None


class CapturedStep:
    """The captured plain pass of one model; see `compile`."""

    def __init__(self, model: Transformer) -> None:
        self._model = model

    @classmethod
    def compile(cls, model: Transformer) -> "CapturedStep | Declined":
        """Return the step of a loaded model, or why its operations cannot be captured."""
        if model.dtype not in ACTIVATION_DTYPES:
            return Declined("activation-dtype", {"dtype": str(model.dtype).removeprefix("torch.")})
        if any(isinstance(block.mlp, StreamedExperts) for block in model.layers()):
            return Declined("streamed-experts")
        if (declined := decline_captured(model.config)) is not None:
            return declined
        # On a CPU nothing is captured.
        return (None if model.device.type == "cpu" else decline_waiting(model)) or cls(model)

    def takes(self, sequences: int, tokens: int) -> bool:
        if sequences * tokens > MOST_ROWS:
            return False
        if self._model.device.type != "cuda":
            return True
        from mycli.runtime.kernels.triton.attention import head_fits
        from mycli.runtime.kernels.triton.product.matmul import chip_of

        chip, element = chip_of(self._model.device), self._model.dtype.itemsize
        heads = {(spec.heads // spec.kv_heads, spec.head_dim) for spec in self._model.config.attentions}
        fits = [head_fits(chip, group, head_dim, tokens, element) for group, head_dim in heads]
        return all(fits)

    def __call__(self, inputs: StepInput, rope: Rope, cache: KVCache, last: bool) -> Tensor:
        """Return fp32 logits [sequences, 1 if last else new, vocab]; the cache takes keys and values."""
        model = self._model
        x, context = self._enter(inputs, rope, cache)
        for block in model.layers():
            x = block(x, context)
        x = model.leave(x).view(*inputs.tokens.shape, -1)
        x = inputs.last_rows(x) if last else x
        logits: Tensor = finish_logits(model.head(model.norm(x.flatten(0, 1))), model.config)
        return logits.view(*x.shape[:2], -1)

    def run_layer(
        self,
        layer: int,
        stream: Tensor,
        inputs: StepInput,
        rope: Rope,
        cache: KVCache,
        router_scores: Tensor | None = None,
    ) -> Tensor:
        """Run one layer as `LayeredStep.run_layer`."""
        block = list(self._model.layers())[layer]
        _, context = self._enter(inputs, rope, cache)
        if router_scores is None or not isinstance(block.mlp, Experts):
            after: Tensor = block(stream[None], context)
            return after[0]
        handle = block.mlp.router.register_forward_hook(lambda *_: router_scores)
        try:
            after = block(stream[None], context)
        finally:
            handle.remove()
        return after[0]

    def _enter(self, inputs: StepInput, rope: Rope, cache: KVCache) -> tuple[Tensor, PassContext]:
        sequences = _DeviceSequences(inputs, cache)
        x, per_layer = self._model.enter(sequences.tokens.view(1, -1))

        def inputs_of(layer: int) -> Tensor:
            assert isinstance(per_layer, Tensor)
            return per_layer[..., layer, :]

        return x, PassContext(_rows(rope, sequences.positions), sequences, inputs_of)


class PromptStep(CapturedStep):
    """The captured plain pass for prompts that are longer than what the fused pass or `CapturedStep` take.

    Its products unpack weights into memory that the plain pass uses too: a graph keeps all that it takes.
    """

    def __init__(self, model: Transformer) -> None:
        super().__init__(model)
        packed = _unpacking(model)
        if packed:
            most = max(matmul.scratch_numbers(model.dtype.itemsize) for matmul in packed)
            scratch = torch.empty(most, dtype=model.dtype, device=model.device)
            for matmul in packed:
                matmul.use_scratch(scratch)

    def takes(self, sequences: int, tokens: int) -> bool:
        rows = sequences * tokens
        if not MOST_ROWS < rows <= PROMPT_ROWS:
            return False
        # More rows of an expert are multiplied by dense products, whose sizes the host must know.
        mixtures = [spec.mlp for spec in self._model.config.layer_specs if isinstance(spec.mlp, ExpertsSpec)]
        return all(rows * mixture.top_k <= MOST_ROWS * len(mixture.experts) for mixture in mixtures)


def _unpacking(model: Transformer) -> list[TritonMatmul]:
    linears = [linear for block in model.layers() for linear in block.products.values()]
    matmuls = [matmul for linear in (*linears, model.head) for matmul in linear.matmuls]
    return [matmul for matmul in matmuls if isinstance(matmul, TritonMatmul)]


def _rows(rope: Rope, positions: Tensor) -> Mapping[RopeSpec, RopeTables]:
    tables = rope.every(0)
    assert tables is not None
    return {
        spec: RopeTables(
            table.cos.index_select(0, positions),
            table.sin.index_select(0, positions),
            table.interleaved,
            None if table.query_scale is None else table.query_scale.index_select(0, positions),
        )
        for spec, table in tables.items()
    }
