"""speculators' own ``convert`` and reload. A job: ``{"head": folder, "target": folder, "out": folder}``.

With ``"draft": folder`` in place of the head a DFlash draft of its own form is only loaded.
"""

import torch
from protocol import Json, serve
from safetensors.torch import load_file


def run(job: Json) -> Json:
    from speculators import SpeculatorModel
    from speculators.convert import convert_model

    if "draft" in job:
        draft, stored = SpeculatorModel.from_pretrained(job["draft"]), load_file(f"{job['draft']}/model.safetensors")
        loaded = draft.state_dict()
        different = [name for name, tensor in stored.items() if not torch.equal(loaded[name].to(tensor.dtype), tensor)]
        return {"class": type(draft).__name__, "different": different, "tensors": len(stored)}
    convert_model(model=job["head"], verifier=job["target"], algorithm="eagle3", output_path=job["out"])
    model = SpeculatorModel.from_pretrained(job["out"])
    head = load_file(f"{job['head']}/model.safetensors")
    target_rows = load_file(f"{job['target']}/model.safetensors")["lm_head.weight"]
    state = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in model.state_dict().items()}
    ids = head["d2t"] + torch.arange(len(head["d2t"]))
    return {
        "different": [name for name, tensor in head.items() if not torch.equal(state[name], tensor)],
        "not_from_head": sorted(set(state) - set(head)),
        # What it trains against: the target's rows picked by t2d must be of the same tokens, in the same order.
        "teacher_rows_equal": bool(torch.equal(model.verifier_lm_head.weight, target_rows[ids])),
    }


if __name__ == "__main__":
    serve(run)
