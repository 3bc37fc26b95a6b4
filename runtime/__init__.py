"""Generate with draft heads: the target's own text, by Triton kernels on a GPU and by plain PyTorch elsewhere.

from eagle_slim.runtime import SpeculativeModel

model = SpeculativeModel.from_pretrained(target, head=..., draft_vocab=16000)
output = model.chat("Why is the sky blue?", max_new_tokens=100)
"""

import lazy_loader

# Which name lives where is said in __init__.pyi. A module is imported when one of its names is first used, so that
# `--help` loads neither torch nor transformers.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
