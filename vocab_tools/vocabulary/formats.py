"""The token maps of other tools, which import_map.py reads and export_map.py writes.

    format       file                     content                                            read and written by
    freq         freq_N.pt                list[int] or int64 tensor, ids in rank order       FR-Spec, SGLang, vLLM
    vllm         NAME.json or NAME.pt     flat list of ids in rank order                     vLLM `draft_token_map`
    d2t-pt       NAME.pt                  {"d2t": offsets [N], "t2d": mask [V]}              SpecForge
    modelopt     d2t.pt                   offsets [N]                                        NVIDIA ModelOpt
    safetensors  NAME.safetensors         tensors d2t and, mostly, t2d; others are ignored   heads, SafeAILab's form
    npy          folder                   d2t.npy and t2d.npy                                speculators
    json         NAME.json                our own form, with provenance                      eagle-slim
                 NAME.txt, NAME.json      ids as text; {"token_ids": ids}: read alone        scripts
                 folder                   an artifact: the rank order in eagle_slim.json     eagle-convert

Maps are written with ascending ids, as every trainer expects. Such a file does not tell which ids matter most, so a
vocabulary read from it has no smaller prefix. Pickle is only ever read with `weights_only=True`, numpy files without
pickle.
"""

from __future__ import annotations

from typing import Literal, get_args

MapFormat = Literal["freq", "vllm", "d2t-pt", "modelopt", "safetensors", "npy", "json"]
FORMATS: tuple[MapFormat, ...] = get_args(MapFormat)

PICKLES = (".pt", ".pth", ".bin")
NPY_NAMES = ("d2t.npy", "t2d.npy")
