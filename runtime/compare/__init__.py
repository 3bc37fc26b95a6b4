"""Draft vocabularies, heads and trees side by side: accepted length, speed, and which to use on this device.

model, prompts = SpeculativeModel.from_pretrained(), load_prompts("prompts.jsonl")
result = compare(model, prompts, CompareOptions(sizes=("full", 4096)))
print(result.to_text())
result.write("out/compare")
"""

import lazy_loader

# As in the folder above: `eagle-compare --help` imports neither torch nor transformers.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
