#include "experts/cuda/prefill/prefill_instance.cuh"

FMOE_PREFILL_KERNELS(kIq4)
