"""LMDeploy's own config builder, model class and ``load_weights``. A job: ``{"head": folder}``.

LMDeploy has no CPU backend: the one question it asks a GPU here, whether it can do bf16, is answered for it.
"""

import stubs
import torch
from protocol import Json, serve
from safetensors.torch import load_file
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer  # noqa: F401

stubs.install({"mmengine"})


def is_unset(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.isnan() if parameter.is_floating_point() else parameter < 0


def run(job: Json) -> Json:
    from lmdeploy.pytorch import config as lmdeploy_config
    from lmdeploy.pytorch.models import patch

    lmdeploy_config.is_bf16_supported = lambda *_: True
    config = lmdeploy_config.ModelConfig.from_pretrained(
        job["head"], is_draft_model=True, spec_method="eagle3", num_spec_tokens=3, dtype="bfloat16"
    )
    head = load_file(f"{job['head']}/model.safetensors")
    with torch.inference_mode():
        model = patch.build_patched_model(config, device=torch.device("cpu"))
        for parameter in model.parameters():
            parameter.fill_(float("nan") if parameter.is_floating_point() else -1)
        model.load_weights((name, tensor.clone()) for name, tensor in head.items())
    return {
        "class": type(model).__name__,
        "vocab_size": config.vocab_size,
        "unloaded": [name for name, parameter in model.named_parameters() if is_unset(parameter).any()],
        "target_ids": model.draft_id_to_target_id.tolist(),
        "lm_head_equal": bool(torch.equal(model.lm_head.weight, head["lm_head.weight"])),
    }


if __name__ == "__main__":
    serve(run)
