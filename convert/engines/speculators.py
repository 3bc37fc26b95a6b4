"""speculators, which trains heads and converts them into its own form."""

from . import rules

_LOST = "is not carried over by speculators convert"

ENGINE = rules.Engine(
    "speculators",
    ("speculators",),
    ("0.9.0", "0.9.0"),
    "converted and reloaded",
    eagle3=(
        "error if other number of taps: fc takes {head.num_taps} captured layers, its converter builds 3; "
        "serve the artifact itself with vLLM or SGLang",
        "warning if other taps: tap layers of the head are not carried over by speculators convert; give them: "
        "--algorithm-kwargs '{{\"eagle_aux_hidden_state_layer_ids\": [{head.taps_text}]}}'",
        f"{rules.PARTIAL_ROTATION}{_LOST}, so it rotates other values; add it to the transformer_layer_config that it "
        "writes",
        rules.HEAD_NORMS + "are dropped by its converter, which writes a Llama layer; serve the artifact itself with "
        "vLLM",
        f"warning if norm before residual: norm_before_residual {_LOST}; "
        "give it: --algorithm-kwargs '{{\"norm_before_residual\": true}}'",
        f"warning if window: the layer's sliding window {_LOST}; "
        'add "layer_types": ["sliding_attention"] and "sliding_window": {head.sliding_window} to the '
        "transformer_layer_config that it writes",
    ),
    dflash=("error if z-lab's form: it reads the nested form of its own alone; serve it with vLLM",),
    eagle=("error if given: its converter knows no EAGLE-1/2 heads; " + rules.BY_TOKEN_MAP,),
    serves=False,
)
