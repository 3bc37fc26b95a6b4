"""Load draft heads with SGLang's own code.

Executed for real: the model registry, the model class, its ``load_weights`` fed by SGLang's safetensors iterator,
``EagleDraftWorker.init_token_map`` and ``init_lm_head``, ``load_token_map``. Not executed: any GPU kernel.

A job: ``{"head": folder, "algorithm": "EAGLE3" or "EAGLE", "token_map": path or null, "target": folder}`` or
``{"token_map": path}``. Result: ``class``, ``unloaded`` (parameters that kept any NaN they were filled with before
loading), ``hot_token_ids``, ``lm_head_rows``, and whether ``lm_head`` and ``fc`` equal the files.
"""

import tempfile
import types
from pathlib import Path

import stubs
import torch
from protocol import Json, serve

# Imported before the stubs, so that transformers sees which optional packages are really there.
from transformers import AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer  # noqa: F401

stubs.install({"orjson", "IPython", "torchvision"})

from sglang.srt.distributed import parallel_state  # noqa: E402
from sglang.srt.model_loader.weight_utils import safetensors_weights_iterator  # noqa: E402
from sglang.srt.models.registry import ModelRegistry  # noqa: E402
from sglang.srt.runtime_context import get_context, get_parallel  # noqa: E402
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402
from sglang.srt.speculative.spec_utils import load_token_map  # noqa: E402


def load(job: Json) -> Json:
    config = AutoConfig.from_pretrained(job["head"])
    model_class, _ = ModelRegistry.resolve_model_cls(config.architectures)
    model = model_class(config)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    files = sorted(str(path) for path in Path(job["head"]).glob("*.safetensors"))
    model.load_weights(safetensors_weights_iterator(files))

    target = dict(safetensors_weights_iterator([str(Path(job["target"]) / "model.safetensors")]))
    embed = torch.nn.Parameter(target["model.embed_tokens.weight"], requires_grad=False)
    head = torch.nn.Parameter(target["lm_head.weight"], requires_grad=False)
    hot = share(model, embed, head, job["algorithm"])
    stored = dict(safetensors_weights_iterator(files))
    result = {
        "class": model_class.__name__,
        "unloaded": [name for name, parameter in model.named_parameters() if parameter.isnan().any()],
        "hot_token_ids": None if hot is None else hot.tolist(),
        "lm_head_rows": model.lm_head.weight.shape[0],
        "embedding_is_targets": model.model.embed_tokens.weight is embed,
        "fc_equal": bool(torch.equal(model.model.fc.weight, stored["fc.weight"])),
    }
    if "lm_head.weight" in stored:
        rows = stored["lm_head.weight"]
        result["lm_head_equal"] = bool(torch.equal(model.lm_head.weight[: len(rows)], rows))
    elif hot is not None:
        result["lm_head_equal"] = bool(torch.equal(model.lm_head.weight, head[hot]))
    return result


def share(model: torch.nn.Module, embed: torch.Tensor, head: torch.Tensor, algorithm: str) -> torch.Tensor | None:
    """Let SGLang's draft worker share the target's embedding and LM head with a draft; returns its hot token ids."""
    worker = types.SimpleNamespace(
        speculative_algorithm=SpeculativeAlgorithm.from_string(algorithm),
        draft_runner=types.SimpleNamespace(model=model),
        target_worker=types.SimpleNamespace(model_runner=types.SimpleNamespace(model=types.SimpleNamespace())),
        _resolve_shared_embed_and_head=lambda: (embed, head),
    )
    EagleDraftWorker.init_token_map(worker)
    EagleDraftWorker.init_lm_head(worker)
    return worker.hot_token_id


def run(job: Json) -> Json:
    if "head" not in job:
        return {"token_map": load_token_map(job["token_map"]).tolist()}
    with get_context().override_server_args(device="cpu", tp_size=1, speculative_token_map=job.get("token_map")):
        return load(job)


def main() -> None:
    with get_context().override_server_args(device="cpu", tp_size=1), tempfile.TemporaryDirectory() as folder:
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{folder}/group", backend="gloo"
        )
        get_parallel().override_permanently(tp_rank=0, pp_rank=0, attn_tp_rank=0, attn_dp_rank=0, attn_cp_rank=0)
        parallel_state.initialize_model_parallel(backend="gloo")
        torch.set_default_dtype(torch.bfloat16)
        serve(run)


if __name__ == "__main__":
    main()
