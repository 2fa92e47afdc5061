#pragma once

#include <fusedmoe/jobs/bench.hpp>

#include "command.hpp"
#include "ranks.hpp"

namespace fusedmoe::cli {

/// `fusedmoe bench --ranks`: the layers of `bench` on the ranks of an mpirun.
Status BenchOnRanks(const BenchOptions& bench, RankFlags flags, int threads, Determinism determinism,
                    Output& output);

}  // namespace fusedmoe::cli
