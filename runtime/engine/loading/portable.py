"""Checks whether a loaded model computes the same bits on every CPU, and what differs otherwise."""

from mycli.runtime.checkpoint.model_folder import ModelFolder
from mycli.runtime.engine.passes import Passes
from mycli.runtime.engine.passes.cpu import CpuPass
from mycli.runtime.errors import Declined, ModelError
from mycli.runtime.kernels.cpu.portable import decline_portable
from mycli.runtime.kernels.cpu.table import TableMatmul
from mycli.runtime.kernels.reference import DenseMatmul
from mycli.runtime.layers.latent import LatentAttention
from mycli.runtime.layers.linear import Linear
from mycli.runtime.layers.transformer import Transformer


def decline_model(model: Transformer, passes: Passes, embeds: bool) -> Declined | None:
    """Return why portable bits are not available for a model, or None: native code then computes all of it.

    embeds: the model computes embeddings.
    """
    if embeds:
        return Declined("computes-embeddings")
    # Parts that native code does not run may use functions and sums of torch, which differ between processors.
    declined = decline_portable(model.device, model.dtype) or passes.declined.get("cpu")
    native = (candidate for candidate in passes.passes if isinstance(candidate, CpuPass))
    return declined or next((candidate.declined for candidate in native), None)


def require_portable(folder: ModelFolder, model: Transformer, passes: Passes) -> None:
    """Raise ModelError unless all of the model is computed with portable bits."""
    declined = decline_model(model, passes, folder.embedding is not None or folder.cross_encoder is not None)
    if declined is not None:
        message = "this model has no portable bits on this machine"
        raise ModelError(message, code="without-portable-bits", data={"declined": declined})


def differing_parts(model: Transformer) -> list[str]:
    """Return the names of linears whose sums have another order on other CPUs unless bits are portable."""
    blocks = [linear for block in model.layers() for linear in block.products.values()]
    others = [module for module in model.modules() if isinstance(module, Linear)]
    dense = {id(linear): linear for linear in (*blocks, *others) if _is_dense(linear)}
    names = [linear.specs[0].name for linear in dense.values()]
    latent = [module for module in model.modules() if isinstance(module, LatentAttention)]
    return names + [module.kv_b.specs[0].name for module in latent]


def _is_dense(linear: Linear) -> bool:
    return any(isinstance(matmul, DenseMatmul | TableMatmul) for matmul in linear.matmuls)
