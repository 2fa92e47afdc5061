#include "experts/cuda/prefill_instance.cuh"

FMOE_PREFILL_CODE_KERNELS(kInt8)
