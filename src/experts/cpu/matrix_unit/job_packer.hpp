#pragma once

#include "experts/cpu/matrix_unit/matrix_unit.hpp"

namespace fusedmoe::cpu {

/// Hidden states that visit an expert of the jobs to tokens of tiles, once each, in rows of their own; jobs
/// then copy lines instead of quantizing a token again for each of its experts.
void PackJobTokens(const JobContext& context, const Workers& workers);

/// Rows of a group of jobs, hidden states or intermediate values, into the tiles of a GEMM.
void PackJobs(const JobContext& context, const Workers& workers, const JobGroup& group, Gemm gemm);

}  // namespace fusedmoe::cpu
