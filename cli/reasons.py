"""The messages for reasons why a kernel or a pass does not take a piece of work, one for each code of `Declined`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mycli.runtime.errors import Declined

if TYPE_CHECKING:  # torch takes a second to import
    from mycli.runtime.engine.pass_choices import PassChoice
    from mycli.runtime.quantization.activations import ActivationChoice

# code -> message, which follows the name of the kernel or pass; the fields in braces are the values of `Declined.data`
REASONS: Mapping[str, str] = {
    # the native library of the CPU
    "no-native-library": "compiling failed: {compile}; prebuilt: {prebuilt}",
    "no-prebuilt-library": "the installation contains no prebuilt library",
    "no-prebuilt-for-processor": "the installation contains no prebuilt library for {instructions} instructions",
    "prebuilt-from-other-sources": "the prebuilt library was made from other sources ({file} is missing)",
    "no-compiler": "no GNU C++ compiler found (install g++, or set CXX)",
    "no-openmp": "torch has loaded no OpenMP library",
    "compiles-on-linux-only": "the library is compiled on Linux only, not on {system}",
    "compiler-timeout": "{compiler} took more than {seconds} s",
    "compiler-failed": "{compiler} failed: {error}",
    "untrusted-library-folder": "{folder} {problem}, so its libraries cannot be trusted "
    "(set XDG_CACHE_HOME to a folder of this user)",
    "unwritable-library-folder": "cannot write {folder}: {error} (set XDG_CACHE_HOME to a folder that can be written)",
    "no-space-for-library": "no space left in {folder}: {free} free (free some space, or set {variable} to a folder on "
    "another disk)",
    "system-error": "{error}",
    # what any kernel may need
    "not-on-cpu": "runs on the CPU only, not on {device}",
    "not-on-cuda": "runs on CUDA devices only, not on {device}",
    "tensors-not-on-cpu": "supports only tensors on the CPU",
    "cpu-floats-only": "supports only bf16 and fp32 on the CPU",
    "cpu-without-gradient": "supports only bf16 and fp32 on the CPU, without a gradient",
    "cpu-contiguous-without-gradient": "supports only contiguous tensors on the CPU, without a gradient",
    "no-gradient": "has no backward pass, and a tensor requires a gradient",
    "fp32-outside-inference": "computes fp32 in inference mode only",
    "fp32-products-not-rounded": "rounds fp32 to bf16 during calibration only",
    "no-fast-bf16-dots": "needs AVX-512 bf16 dot products at full rate",
    "activation-dtype": "{dtype} activations are not supported",
    "rows-not-contiguous": "supports only contiguous rows",
    "rows-not-whole-vectors": "supports only contiguous rows whose length is a multiple of {multiple}",
    # products of packed and dense weights
    "inputs-not-multiple": "{inputs} input features are not a multiple of {multiple}",
    "outputs-not-multiple": "{outputs} output features are not a multiple of {multiple}",
    "group-not-multiple": "groups of {group} inputs are not a multiple of {multiple}",
    "packing-not-integers": "supports integers of {bits} bits and E2M1, in groups that are a multiple of {multiple}, "
    "not {packing}",
    "packing-not-int4-groups": "supports int4 in groups, not {packing}",
    "packing-not-a-table": "supports 8-bit floats and tables of 16 values, not {packing}",
    "packing-group-not-multiple": "supports groups that are a multiple of {multiple}, not {packing}",
    "dense-product-types": "supports bf16 times bf16 and fp32 times fp32, on the CPU only",
    "dense-weight-layout": "supports only contiguous weights",
    "compute-capability": "kernels for packed weights need compute capability {needed}; this device has {found}",
    "only-for-older-gpus": "is for GPUs below compute capability {capability}; here weights stay packed",
    "untested-on-amd": "has never been run on an AMD GPU",
    "triton-not-installed": "the package triton is not installed",
    "other-cuda-device": "launches on cuda:{current}, the device of this thread, not on {device}",
    "no-c-compiler": "Triton needs a C compiler to launch kernels: install gcc (Debian: apt install gcc)",
    "no-python-headers": "Triton needs the headers of Python, and {folder} has no Python.h: install python3-dev "
    "(Fedora: python3-devel)",
    "triton-cache-unwritable": "Triton cannot keep compiled kernels in {folder}: set TRITON_CACHE_DIR to a folder that "
    "can be written",
    "kernel-raises": "failed on this machine: {error}",
    "product-check-failed": "is wrong on this machine: a product of {packing} is off by {error:.1%}",
    "weights-unpacked": "{reason}; packed weights are stored as {dtype}, which takes more memory",
    "no-prompt-copy": "{count} products have no {kind} copy for prompts: their weights are not packed, or of a size "
    "that 8-bit products do not take",
    "weights-decoded-every-pass": "no kernel multiplies {packing} weights here; each pass decodes them, which is slow "
    "({kernel}: {reason})",
    "computes-embeddings": "torch computes embeddings, in sums that differ between processors",
    "no-fused-multiply-add": "this processor has no fused multiply-add",
    # bits of activations
    "activations-portable": "what 8 bits change was not measured by the model's author, and each machine may choose "
    "otherwise",
    "activations-requested": "requested",
    "activations-not-measured": "the model's card does not say what 8 bits add",
    "activations-add": "8 bits add {added:.1%} of the model's KL; the limit is {most:.0%}",
    "activations-in-tiles": "8 bits allowed by the card, but not faster with AMX",
    "activations-file-not-measured": "what 8 bits change has not been measured on this file",
    "activations-move": "8 bits move this file's predictions by a mean KL of {moved:.2g}; the limit is {most:g}",
    # norms, activations, rotation
    "norm-gain-layout": "supports only a contiguous gain in the dtype of the input or fp32",
    "gate-layout": "supports only gates in the dtype of the input, without a gradient",
    "rotary-table-shapes": "supports only tables of cosines and sines of one shape, no wider than a head",
    "rotary-layout": "supports only adjacent heads, and contiguous tables in the dtype of the input",
    # attention
    "indices-not-int32": "supports only contiguous int32 starts, lengths and block tables on the CPU",
    "attention-types": "supports bf16 and fp32 queries, and caches of bf16, fp32, int8 or int4",
    "latent-sizes": "supports only latents and rotated values whose sizes are a multiple of {multiple}",
    "cache-vector-size": "supports cached vectors of {expected} elements, not of {size}",
    "cache-layout": "supports only keys and values of one layout, with the last two axes contiguous",
    "cache-scales-layout": "supports only scales in the layout of their vectors",
    "int4-vector-types": "supports bf16 and fp32 on the CPU, and head dimensions that are a multiple of {multiple}",
    # experts
    "experts-not-packed-alike": "supports only experts of one shape and group size, packed for this kernel",
    "experts-not-tables-alike": "supports only experts of one shape and one table of values",
    "experts-not-dense-alike": "supports only experts with contiguous weights of one shape",
    "dense-experts-types": "supports only bf16 weights without a gradient",
    "many-rows-of-an-expert": "above {rows} rows of an expert, decoding its weight once is faster",
    "experts-not-alike-in-triton-layout": "supports only experts of one shape, all packed alike or all in 16 bits",
    "not-triton-layout": "supports only weights in the Triton layout",
    "too-many-rows-per-expert": "{pairs} rows for {experts} experts are too many: decoding the weights once is faster",
    "cuda-rows-without-gradient": "supports only CUDA tensors with at least one row, without a gradient",
    "routing-check-failed": "is wrong on this machine: a small routing or expert product differs from the reference",
    # recurrent layers
    "convolution-size": "supports channels that are a multiple of {multiple}, and 2 to {taps} taps",
    "delta-rule-size": "supports head dimensions that are a multiple of {multiple}, and keys of at most {key_dim}",
    "scan-size": "supports dimensions that are a multiple of {multiple}, and states of at most {state_dim}",
    "scan-operands": "supports only contiguous rows, and fp32 states of matching shapes",
    "convolution-operands": "supports only contiguous fp32 weights and states of matching shapes",
    "delta-rule-operands": "supports only contiguous rows, and fp32 states of matching shapes",
    "runs-without-own-slots": "supports only runs that cover all rows, each with a slot of its own",
    "gated-norm-operands": "supports only contiguous heads whose size is a multiple of {multiple}, each with a gate",
    # sampling
    "logits-not-fp32-rows": "supports only rows of fp32 logits on the CPU",
    "logits-not-one-fp32-row": "supports only one contiguous row of fp32 logits on the CPU",
    # rounding weights
    "rounding-dtypes": "supports weights and scales of bf16, fp16 and fp32, not {weight} and {scales}",
    "rounding-group-size": "supports groups of {least} to {most} weights, not of {group}",
    "weight-beyond-limit": "a weight is not finite, or its absolute value is above {limit}",
    "no-memory-for-a-row": "no memory for a row of {columns} weights",
    "columns-layout": "supports contiguous tensors on the CPU with at most {most} columns, not {columns}",
    # passes: the native CPU pass
    "cache-dtype": "does not read a KV cache of {dtype}",
    "many-rows": "takes at most {most} tokens in a call; {rows} are as fast layer by layer",
    "host-random-numbers": "sampled tokens need the random numbers of the host",
    "runs-known-by-host": "supports only the runs of a captured pass",
    "host-sampling": "computes logits; tokens are sampled on the host",
    "dynamic-rope": "the rotary tables depend on the length of the sequence (dynamic RoPE scaling)",
    "recurrent-state": "layers with a recurrent state run one pass at a time",
    "per-layer-inputs": "per-layer inputs are computed by the host before each pass",
    "position-embeddings": "positions have a table of embeddings, which the host adds before each pass",
    "embedding-norm": "embeddings are normed by the host before each pass",
    "logit-softcap": "logits are capped at {cap}, which is done on the host",
    "embedding-layout": "the embedding is not contiguous",
    "unknown-part": "layers have a part without native code: {part}",
    "clipped-attention": "queries, keys and values are clipped at {clip}",
    "differential-attention": "attention is the difference of two softmaxes",
    "key-biases": "each key has a bias that depends on its value",
    "residual-gains": "the residual stream is multiplied by a vector before each sum",
    "attention-gate": "the output of attention is gated by {linear}",
    "attention-values": "values have a size, a scale or a norm of their own",
    "mlp-norm": "an MLP has a norm before its last product",
    "parallel-experts": "attention and experts run in parallel",
    "parallel-norms": "attention and MLP run in parallel, each after a norm of its own",
    "parallel-mixers": "attention and a recurrent mixer other than Mamba-2 run in parallel",
    "mamba-gate": "the output of Mamba-2 is normalized before its gate",
    "gate-threshold": "gates of the MLP below a threshold are zero",
    "several-streams": "layers read and write several residual streams",
    "expert-projections": "experts read a projection of the residual stream",
    "expert-inputs": "the weights of experts multiply their inputs",
    "early-router": "the router reads the input of the layer, before attention",
    "routing-kind": "does not route by {scoring} scores",
    "activation": "the activation {activation} has no native code here",
    "norm-by-head": "each head has a norm of its own",
    "gain-dtype": "the gain of a norm is {dtype} or not contiguous; bf16 and fp32 are supported",
    "recurrent-gain-dtype": "the gain of a recurrent layer's norm is {dtype}; bf16 is supported",
    "vector-multiple": "{field} is {count}, not a multiple of {multiple}",
    "weight-format": "the weight format {format} has no native product",
    "adapter": "an adapter is computed next to packed weights",
    "dense-weight": "a dense weight is {dtype} with {inputs} input features; bf16 and multiples of 32 are supported",
    "product-parts": "linears that share an input are {count} products; at most {most} are supported",
    "bias-dtype": "a bias is {dtype}; bf16 is supported",
    "scalar-dtype": "the factor of a layer is {dtype}; bf16 is supported",
    "expert-parts": "the linears of an expert are {count} products; one is supported",
    "mixed-experts": "the experts of a layer do not have one shape, packing and bias",
    # passes: the fused GPU pass
    "no-triton": "Triton cannot be imported ({error})",
    "latents-in-int4": "the captured pass does not read latents in int4",
    "int4-head": "the fused kernels read an int4 KV cache only for heads of 64, 128 and 256, not {head_dim}",
    "kernels-failed": "the GPU kernels failed: {error}",
    "logits-differ": "the logits of the GPU kernels differ by {percent} from the plain pass",
    "no-graph-memory": "the GPU has no memory left to capture some passes: their kernels are launched one by one",
    "layer-differs": "the GPU kernels of layer {layer} differ by {percent} from the plain layer",
    "layer-cache-differs": "the GPU kernels store keys, values or states of layer {layer} that differ by {percent}",
    "replay-differs": "a replayed pass gives other results than a launched one",
    "hidden-states-differ": "the hidden states of the GPU kernels differ by {percent} from the plain pass",
    "draft-states-differ": "recurrent states after accepted drafts differ by {percent} from the plain pass",
    "device-loop-failed": "sampling on the device failed: {error}",
    "greedy-differs": "the device chose tokens {tokens} instead of {expected}",
    "draw-differs": "the device drew tokens {tokens} instead of {expected}",
    "unequal-tokens": "the sequences do not have equally many new tokens",
    "cache-block-size": "cache blocks have {size} positions, which is no multiple of 64",
    "attention-shape": "the GPU attention does not support {group} heads of {head_dim} for each key-value head",
    "prompt-attention-raises": "the GPU attention of prompts failed ({error}); torch computes it",
    "prompt-attention-differs": "the GPU attention of prompts, with heads of {head_dim}, is off by {error:.1%}; torch "
    "computes it",
    "hidden-states": "hidden states are held for at most {most} rows, not {rows}",
    "drafted-states": "what advances recurrent states by drafted tokens is kept for at most {most} rows, not {rows}",
    "fused-shape": "it does not take {sequences} sequences of {tokens} new tokens",
    "many-penalties": "penalties and biases are applied on the device for at most {most} sequences, not {sequences}",
    "many-stop-tokens": "models with recurrent states have at most {most} stop tokens here, not {tokens}",
    "some-logits": "logits of some rows of each sequence are requested; the fused pass computes the last row or all",
    "not-compared": "a pass of this shape has not been compared with the plain pass yet",
    "not-one-product": "{linear} is not one product of packed or 16-bit weights",
    "no-packed-product": "no weight is packed for its kernels",
    "dense-product-shape": "{columns} columns in {dtype}: dense weights need a multiple of 32 in 16 bits, without gaps",
    "adapted-product": "an adapter is computed next to {linear}",
    "int4-partial-rotation": "an int4 KV cache needs heads that rotate whole",
    "linear-bias": "{linear} has a bias",
    "streamed-experts": "not all experts are in memory",
    "packed-router": "{linear} is not one dense product",
    "layer-recurrent": "some layers have a recurrent state instead of keys and values",
    "bidirectional": "every token attends to the whole text: the model computes embeddings and has no cache",
    "latent-attention": "some layers have latent attention",
    "gated-attention": "the output of attention is gated",
    "attention-chunks": "attention sees chunks of the context",
    "layer-parts": "some layers have further parts, or read the keys and values of another layer",
    "no-input-norm": "experts have no norm before them",
    "parallel-parts": "attention and MLP run in parallel",
    "inner-norm": "some products have a norm before them inside a part",
    "output-norm": "experts have a norm after them",
    "norm-kind": "the norms are not RMS norms with one gain",
    "norm-all-heads": "queries or keys are normed over all heads together, after the rotation",
    "key-value-kind": "values are scaled, clipped, narrower than keys or taken from them",
    "rotation-kind": "the rotary embedding depends on the length of the sequence",
    "query-scale": "queries are scaled by position in layers without rotation",
    "activation-kind": "the activation is neither SiLU nor GELU with a gate",
    "expert-norms": "experts or their router have norms of their own",
    "shared-expert-norms": "the shared expert has norms of its own",
    "experts-read-by-host": "experts are not all packed alike or in 16 bits, so the host must read which have rows",
    "router-bias": "experts have scales, or the gate of the shared expert has a bias",
    "expert-biases": "the shared expert has biases",
}


def activation_text(choice: "ActivationChoice") -> str:
    """How CPU kernels round activations, and why."""
    where = "" if choice.bits == 16 or choice.widest == 8 else f" next to weights of at most {choice.widest} bits"
    return f"activations of {choice.bits} bits{where}: {reason(choice.reason)}"


def reason(declined: Declined) -> str:
    """Return the message for `declined`; values that are themselves `Declined` are replaced by their messages."""
    return REASONS[declined.code].format_map({field: in_words(value) for field, value in declined.data.items()})


def in_words(value: object) -> object:
    """Return the message of a `Declined`, the messages of a mapping of names to `Declined`, else `value`."""
    if isinstance(value, Declined):
        return reason(value)
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {in_words(entry)}" for name, entry in value.items())
    return value


# The kinds of work of `PassChoice`.
WORK: Mapping[str, str] = {
    "prompt": "prompt of 512 tokens",
    "decode": "greedy decoding",
    "sample": "sampled decoding",
    "batch": "greedy decoding of 8 sequences",
    "verify": "verification of 4 draft tokens",
}
PASSES: Mapping[str, str] = {
    "cuda": "fused GPU pass",
    "captured": "captured GPU pass",
    "prompts": "captured GPU pass of prompts",
    "cpu": "native CPU pass",
    "plain": "plain pass",
}
_OTHER_DEVICE = ("not-on-cpu", "not-on-cuda")


@dataclass(frozen=True)
class PassRow:
    """One kind of work in words: the pass that runs it, and why faster ones do not; slow: a plain pass decodes."""

    work: str
    chosen: str
    why: str
    slow: bool

    @property
    def text(self) -> str:
        return f"{self.work}: {self.chosen}" + (f" ({self.why})" if self.why else "")


def pass_rows(choices: "Sequence[PassChoice]", verbose: bool = False) -> list[PassRow]:
    """Return a row for each kind of work; `verbose` adds passes of other devices."""
    rows = []
    for choice in choices:
        reasons = []
        for name, declined in choice.declined.items():
            if name == choice.chosen:
                reasons.append(f"one token a call: {reason(declined)}")
            elif verbose or declined.code not in _OTHER_DEVICE:
                reasons.append(f"{PASSES.get(name, name)}: {reason(declined)}")
        chosen = PASSES.get(choice.chosen, choice.chosen) + (", several tokens a call" if choice.makes_tokens else "")
        slow = choice.chosen == "plain" and choice.work != "prompt" and bool(reasons)
        rows.append(PassRow(WORK[choice.work], chosen, "; ".join(reasons), slow))
    return rows


def passes_json(choices: "Sequence[PassChoice]") -> list[dict[str, Any]]:
    """Return the choices as JSON, with a code and a message for each pass that declines."""
    return [
        {
            "work": choice.work,
            "pass": choice.chosen,
            "tokens_in_pass": choice.makes_tokens,
            "declined": {
                name: {"code": declined.code, "reason": reason(declined)} for name, declined in choice.declined.items()
            },
        }
        for choice in choices
    ]
