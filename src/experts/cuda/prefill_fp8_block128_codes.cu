#include "experts/cuda/prefill_codes_instance.cuh"

FMOE_PREFILL_CODE_KERNELS(kFp8Block)
