#pragma once

#include "command.hpp"

namespace fusedmoe::cli {

/// `fusedmoe doctor --ranks`: what mpirun should be told, and under mpirun, what it was told. kNo when a
/// setting would make failures hang or pass for success.
Status ExamineRanks(double deadline_seconds, Output& output);

}  // namespace fusedmoe::cli
