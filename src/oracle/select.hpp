#pragma once

#include <span>

#include <fusedmoe/machine.hpp>
#include <fusedmoe/oracle.hpp>

#include "moe/backend.hpp"
#include "oracle/host_table.hpp"

namespace fusedmoe {

/// Asks every backend of this build whether it can run `problem` on `machine`, keeps every objection of every
/// one, and chooses the first that can and may (oracle/backends.inc). Nothing chosen is an answer, not an
/// error (ToStatus makes one of it); errors: kUsage for an unknown backend name. The layer finds the code by
/// FindBackend(chosen->backend). Thread-safe.
Result<Selection> SelectBackend(const MoeProblem& problem, const Machine& machine,
                                const SelectionRequest& request = {});

/// The same over a table of the caller; tests bring their own.
Result<Selection> SelectFrom(std::span<const HostBackend> table, const MoeProblem& problem,
                             const Machine& machine, const SelectionRequest& request);

}  // namespace fusedmoe
