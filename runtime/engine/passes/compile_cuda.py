"""Compiles the CUDA passes of a model: each step is compared with the plain pass, launched and replayed, before use."""

from mycli.runtime.engine.passes.base import OnDecline
from mycli.runtime.engine.passes.captured import CapturedStep, PromptStep, decline_capture
from mycli.runtime.engine.passes.cuda import CudaPass
from mycli.runtime.engine.passes.gate import difference, layer_difference, tolerance
from mycli.runtime.engine.passes.graphs import Capture, GraphCapture, LayeredStep, Step
from mycli.runtime.engine.passes.plain import PlainPass
from mycli.runtime.errors import Declined, summarize_error
from mycli.runtime.kernels.triton.toolchain import missing_tool
from mycli.runtime.layers.transformer import Transformer
from mycli.runtime.models.config import KvDtype
from mycli.runtime.models.latent_spec import LatentAttentionSpec
from mycli.runtime.quantization.int4_vectors import FUSED_INT4_HEADS


def compile_cuda_pass(model: Transformer, kv: KvDtype, report: OnDecline) -> CudaPass | Declined:
    """Compile the fused pass of a model on a CUDA device, or return why it has none.

    It is first compared with the plain pass, launched and replayed; failures and differences are reported.
    """
    try:
        from mycli.runtime.engine.passes import fused
    except ImportError as error:
        return Declined("no-triton", {"error": summarize_error(error)})
    step = fused.FusedStep.compile(model, kv)
    return step if isinstance(step, Declined) else _compile_looping(model, step, kv, report, "cuda")


def compile_captured_pass(model: Transformer, kv: KvDtype, report: OnDecline) -> CudaPass | Declined:
    """Compile the captured plain pass of a model on a CUDA device, or return why it has none; as the fused pass."""
    return decline_capture(model) or _compile_looping(model, CapturedStep(model), kv, report, "captured")


def compile_prompt_pass(model: Transformer, kv: KvDtype, report: OnDecline) -> CudaPass | Declined:
    """Compile the captured pass of prompts of a model on a CUDA device, or return why it has none.

    The first prompt of each padded length is compared with the plain pass.
    """
    return decline_capture(model) or compile_step(model, PromptStep(model, kv), kv, GraphCapture(), report, "prompts")


def _compile_looping(
    model: Transformer, step: LayeredStep, kv: KvDtype, report: OnDecline, name: str
) -> CudaPass | Declined:
    try:
        from mycli.runtime.engine.passes import device_loop
    except ImportError as error:
        return Declined("no-triton", {"error": summarize_error(error)})
    result = compile_step(model, step, kv, GraphCapture(), report, name, step)
    if isinstance(result, CudaPass):
        result.loop = device_loop.compile_loop(model, step, GraphCapture(), report)
    return result


def compile_step(
    model: Transformer,
    step: Step,
    kv: KvDtype,
    capture: Capture,
    report: OnDecline,
    name: str = "cuda",
    layers: LayeredStep | None = None,
) -> CudaPass | Declined:
    """Compare `step` with the plain pass of `model` and return the pass that runs it, or why it cannot be used.

    layers: the step, if its layers are compared one by one too.
    """
    odd = {spec.head_dim for spec in model.config.attentions} - set(FUSED_INT4_HEADS)
    if kv == "int4" and any(isinstance(spec, LatentAttentionSpec) for spec in model.config.attentions):
        declined: Declined | None = Declined("latents-in-int4")
    elif kv == "int4" and odd:
        declined = Declined("int4-head", {"head_dim": min(odd)})
    else:
        try:
            most = tolerance(model, kv)
            declined = None if layers is None else layer_difference(model, layers, kv)
            declined = declined or difference(model, step, kv, capture, most=most)
        except Exception as error:  # noqa: BLE001  (reason: compilers and drivers raise all kinds)
            declined = missing_tool() or Declined("kernels-failed", {"error": summarize_error(error)})
    if declined is not None:
        report(declined)
        return declined
    return CudaPass(step, PlainPass(model), capture, report, name=name, tolerance=most)
