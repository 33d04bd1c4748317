"""The models whose shapes are measured, and the limits that memory bandwidth sets for them.

Sizes are those of the published config.json files of Llama-3.1-8B and Qwen3-4B; `TINY` is for a machine without a GPU.
"""

from dataclasses import dataclass, replace

from mycli.runtime.memory.ceiling import bytes_per_step
from mycli.runtime.memory.plan import MemoryPlan
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.models.part_spec import RopeScaling
from mycli.runtime.quantization.scheme import Packing

INT4 = Packing(4, 128)
PREDICTED_READ = 4300.0  # GB/s of an H200's copy rate as published: for predictions made before there is a measurement

LLAMA_8B = ModelConfig(
    "llama", 4096, 32, 32, 8, 128, 14336, 128256, 131072, 1e-5, 500000.0,
    RopeScaling("llama3", 8.0, 8192, 1.0, 4.0), tie_embeddings=False, dtype="bfloat16",
)  # fmt: skip
QWEN3_4B = ModelConfig(
    "qwen3", 2560, 36, 32, 8, 128, 9728, 151936, 40960, 1e-6, 1000000.0,
    RopeScaling(), tie_embeddings=True, dtype="bfloat16", qk_norm=True,
)  # fmt: skip
TINY = ModelConfig(
    "llama", 256, 2, 4, 2, 64, 512, 512, 4096, 1e-5, 10000.0, RopeScaling(), tie_embeddings=False, dtype="bfloat16"
)
MODELS = {"Llama-3.1-8B": LLAMA_8B, "Qwen3-4B": QWEN3_4B}


def tiny(config: ModelConfig) -> ModelConfig:
    """Return `TINY` with the fields that define `config`'s kind of model."""
    return replace(TINY, model_type=config.model_type, tie_embeddings=config.tie_embeddings, qk_norm=config.qk_norm)


def packings(config: ModelConfig, packing: Packing | None) -> dict[str, Packing]:
    """Return the packing of every linear that can be packed, including an untied head."""
    return {} if packing is None else dict.fromkeys([linear.name for linear in config.linears()], packing)


@dataclass(frozen=True)
class Floor:
    """The minimum time of reading some weights once."""

    name: str
    nbytes: int
    times: int  # per token

    def microseconds(self, gigabytes_per_second: float) -> float:
        """Return the microseconds of one read."""
        return self.nbytes / gigabytes_per_second / 1e3


def floors(config: ModelConfig, packing: Packing | None) -> list[Floor]:
    """Return the products of one decoding step; linears that share an input are one product."""
    wanted = [(name, specs, config.layers) for name, specs in config.layer(0).products().items()]
    wanted.append(("head", (config.head(),), 1))
    result = []
    for name, specs, times in wanted:
        dense = packing is None or (name == "head" and config.tie_embeddings)
        sizes = [(spec.out_features, spec.in_features) for spec in specs]
        nbytes = sum(2 * n * k if dense or packing is None else packing.bytes(n, k) for n, k in sizes)
        result.append(Floor(name, nbytes, times))
    return result


def token_bytes(config: ModelConfig, packing: Packing | None, depth: int = 0, batch: int = 1) -> int:
    """Return the bytes that a decoding step reads: weights, norms, and a 16-bit cache of `depth` tokens a sequence."""
    return bytes_per_step(MemoryPlan(config, packings(config, packing), max(depth, 1), batch), depth)


def roofline_seconds(flops: float, nbytes: float, gigabytes_per_second: float, teraflops: float) -> float:
    """Return the minimum seconds for both: arithmetic at `teraflops` (10^12/s), memory at `gigabytes_per_second`."""
    return max(flops / teraflops / 1e12, nbytes / gigabytes_per_second / 1e9)


def predictions(gigabytes_per_second: float) -> str:
    """Return Markdown: bytes and minimum time of each product and token, for int4 in groups of 128 and for bf16."""
    lines = [
        "| model | weights | product | MB | times a token | least us each |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for model, config in MODELS.items():
        for name, packing in (("int4-g128", INT4), ("bf16", None)):
            for floor in floors(config, packing):
                least = floor.microseconds(gigabytes_per_second)
                lines.append(
                    f"| {model} | {name} | {floor.name} | {floor.nbytes / 1e6:.1f} | {floor.times} | {least:.1f} |"
                )
            for depth in (0, 2048, 8192):
                nbytes = token_bytes(config, packing, depth)
                least = nbytes / gigabytes_per_second / 1e3
                label = f"token, depth {depth}: at most {1e6 / least:.0f} tokens/s"
                lines.append(f"| {model} | {name} | {label} | {nbytes / 1e6:.0f} | 1 | {least:.0f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(predictions(PREDICTED_READ), end="")
