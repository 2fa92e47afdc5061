#include "experts/cuda/prefill/prefill_codes_instance.cuh"

FMOE_PREFILL_CODE_KERNELS(kFp8Block)
