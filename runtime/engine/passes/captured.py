"""The captured plain pass: the modules of a model with every input on the device, for graphs of any family.

The plain pass knows positions, blocks and slots of states on the host, and attends sequence by sequence. Here
positions follow from lengths on the device, keys and values are written by index, and one kernel attends, or advances
the states, for all sequences (`device_sequences`), so a CUDA graph of the same operations serves any sequences. It
serves the models that the fused kernels do not.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from mycli.runtime.cache.kv_cache import KVCache
from mycli.runtime.device.placement import decline_dtype
from mycli.runtime.engine.passes.device_sequences import DeviceSequences
from mycli.runtime.engine.passes.graphs import StepInput
from mycli.runtime.engine.passes.plain import prompt_kinds
from mycli.runtime.errors import Declined
from mycli.runtime.kernels.routed import decline_routing
from mycli.runtime.kernels.triton.product.matmul import ACTIVATION_DTYPES, TritonMatmul
from mycli.runtime.layers.feed_forward import Experts
from mycli.runtime.layers.layer_part import PassContext
from mycli.runtime.layers.rope import Rope, RopeTables
from mycli.runtime.layers.streamed_experts import StreamedExperts
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.layers.vocabulary import finish_logits
from mycli.runtime.memory.graphs import MOST_ROWS, PROMPT_ROWS
from mycli.runtime.models.config import KvDtype, ModelConfig
from mycli.runtime.models.experts_spec import ExpertsSpec
from mycli.runtime.models.part_spec import AttentionSpec, RopeSpec
from mycli.runtime.quantization.low_rank import stored_product


def decline_captured(config: ModelConfig) -> Declined | None:
    """Return what in the declaration of a model cannot be captured, or None."""
    if config.bidirectional:
        return Declined("bidirectional")
    for spec in config.layer_specs:
        if isinstance(spec.mlp, ExpertsSpec) and (declined := decline_routing(spec.mlp.routing)) is not None:
            return declined  # what chooses in plain torch waits for the device
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


def decline_capture(model: Transformer) -> Declined | None:
    """Return why the operations of a loaded model cannot be captured, or None."""
    if model.dtype not in ACTIVATION_DTYPES:
        return decline_dtype(model.dtype)
    if any(isinstance(block.mlp, StreamedExperts) for block in model.layers()):
        return Declined("streamed-experts")
    if (declined := decline_captured(model.config)) is not None or model.device.type == "cpu":
        return declined
    from mycli.runtime.kernels.triton.paged_attention import decline_paged

    return decline_paged(model.device, model.dtype, 0, 1) or decline_waiting(model)


class CapturedStep:
    """The captured plain pass of one model; `decline_capture` says whether it has one."""

    def __init__(self, model: Transformer) -> None:
        self._model = model

    def takes(self, sequences: int, tokens: int) -> bool:
        attentions = [spec for spec in self._model.config.attentions if isinstance(spec, AttentionSpec)]
        heads = {(spec.heads // spec.kv_heads, spec.head_dim) for spec in attentions}
        return sequences * tokens <= MOST_ROWS and self._attends(heads, tokens)

    def _attends(self, heads: Iterable[tuple[int, int]], tokens: int) -> bool:
        """Return whether the kernel for decoding attends with each (heads of a key-value head, head_dim)."""
        # The reference, which attends where no kernel does, reads lengths on the host and so ends a capture.
        if self._model.device.type != "cuda":
            return True
        from mycli.runtime.kernels.triton.attention import head_fits
        from mycli.runtime.kernels.triton.product.matmul import chip_of

        chip, element = chip_of(self._model.device), self._model.dtype.itemsize
        fits = [head_fits(chip, group, head_dim, tokens, element) for group, head_dim in heads]
        return all(fits)

    def __call__(self, inputs: StepInput, rope: Rope, cache: KVCache, last: bool) -> Tensor:
        """Return fp32 logits [sequences, 1 if last else new, vocab]; the cache takes keys and values."""
        model = self._model
        x, context = self._enter(inputs, rope, cache)
        for block in model.layers():
            x = block(x, context)
        x = model.norm(model.leave(x)).view(*inputs.tokens.shape, -1)
        if inputs.hidden is not None:
            inputs.hidden.rows = x
        x = inputs.last_rows(x) if last else x
        logits: Tensor = finish_logits(model.head(x.flatten(0, 1)), model.config)
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
        sequences = DeviceSequences(inputs, cache)
        x, per_layer = self._model.enter(sequences.tokens.view(1, -1), lambda: sequences.positions)

        def inputs_of(layer: int) -> Tensor:
            assert isinstance(per_layer, Tensor)
            return per_layer[..., layer, :]

        return x, PassContext(_rows(rope, sequences.positions), sequences, inputs_of, sequences)


class PromptStep(CapturedStep):
    """The captured plain pass for prompts that are longer than what the fused pass or `CapturedStep` take.

    Its products unpack weights into memory that the plain pass uses too: a graph keeps all that it takes.
    """

    def __init__(self, model: Transformer, kv: KvDtype = "auto") -> None:
        """kv: the kind of the caches."""
        super().__init__(model)
        self._decoded = _decoded_heads(model, kv) if model.device.type == "cuda" else frozenset()
        packed = _unpacking(model)
        if packed:
            most = max(matmul.scratch_numbers(model.dtype.itemsize) for matmul in packed)
            scratch = torch.empty(most, dtype=model.dtype, device=model.device)
            for matmul in packed:
                matmul.use_scratch(scratch)

    def takes(self, sequences: int, tokens: int) -> bool:
        rows = sequences * tokens
        if not MOST_ROWS < rows <= PROMPT_ROWS or not self._attends(self._decoded, tokens):
            return False
        # More rows of an expert are multiplied by dense products, whose sizes the host must know.
        mixtures = [spec.mlp for spec in self._model.config.layer_specs if isinstance(spec.mlp, ExpertsSpec)]
        return all(rows * mixture.top_k <= MOST_ROWS * len(mixture.experts) for mixture in mixtures)


def _decoded_heads(model: Transformer, kv: KvDtype) -> frozenset[tuple[int, int]]:
    # (heads of a key-value head, head_dim) that the kernel for prompts does not support.
    from mycli.runtime.kernels.triton.paged_attention import decline_prompts

    kinds = prompt_kinds(model.config, model.device, model.dtype, kv)
    return frozenset((kind.group, kind.head_dim) for kind in kinds if decline_prompts(kind) is not None)


def _unpacking(model: Transformer) -> list[TritonMatmul]:
    linears = [linear for block in model.layers() for linear in block.products.values()]
    matmuls = [stored_product(matmul) for linear in (*linears, model.head) for matmul in linear.matmuls]
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
