#include "experts/cuda/prefill/prefill_instance.cuh"

FMOE_PREFILL_INTEGER_KERNELS(kInt8)
