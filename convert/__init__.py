"""Draft heads in, slim artifacts out.

    from eagle_slim.convert import ConvertOptions, convert_head, verify_artifact

    (conversion,) = convert_head(None, ConvertOptions(draft_vocab=32000, out="slim-head"))
    assert verify_artifact(conversion.folder).ok

Names are loaded when first used, so that importing this package stays quick.
"""

import lazy_loader

# Which name lives where is said in __init__.pyi. A module is imported when one of its names is first used, so that
# `--help` loads neither torch nor transformers.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
