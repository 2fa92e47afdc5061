#include "experts/cuda/prefill_instance.cuh"

FMOE_PREFILL_KERNELS(kMxfp4)
