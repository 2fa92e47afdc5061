#include "experts/cuda/prefill/prefill_instance.cuh"

FMOE_PREFILL_KERNELS(kMxfp6E3M2)
