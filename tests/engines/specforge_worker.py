"""SpecForge's own loader and its vocabulary-mapping check. A job: ``{"head": folder}``."""

import torch
from protocol import Json, serve
from safetensors.torch import load_file


def run(job: Json) -> Json:
    from specforge.core.compact_teacher import validate_vocab_mapping_consistency
    from specforge.modeling.auto import AutoDraftModel

    model, info = AutoDraftModel.from_pretrained(job["head"], output_loading_info=True, dtype=torch.bfloat16)
    head = load_file(f"{job['head']}/model.safetensors")
    state = model.state_dict()
    result = {
        "class": type(model).__name__,
        "missing": sorted(info["missing_keys"]),
        "unexpected": sorted(info["unexpected_keys"]),
        "different": [name for name, tensor in head.items() if not torch.equal(state[name], tensor)],
    }
    validate_vocab_mapping_consistency(model.t2d, model.d2t)
    return result


if __name__ == "__main__":
    serve(run)
