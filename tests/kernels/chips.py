"""GPUs that kernels are laid out and compiled for without being there."""

from eagle_slim.runtime.drafter.launch_params import Chip

# Opt-in shared memory per block: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
KNOWN_CHIPS = {
    80: Chip("sm_80", 80, 166912, 108),
    89: Chip("sm_89", 89, 101376, 128),
    90: Chip("sm_90", 90, 232448, 132),
    100: Chip("sm_100", 100, 232448, 148),
    120: Chip("sm_120", 120, 101376, 170),
}
